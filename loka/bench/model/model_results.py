"""Results of whole steps: what was measured of one variant in one block."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loka.bench.machine import Environment
from loka.bench.model.model_variants import StepBlock
from loka.bench.model.step_rounds import RoundTiming, speedup
from loka.bench.speed.device_kernels import KernelSum


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Figures of one variant in one block."""

    rounds: tuple[RoundTiming, ...]  # at least one
    ratio: float | None  # speedup over the baseline of the same rounds
    peak_mib: float | None  # of what the variant itself held, from after its first step until it was captured
    kernels: KernelSum | None
    bound_ms: float | None

    @property
    def step_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(each.step_ms for each in self.rounds)

    @property
    def host_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(each.host_ms for each in self.rounds)

    @property
    def reached(self) -> float | None:
        """Share of the bound: 1 is the roofline."""
        return self.bound_ms / self.step_ms if self.bound_ms is not None else None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One variant in one block: its figures, or why there are none."""

    block: StepBlock
    variant: str
    figures: StepFigures | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """One policy's model."""

    name: str  # of the policy
    factory: str
    batch: int
    mods: tuple[str, ...]  # of the policy
    step: str = ""  # a training step in words: loss and optimiser; "" if none was measured
    outcomes: tuple[StepOutcome, ...] = ()
    failure: str = ""  # why nothing was measured

    def found(self, block: StepBlock, variant: str) -> StepOutcome | None:
        """The outcome of a variant in a block."""
        return next((each for each in self.outcomes if (each.block, each.variant) == (block, variant)), None)

    def with_outcome(self, outcome: StepOutcome) -> MeasuredModel:
        """The model with this outcome in the place of an earlier one of the same variant and block."""
        others = tuple(each for each in self.outcomes if (each.block, each.variant) != (outcome.block, outcome.variant))
        return replace(self, outcomes=(*others, outcome))

    def samples_per_second(self, figures: StepFigures) -> float:
        """Samples that go through the model in a second."""
        return 1e3 * self.batch / figures.step_ms


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One run of `loka bench model`."""

    command: str
    date: str  # UTC, to the minute
    environment: Environment
    blocks: tuple[StepBlock, ...]
    variants: tuple[str, ...]
    models: tuple[MeasuredModel, ...]

    @property
    def stem(self) -> str:
        """File name without a suffix: model-2026-11-21T0812."""
        return f"model-{self.date.replace(':', '').removesuffix('Z')}"


def figures_of(
    rounds: Sequence[RoundTiming],
    baseline: Sequence[RoundTiming],
    peak_mib: float | None,
    kernels: KernelSum | None,
    bound_ms: float | None,
) -> StepFigures:
    """The figures of a variant that was timed in the same rounds as the baseline."""
    return StepFigures(tuple(rounds), speedup(baseline, rounds), peak_mib, kernels, bound_ms)
