"""Measures the variants of a block: prepared one after the other, kept alive together, and timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from loka.bench.device import BenchDevice, KernelSum, describe
from loka.bench.model.model_report import StepOutcome, VariantFigures
from loka.bench.model.model_subject import ModelSubject
from loka.bench.model.model_variants import MODEL_BASELINE, ModelVariant, StepBlock, StepLaunch, in_measuring_order
from loka.bench.timing import STEPS, TURN_WARM_UPS, Progress, RoundTiming, timed_turn
from loka.errors import CheckFailedError

FIRST_STEPS = 3  # before a step is captured: compiled graphs are recorded in the second and third
TUNING = 4  # how many times longer preparing takes with max-autotune: an estimate, to end in time


@dataclass(frozen=True, slots=True)
class RunLimits:
    """`rounds` of a group, and the time on `clock` at which to stop."""

    rounds: int
    end: float
    clock: Callable[[], float] = time.monotonic
    steps: int | None = None  # of each kind in a turn; None: STEPS

    @property
    def steps_of_a_turn(self) -> int:
        """All steps of a turn."""
        return TURN_WARM_UPS + 2 * (STEPS if self.steps is None else self.steps)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - self.clock()


@dataclass(slots=True)
class LiveStep:
    """A variant that is kept alive. `run` is its step, or the replay of it."""

    name: str  # of the variant
    run: Callable[[], object]
    peak_mib: float | None
    preview: tuple[RoundTiming, ...] = ()  # the first look at it, before the rounds of its group
    rounds: list[RoundTiming] = field(default_factory=list)
    kernels: KernelSum | None = None
    failure: str = ""

    def figures(self, rounds: Sequence[RoundTiming], baseline: Sequence[RoundTiming]) -> VariantFigures:
        """Its figures in these rounds, in which the baseline was timed too."""
        return VariantFigures(tuple(rounds), tuple(baseline), self.peak_mib, self.kernels)

    def seconds(self, steps: int) -> float:
        """Estimate for so many steps."""
        return steps * max((each.step_ms for each in self.preview), default=0.0) / 1e3


@dataclass(slots=True)
class BlockRun:
    """One block of a model: its variants are prepared one after the other, kept alive, and timed in turns."""

    subject: ModelSubject
    block: StepBlock
    device: BenchDevice
    limits: RunLimits
    progress: Progress
    alive: list[LiveStep] = field(default_factory=list)
    longest: float = 0.0  # seconds that preparing a variant took, without the first, which starts the compiler

    def outcomes(self, variants: Sequence[ModelVariant]) -> Iterator[StepOutcome]:
        """Each outcome as soon as there are figures, and again after the rounds of its group.

        A group is as many variants as the memory holds, and has the baseline. What there is no time for is left out.
        """
        baseline, *others = in_measuring_order(variants, self.block.launch)
        try:
            yield self._start(baseline)
            for variant in others:
                if self.limits.left < self._seconds_for(variant):
                    self.progress(f"{self.block.label}: no time is left for {variant.name} and what follows")
                    break
                if len(self.alive) > 1 and self.device.is_full():
                    yield from self._finish()
                    self._start(baseline)
                outcome = self._start(variant)
                if _is_out_of_memory(outcome) and len(self.alive) > 1:
                    yield from self._finish()
                    self._start(baseline)
                    outcome = self._start(variant)
                yield outcome
            yield from self._finish()
        finally:
            self.alive.clear()
            self.device.release()

    def _start(self, variant: ModelVariant) -> StepOutcome:
        """Prepare a variant and time it once beside the baseline, so that a run that ends early has figures of it."""
        start = self.limits.clock()
        failure = ""
        before: tuple[RoundTiming, ...] = ()
        try:
            made = self._prepared(variant)
            beside = self._baseline()
            before = (self._turn(beside),) if beside is not None else ()
            made.preview = (self._turn(made),)
        except Exception as error:  # noqa: BLE001  (libraries, compiler and device may raise anything: it is reported)
            failure = describe(error)
        if failure:  # the traceback is gone, and with it what the variant held
            self.device.release_memory()
            return self._failed(variant.name, failure)
        self.alive.append(made)
        baseline = made.preview if variant.name == MODEL_BASELINE else before
        figures = made.figures(made.preview, baseline)
        seconds = self.limits.clock() - start
        self.longest = seconds if len(self.alive) <= 2 else max(self.longest, seconds)
        self.progress(f"{self.block.label} {variant.name}: {describe_figures(figures)}, after {seconds:.0f} s")
        return StepOutcome(self.block, variant.name, figures)

    def _failed(self, name: str, failure: str) -> StepOutcome:
        self.progress(f"{self.block.label} {name}: failed: {failure}")
        return StepOutcome(self.block, name, None, failure)

    def _prepared(self, variant: ModelVariant) -> LiveStep:
        """A variant after its first steps, checked, and captured if the block says so."""
        device = self.device
        held = device.allocated()
        step = self.subject.ready(variant, self.block, device)
        run: Callable[[], object] = step
        step()  # compiles, and tunes with memory of its own
        device.wait()
        device.restart_peak()
        for _ in range(FIRST_STEPS):
            found = step()
        if not all(bool(value.isfinite().all()) for value in found if value.is_floating_point()):
            raise CheckFailedError(f"the {'loss is' if self.block.training else 'outputs are'} not finite")
        del found
        if self.block.launch is StepLaunch.CAPTURED:
            run = device.capture(step)
        device.wait()
        step.verify()
        peak = device.peak_mib(held)
        return LiveStep(variant.name, run, peak)

    def _finish(self) -> Iterator[StepOutcome]:
        """The group's outcomes; frees it."""
        yield from self._measured()  # by itself, so that no local variable holds a model any more
        self.alive.clear()
        self.device.release()

    def _measured(self) -> Iterator[StepOutcome]:
        """The rounds of the group, then its kernels."""
        for done in range(self.limits.rounds):
            if done and self.limits.left < self._seconds_of_rounds(1):
                break
            self._round()
        for each in self.alive:
            if not each.failure and self.limits.left > 0:
                each.kernels = self.device.kernels(each.run)
        baseline = self._baseline()
        for each in self.alive:
            if each.failure:
                yield self._failed(each.name, each.failure)
                continue
            rounds = baseline.rounds if baseline is not None else ()
            figures = each.figures(each.rounds, rounds)
            self.progress(f"{self.block.label} {each.name}: {describe_figures(figures)}")
            yield StepOutcome(self.block, each.name, figures)

    def _round(self) -> None:
        for each in self.alive:
            if not each.failure:
                try:
                    each.rounds.append(self._turn(each))
                except Exception as error:  # noqa: BLE001  (as above)
                    each.failure = describe(error)

    def _turn(self, step: LiveStep) -> RoundTiming:
        return timed_turn(step.run, self.device.wait, steps=self.limits.steps)

    def _baseline(self) -> LiveStep | None:
        return next((each for each in self.alive if each.name == MODEL_BASELINE and not each.failure), None)

    def _seconds_for(self, variant: ModelVariant) -> float:
        """Estimated time to prepare another variant and for the rounds of what is alive."""
        return self.longest * (TUNING if variant.tunes else 1) + self._seconds_of_rounds()

    def _seconds_of_rounds(self, rounds: int | None = None) -> float:
        """Estimated time for the rounds of what is alive."""
        steps = self.limits.steps_of_a_turn * (self.limits.rounds if rounds is None else rounds)
        return sum(each.seconds(steps) for each in self.alive)


def describe_figures(figures: VariantFigures) -> str:
    """Figures in a line of progress."""
    text = f"{figures.step_ms:.2f} ms, host {figures.host_ms:.2f} ms"
    text += f", {figures.ratio:.2f} times the baseline's speed" if figures.ratio is not None else ""
    return text + (f", {len(figures.rounds)} rounds" if len(figures.rounds) > 1 else "")


def _is_out_of_memory(outcome: StepOutcome) -> bool:
    return torch.OutOfMemoryError.__name__ in outcome.failure
