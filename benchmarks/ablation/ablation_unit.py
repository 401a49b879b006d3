"""One unit of an ablation: planned, generated, compiled, captured, and timed in its turn."""

from __future__ import annotations

import copy
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

from benchmarks.ablation.rows_columns import Column, Unit
from benchmarks.cells import decibels
from benchmarks.packages import refuse_nothing
from benchmarks.replays import Timing, summarise, time_replays
from benchmarks.steps import peak_mib, user_step
from loka.bench.device import WARM_UPS, BenchDevice, describe, float32_products
from loka.bench.model.whole_step import Example, real_model
from loka.bench.packages import Workshop
from loka.bench.quality.training import train
from loka.bench.quality.training_job import job_of
from loka.dispatch import LokaWarning, Patch
from loka.dispatch.bind.bind_warnings import fp8_not_expected
from loka.errors import CheckFailedError
from loka.model.callables import current_directory_importable
from loka.mods.adapt import adapt
from loka.mods.adaptation import Adaptation
from loka.mods.modded_model import built_model
from loka.mods.policy_loader import load_policy
from loka.plan.planner import make_plan
from loka.policy.policy import Policy

MEASURED_MS = 800  # of replays
RUNS_ON_CPU = 5
MODES = ("train", "infer")


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The measurements to take of every unit."""

    modes: tuple[str, ...]  # of MODES
    loss_steps: int  # 0: the model is not trained
    device: str  # cuda or cpu


@dataclass(frozen=True, slots=True)
class Mode:
    """Measured cost and error of one step."""

    timing: Timing
    peak_mib: float | None  # of one step, model included; None on a CPU
    launches: int | None  # kernels in the captured graph; None if they could not be counted
    output_db: float | None  # of an inference, signal to error against the same adapted model in float32


@dataclass(frozen=True, slots=True)
class Loss:
    """Losses after a short training."""

    train: float  # mean of the last tenth of the steps
    test: float  # log loss on the test batches, of the averaged weights
    ne: float  # normalised entropy of the same
    steps: int


@dataclass(frozen=True, slots=True)
class UnitOutcome:
    """The result of one unit: measurements and failures by mode; the key "" is a failure of the whole unit."""

    modes: dict[str, Mode]
    loss: Loss | None
    failures: dict[str, str]
    seconds: float  # that preparing and measuring it took

    @property
    def reasons(self) -> dict[str, str]:
        """Reason of a failure -> what failed: "train, infer", or "" for the whole unit."""
        found: dict[str, list[str]] = {}
        for what, why in self.failures.items():
            found.setdefault(why, []).append(what)
        return {why: ", ".join(each) for why, each in found.items()}


@dataclass(frozen=True, slots=True)
class Captured:
    """A mode that is ready to be timed. `check` raises VerifyError if a planned kernel did not run."""

    replay: Callable[[], object]
    peak_mib: float | None
    launches: int | None
    output_db: float | None
    check: Callable[[], None]


class PreparedUnit:
    """A unit whose modes are captured. Exceptions are kept as failures; `tell` is called with lines of progress."""

    def __init__(self, unit: Unit, wanted: RunSettings, tell: Callable[[str], None]) -> None:
        def done(what: str) -> None:
            tell(f"{unit.label}: {what} after {time.perf_counter() - self._start:.0f} s")

        self._start = time.perf_counter()
        self._wanted = wanted
        self._captured: dict[str, Captured] = {}
        self._loss: Loss | None = None
        self._failures: dict[str, str] = {}
        with self._failures_kept(""), current_directory_importable(), Workshop() as workshop:
            made = UnitPackage.of(unit, workshop)
            base = real_model(made.policy, "cpu")
            done("planned")
            for mode in wanted.modes:
                with self._failures_kept(mode):
                    self._captured[mode] = capture(made, base, mode == "train", wanted.device)
                    done(f"{mode} ready")
            if wanted.loss_steps:
                with self._failures_kept("loss"):
                    self._loss = trained(made, wanted)
                    done("trained")

    def finish(self) -> UnitOutcome:
        """Time the captured modes. Nothing else may use the device meanwhile."""
        modes = {}
        for mode, each in self._captured.items():
            with self._failures_kept(mode):
                timing = timed(each.replay, self._wanted.device)
                each.check()
                modes[mode] = Mode(timing, each.peak_mib, each.launches, each.output_db)
        self._captured.clear()
        return UnitOutcome(modes, self._loss, self._failures, time.perf_counter() - self._start)

    @contextmanager
    def _failures_kept(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  (planner, compiler and device may raise anything: it is reported)
            self._failures[what] = describe(error)


@dataclass(frozen=True, slots=True)
class UnitPackage:
    """A planned unit: policy, adaptations and example inputs of its model, and its generated package if any."""

    policy: Policy
    adaptations: tuple[Adaptation, ...]
    example: Example
    package: ModuleType | None  # None for the adapted model under torch.compile

    @classmethod
    def of(cls, unit: Unit, workshop: Workshop) -> UnitPackage:
        """Plan and generate. Raises LokaError if the planner fails, or if the column would measure another one."""
        path = workshop.write(f"{unit.package}.yaml", unit.text)
        policy = load_policy(path)
        built, adapted = built_model(policy)
        package = None
        if unit.column is not Column.COMPILED:
            plan = make_plan(path)
            refuse_nothing(plan, unit.column is Column.FP8)
            package = workshop.package(plan)
        return cls(policy, adapted.adaptations, Example(built.args, built.kwargs), package)

    def ready(self, model: nn.Module, training: bool) -> Patch | None:
        """Adapt or patch the model in place; returns the patch, None without a package."""
        if self.package is None:
            adapt(model, self.adaptations)
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LokaWarning)  # about the device and a new model: irrelevant here
            patch: Patch = self.package.apply(model, mode="train" if training else "infer")
        return patch


def capture(made: UnitPackage, base: nn.Module, training: bool, device: str) -> Captured:
    """Prepare a copy of `base` in bfloat16, run it, measure memory and error, and capture one step."""
    gpu = BenchDevice() if device == "cuda" else None
    held = gpu.allocated() if gpu is not None else 0
    torch._dynamo.reset()
    expected = [] if training else _reference(made, base, device)
    with float32_products("high"):
        model = copy.deepcopy(base).to(device, torch.bfloat16).train(training)
        patch = made.ready(model, training)
        called: Any = torch.compile(model) if gpu is not None else model
        step = user_step(called, made.example.fresh(device, torch.bfloat16, training), training, model)
        for _ in range(WARM_UPS):
            found = step()
        if not all(bool(value.isfinite().all()) for value in found if value.is_floating_point()):
            raise CheckFailedError("the step's outputs or gradients are not finite")
        output_db = _worst_db(found, expected)
        del found, expected
        peak: float | None = None
        replay: Callable[[], object] = step
        if gpu is not None:
            gpu.release_memory()
            peak, replay = peak_mib(step, held, gpu), gpu.capture(step)
    kernels = gpu.kernels(replay) if gpu is not None else None

    def check() -> None:
        if patch is not None:
            with fp8_not_expected():
                patch.verify(backward=training)

    return Captured(replay, peak, kernels.launches if kernels is not None else None, output_db, check)


def timed(replay: Callable[[], Any], device: str) -> Timing:
    """Microseconds of a captured step on a GPU, of a call on a CPU."""
    if device == "cuda":
        return time_replays(replay, MEASURED_MS, BenchDevice())
    samples = []
    for _ in range(RUNS_ON_CPU):
        start = time.perf_counter()
        replay()
        samples.append(1e6 * (time.perf_counter() - start))
    return summarise(samples)


def trained(made: UnitPackage, wanted: RunSettings) -> Loss:
    """Train the unit's model for some steps under autocast to bfloat16, with float32 weights, and evaluate it."""
    job = replace(job_of(made.policy, wanted.loss_steps, wanted.device), autocast=True)
    model = real_model(made.policy, wanted.device)
    patch = made.ready(model, training=True)
    result = train(model, job, seed=0)
    if patch is not None:
        with fp8_not_expected():
            patch.verify()
    return Loss(result.train_loss[-1], result.log_loss, result.ne, result.steps)


def _reference(made: UnitPackage, base: nn.Module, device: str) -> list[Tensor]:
    """Outputs of the adapted model in float32, from weights and inputs rounded to bfloat16."""
    model = copy.deepcopy(base).to(device, torch.bfloat16).float().eval()
    adapt(model, made.adaptations)
    inputs = made.example.fresh(device, torch.bfloat16, training=False).fresh(device, torch.float32, training=False)
    with float32_products("highest"):
        return list(user_step(model, inputs, False, model)())


def _worst_db(found: Any, expected: list[Tensor]) -> float | None:
    values = [decibels(one, other) for one, other in zip(found, expected, strict=False)]
    known = [value for value in values if value is not None]
    return min(known, default=None)


def in_a_process(unit: Unit, wanted: RunSettings, threads: int, channel: Connection) -> None:
    """Body of a child process: prepare a unit, report it, wait for "go", and send the result.

    `threads` is its share of the CPUs.
    """
    os.dup2(2, 1)  # stdout is for results only, but compilers write to it
    torch.set_num_threads(threads)
    inductor.compile_threads = threads
    prepared = PreparedUnit(unit, wanted, lambda line: print(line, file=sys.stderr, flush=True))
    channel.send("ready")
    channel.recv()
    channel.send(prepared.finish())
    channel.close()
