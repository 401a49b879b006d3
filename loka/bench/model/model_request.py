"""`loka bench model` without the command line: check a request, measure it, write the report on the way."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from loka.bench import roofline
from loka.bench.device import BenchDevice, describe
from loka.bench.machine import environment, require_gpu
from loka.bench.model.model_report import MeasuredModel, ModelReport, write_files
from loka.bench.model.model_run import BlockRun, RunLimits
from loka.bench.model.model_subject import ModelSubject
from loka.bench.model.model_variants import ModelVariant, StepBlock, chosen_blocks, chosen_variants
from loka.bench.model.zoo_policies import ZOO, checked_names, zoo_policy
from loka.bench.options import check_least, check_seconds
from loka.bench.packages import Workshop
from loka.bench.results import usable_folder, utc_minute
from loka.bench.timing import ROUNDS, Progress
from loka.model.callables import current_directory_importable
from loka.mods.policy_loader import load_policy
from loka.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """The command-line options, unchecked."""

    names: tuple[str, ...] = ()  # policies, and models of the zoo; empty: the whole zoo
    variants: str | None = None
    only: str | None = None  # modes and launches
    casting: str | None = None
    batch: int | None = None  # None: the policy's
    rounds: int | None = None
    seconds: float = math.inf

    def command(self) -> str:
        """The command line that repeats the request."""
        parts = ["loka", "bench", "model", *self.names]
        seconds = None if self.seconds == math.inf else f"{self.seconds:g}"
        for option, value in (
            ("--variants", self.variants),
            ("--only", self.only),
            ("--casting", self.casting),
            ("--batch", self.batch),
            ("--rounds", self.rounds),
            ("--seconds", seconds),
        ):
            parts += [option, str(value)] if value is not None else []
        return shlex.join(parts)


@dataclass(frozen=True, slots=True)
class ModelJob:
    """A checked request."""

    policies: tuple[Policy | str, ...]  # the names of those that are the zoo's
    variants: tuple[ModelVariant, ...]
    blocks: tuple[StepBlock, ...]


def check(request: ModelRequest) -> ModelJob:
    """Check everything that can be checked before a model is built. Raises InputError."""
    names = checked_names(request.names)
    check_least("--batch", request.batch)
    check_least("--rounds", request.rounds)
    check_seconds(request.seconds)
    variants, blocks = chosen_variants(request.variants), chosen_blocks(request.only, request.casting)
    policies = tuple(name if name in ZOO else load_policy(name) for name in names)
    return ModelJob(policies, variants, blocks)


def run(request: ModelRequest, out: Path, progress: Progress) -> ModelReport:
    """Check a request and measure it on the current GPU; the files in `out` are rewritten with every outcome.

    Raises InputError for an invalid request, without a GPU, and if `out` is not writable.
    """
    job = check(request)
    require_gpu()
    usable_folder(out)
    limits = RunLimits(ROUNDS if request.rounds is None else request.rounds, time.monotonic() + request.seconds)
    device, peaks = BenchDevice(), roofline.peaks_of(torch.cuda.get_device_name())
    variants = tuple(variant.name for variant in job.variants)
    report = ModelReport(request.command(), utc_minute(), environment(), job.blocks, variants, ())
    for each in job.policies:
        if limits.left <= 0:
            progress(f"no time is left for {each if isinstance(each, str) else each.name} and what follows")
            break
        done = report.models
        with current_directory_importable(), Workshop() as workshop, device.session():
            for model in _model(each, job, request.batch, workshop, device, peaks, limits, progress):
                report = replace(report, models=(*done, model))
                write_files(report, out)
    return report


def _model(
    given: Policy | str,
    job: ModelJob,
    batch: int | None,
    workshop: Workshop,
    device: BenchDevice,
    peaks: roofline.Peaks | None,
    limits: RunLimits,
    progress: Progress,
) -> Iterator[MeasuredModel]:
    """One model so far, after every outcome."""
    policy = load_policy(workshop.write(f"{given}.yaml", zoo_policy(given))) if isinstance(given, str) else given
    if batch is not None:
        policy = replace(policy, model=replace(policy.model, batch_size=batch))
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
        for outcome in BlockRun(subject, block, device, peaks, limits, progress).outcomes(variants):
            model = model.with_outcome(outcome)
            if block.training and not model.step and outcome.figures is not None:
                model = replace(model, step=subject.sample(True).words)
            yield model
