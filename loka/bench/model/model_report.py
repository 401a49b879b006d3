"""What `loka bench model` measured: as records, tables, Markdown and JSON, without a graph first."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from loka.bench.device import KernelSum
from loka.bench.machine import Environment
from loka.bench.markdown import Table
from loka.bench.model.model_variants import MODEL_BASELINE, Casting, StepBlock
from loka.bench.results import (
    NOTHING,
    Chapter,
    markdown_page,
    plain_head,
    stem_of,
    without_empty,
    write_report,
)
from loka.bench.timing import RoundTiming

CASTINGS = {
    Casting.AUTOCAST: "autocast to bfloat16, float32 parameters",
    Casting.BFLOAT16: "everything in bfloat16",
}
METHOD = (
    f"Milliseconds of a whole step, medians over rounds in which each variant has its turn; in brackets the speed over "
    f"`{MODEL_BASELINE}`, which is torch.compile without the policy's mods, launched in the same way: the median of "
    "each round's ratio. `loop`: a plain loop without a CUDA graph; `reduce-overhead`: graphs of what is compiled; "
    "`captured`: the whole step, optimiser included, as one graph."
)
FIGURES = (
    "step: of ten in a row. host: until the call returns, with an empty queue; a step is hardly shorter. GPU: the sum "
    "of its kernels, copies and fills. launches: its kernels. peak: memory that the variant itself held."
)
COLUMNS = (
    "launch", "variant", "step ms", "ratio", "GPU ms", "host ms", "launches", "peak MiB", "samples/s", "rounds",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class VariantFigures:
    """Figures of one variant in one block."""

    rounds: tuple[RoundTiming, ...]  # at least one
    beside: tuple[RoundTiming, ...]  # the baseline's turns in the same rounds; () without it
    peak_mib: float | None  # of what the variant itself held, from after its first step until it was captured
    kernels: KernelSum | None

    @property
    def speedups(self) -> tuple[float, ...]:
        """Of each round, over the baseline."""
        return tuple(one.step_ms / own.step_ms for one, own in zip(self.beside, self.rounds, strict=False))

    @property
    def ratio(self) -> float | None:
        """Median of the speedups; None without the baseline."""
        return statistics.median(self.speedups) if self.speedups else None

    @property
    def step_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(each.step_ms for each in self.rounds)

    @property
    def host_ms(self) -> float:
        """Median over the rounds."""
        return statistics.median(each.host_ms for each in self.rounds)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One variant in one block: its figures, or why there are none."""

    block: StepBlock
    variant: str
    figures: VariantFigures | None
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

    def samples_per_second(self, figures: VariantFigures) -> float:
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
        return stem_of("model", self.date)


def chapters(report: ModelReport) -> Iterator[Chapter]:
    """A chapter for each model, and below it one for each mode and casting: the times side by side, every figure, and
    what failed.
    """
    for model in report.models:
        yield Chapter(model.name, text=heading(model))
        for casting, training in dict.fromkeys((block.casting, block.training) for block in report.blocks):
            blocks = [block for block in report.blocks if (block.casting, block.training) == (casting, training)]
            outcomes = [
                found
                for block in blocks
                for name in report.variants
                if (found := model.found(block, name)) is not None
            ]  # fmt: skip
            if not outcomes:
                continue
            what = "one training step" if training else "one inference"
            tables = [side_by_side(report, model, blocks), details(model, outcomes)]
            failed = [each for each in outcomes if each.figures is None]
            tables += [failures(failed)] if failed else []
            yield Chapter(f"{what}, {CASTINGS[casting]}", tuple(tables), level=3)


def side_by_side(report: ModelReport, model: MeasuredModel, blocks: list[StepBlock]) -> Table:
    """A row for each variant: milliseconds and speedup in each launch."""
    rows = []
    for name in report.variants:
        found = [model.found(block, name) for block in blocks]
        if any(each is not None for each in found):
            rows.append((name, *map(_time_and_ratio, found)))
    return ("variant", *(block.launch.value for block in blocks)), rows


def details(model: MeasuredModel, outcomes: list[StepOutcome]) -> Table:
    """A row for each variant in each launch, without a graph first; empty columns are left out."""
    return without_empty(COLUMNS, [row for each in outcomes if (row := _detail(model, each)) is not None])


def failures(outcomes: list[StepOutcome]) -> Table:
    """A row for each variant that has no figures, with the reason."""
    return ("launch", "variant", "why"), [(each.block.launch.value, each.variant, each.failure) for each in outcomes]


def _detail(model: MeasuredModel, outcome: StepOutcome) -> tuple[str, ...] | None:
    figures = outcome.figures
    if figures is None:
        return None
    kernels = figures.kernels
    return (
        outcome.block.launch.value,
        outcome.variant,
        in_milliseconds(figures.step_ms),
        NOTHING if figures.ratio is None else f"{figures.ratio:.3f}",
        NOTHING if kernels is None else in_milliseconds(kernels.milliseconds),
        in_milliseconds(figures.host_ms),
        NOTHING if kernels is None else str(kernels.launches),
        NOTHING if figures.peak_mib is None else f"{figures.peak_mib:.0f}",
        f"{model.samples_per_second(figures):.0f}",
        str(len(figures.rounds)),
    )


def _time_and_ratio(outcome: StepOutcome | None) -> str:
    if outcome is None:
        return NOTHING
    figures = outcome.figures
    if figures is None:
        return "failed"
    if figures.ratio is None or outcome.variant == MODEL_BASELINE:
        return in_milliseconds(figures.step_ms)
    return f"{in_milliseconds(figures.step_ms)} ({figures.ratio:.2f})"


def in_milliseconds(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def heading(model: MeasuredModel) -> str:
    """The model in words."""
    text = f"{model.factory} at batch size {model.batch}"
    text += f"; loka- variants have the mods {', '.join(model.mods)}" if model.mods else ""
    text += f"; a training step has {model.step}" if model.step else ""
    return f"{text}." + (f" Nothing was measured: {model.failure}" if model.failure else "")


def notes(report: ModelReport) -> list[str]:
    """How to read the tables, and the blocks that were not reached."""
    left = [
        f"{model.name}: {block.label}"
        for model in report.models
        for block in report.blocks
        if not model.failure and not any(each.block == block for each in model.outcomes)
    ]
    return [METHOD, FIGURES, *([f"Not measured: {', '.join(left)}."] if left else [])]


def to_markdown(report: ModelReport) -> str:
    """The report as a Markdown page."""
    title = f"loka bench model, {report.date}"
    return markdown_page(title, report.command, f"{report.environment}.", chapters(report), notes(report))


def to_plain(report: ModelReport) -> dict[str, object]:
    """The report as a dict for JSON."""
    return {
        **plain_head("model", report.command, report.date, report.environment, version=2),
        "baseline": MODEL_BASELINE,
        "models": [
            {
                "name": model.name,
                "factory": model.factory,
                "batch_size": model.batch,
                "mods": list(model.mods),
                "step": model.step,
                "failure": model.failure,
                "lines": [_line(model, each) for each in model.outcomes],
            }
            for model in report.models
        ],
        "notes": notes(report),
    }


def _line(model: MeasuredModel, outcome: StepOutcome) -> dict[str, object]:
    block, figures = outcome.block, outcome.figures
    line: dict[str, object] = {
        "mode": block.mode,
        "casting": block.casting.value,
        "launch": block.launch.value,
        "variant": outcome.variant,
        "failure": outcome.failure,
    }
    if figures is None:
        return line
    kernels = figures.kernels
    return line | {
        "step_ms": figures.step_ms,
        "host_ms": figures.host_ms,
        "gpu_ms": kernels.milliseconds if kernels is not None else None,
        "launches": kernels.launches if kernels is not None else None,
        "peak_mib": figures.peak_mib,
        "samples_per_second": model.samples_per_second(figures),
        "ratio": figures.ratio,
        "rounds": [dataclasses.asdict(each) for each in figures.rounds],
    }


def write_files(report: ModelReport, folder: Path) -> tuple[Path, Path]:
    """Write STEM.json and STEM.md into an existing folder, each atomically. Raises InputError."""
    return write_report(folder, report.stem, to_plain(report), to_markdown(report))
