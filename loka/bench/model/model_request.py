"""`loka bench model` without the command line: check a request, measure it, write the report on the way."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from loka.bench.device import BenchDevice, describe
from loka.bench.machine import environment, require_gpu
from loka.bench.model.model_report import MeasuredModel, ModelReport, write_files
from loka.bench.model.model_run import BlockRun, RunLimits
from loka.bench.model.model_subject import ModelSubject
from loka.bench.model.model_variants import ModelVariant, StepBlock, chosen_blocks, chosen_variants
from loka.bench.options import check_least, check_seconds
from loka.bench.packages import Workshop
from loka.bench.results import usable_folder, utc_minute
from loka.bench.timing import ROUNDS, Progress
from loka.errors import InputError
from loka.model.callables import current_directory_importable
from loka.mods.policy_loader import load_policy
from loka.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The command-line options, unchecked."""

    policies: tuple[str, ...]  # their files
    variants: str | None = None
    only: str | None = None  # modes and launches
    casting: str | None = None
    batch: int | None = None  # None: the policy's
    rounds: int | None = None
    seconds: float = math.inf
    gpus: int | None = None  # None: whole steps on one, in every variant
    link: float | None = None  # GB/s of a GPU, for estimates with `gpus`

    def command(self) -> str:
        """The command line that repeats the request."""
        parts = ["loka", "bench", "model", *self.policies]
        seconds = None if self.seconds == math.inf else f"{self.seconds:g}"
        for option, value in (
            ("--variants", self.variants),
            ("--only", self.only),
            ("--casting", self.casting),
            ("--batch", self.batch),
            ("--rounds", self.rounds),
            ("--seconds", seconds),
            ("--gpus", self.gpus),
            ("--link", None if self.link is None else f"{self.link:g}"),
        ):
            parts += [option, str(value)] if value is not None else []
        return shlex.join(parts)

    def checked_policies(self) -> tuple[Policy, ...]:
        """The policies, with the batch size of `--batch`. Raises InputError for these and for a wrong number."""
        if not self.policies:
            raise InputError("loka bench model: name the policy of the model: loka bench model POLICY")
        check_least("--batch", self.batch)
        check_least("--rounds", self.rounds)
        check_seconds(self.seconds)
        loaded = tuple(map(load_policy, self.policies))
        if self.batch is None:
            return loaded
        return tuple(replace(each, model=replace(each.model, batch_size=self.batch)) for each in loaded)


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A checked request."""

    policies: tuple[Policy, ...]
    variants: tuple[ModelVariant, ...]
    blocks: tuple[StepBlock, ...]


def check(request: ModelRequest) -> ModelJob:
    """Check everything that can be checked before a model is built. Raises InputError."""
    policies = request.checked_policies()
    variants, blocks = chosen_variants(request.variants), chosen_blocks(request.only, request.casting)
    return ModelJob(policies, variants, blocks)


def run(request: ModelRequest, out: Path, progress: Progress) -> ModelReport:
    """Check a request and measure it on the current GPU; the files in `out` are rewritten with every outcome.

    Raises InputError for an invalid request, without a GPU, and if `out` is not writable.
    """
    job = check(request)
    require_gpu()
    usable_folder(out)
    limits = RunLimits(ROUNDS if request.rounds is None else request.rounds, time.monotonic() + request.seconds)
    device = BenchDevice()
    variants = tuple(variant.name for variant in job.variants)
    report = ModelReport(request.command(), utc_minute(), environment(), job.blocks, variants, ())
    for each in job.policies:
        if limits.left <= 0:
            progress(f"no time is left for {each.name} and what follows")
            break
        done = report.models
        with current_directory_importable(), Workshop() as workshop, device.session():
            for model in _model(each, job, workshop, device, limits, progress):
                report = replace(report, models=(*done, model))
                write_files(report, out)
    return report


def _model(
    policy: Policy,
    job: ModelJob,
    workshop: Workshop,
    device: BenchDevice,
    limits: RunLimits,
    progress: Progress,
) -> Iterator[MeasuredModel]:
    """One model so far, after every outcome."""
    model = MeasuredModel(
        policy.name,
        policy.model.factory,
        policy.model.batch_size,
        tuple(dict.fromkeys(rule.use for rule in policy.mods)),
    )
    progress(f"{model.name}: building the model")
    try:
        subject = ModelSubject(policy, workshop)
    except Exception as error:  # noqa: BLE001  (a factory may raise anything: it is reported, and the next goes on)
        failure = describe(error)
        progress(f"{model.name}: failed: {failure}")
        yield replace(model, failure=failure)
        return
    variants = tuple(variant for variant in job.variants if subject.has_adaptations or not variant.adapted)
    for block in job.blocks:
        if limits.left <= 0:
            progress(f"{model.name}: no time is left for {block.label} and what follows")
            return
        for outcome in BlockRun(subject, block, device, limits, progress).outcomes(variants):
            model = model.with_outcome(outcome)
            if block.training and not model.step and outcome.figures is not None:
                model = replace(model, step=subject.sample(True).words)
            yield model
