"""What `loka bench model --gpus` measured: as records, tables, Markdown and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from loka.bench.machine import Environment
from loka.bench.markdown import Table
from loka.bench.model.model_report import in_milliseconds
from loka.bench.ranks.estimates import RANKS, Bracket, bracket, estimate
from loka.bench.ranks.rank_step import RankFigures
from loka.bench.ranks.rank_variants import RankVariant, Sharing
from loka.bench.results import NOTHING, Chapter, markdown_page, plain_head, stem_of, without_empty, write_report

METHOD = (
    "One training step, everything in bfloat16 that is not in FP8, each rank with a batch of its own; figures are of "
    "rank 0, medians over rounds. ratio: the speed over `bf16` of the same kind. `fsdp2`: fully_shard of each unit and "
    "of the model; `gather`: its all-gathers carry FP8 weights; `alone`: without communication."
)
FIGURES = (
    "step: of ten in a row. host: until the call returns, with an empty queue. NCCL: its kernels in a step, waiting "
    "for other ranks included; exposed: of that, while nothing else ran. bare: the same collectives in a row, with "
    "nothing beside them; DDP's are counted for each parameter by itself. peak: memory that a rank held, after its "
    "first steps."
)
ESTIMATED = (
    "Estimates, not measurements: from the step without communication and the bytes, at {link:g} GB/s for each GPU "
    "(--link); from all communication hidden to none hidden, without latencies. The first column does so with the "
    "measured times of bare collectives, beside the measured step."
)
COLUMNS = ("variant", "step ms", "ratio", "host ms", "NCCL ms", "exposed ms", "peak MiB")
MOVED = ("variant", "collective", "calls", "MB", "bare ms")


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """One variant: its figures, or why there are none."""

    variant: RankVariant
    figures: RankFigures | None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredRanks:
    """One policy's model."""

    name: str  # of the policy
    factory: str
    batch: int  # of each rank
    units: str = ""  # what fully_shard wraps, in words
    step: str = ""  # loss and optimiser
    outcomes: tuple[RankOutcome, ...] = ()
    failure: str = ""  # why nothing, or nothing more, was measured

    def ratio(self, variant: RankVariant, figures: RankFigures) -> float | None:
        """The speed over that of the variant's baseline; None without it."""
        base = next((each.figures for each in self.outcomes if each.variant.name == variant.baseline), None)
        return None if base is None else base.step_ms / figures.step_ms

    def alone(self, variant: RankVariant) -> float | None:
        """The step of the same model without communication; None if it was not measured, or is that itself."""
        name = variant.without_communication
        found = next((each.figures for each in self.outcomes if each.variant.name == name), None)
        return None if found is None or variant.sharing is Sharing.ALONE else found.step_ms


@dataclass(frozen=True, slots=True)
class RanksReport:
    """One run of `loka bench model --gpus`."""

    command: str
    date: str  # UTC, to the minute
    environment: Environment
    gpus: int
    link: float  # GB/s of a GPU, in estimates for more ranks
    variables: dict[str, str]  # NCCL's, of the environment
    models: tuple[MeasuredRanks, ...]

    @property
    def stem(self) -> str:
        """File name without a suffix: ranks-2026-11-29T0812."""
        return stem_of("ranks", self.date)


def chapters(report: RanksReport) -> Iterator[Chapter]:
    """A chapter for each model: steps, what the collectives move, and what failed."""
    for model in report.models:
        measured = [(each.variant, each.figures) for each in model.outcomes if each.figures is not None]
        failed = [(each.variant.name, each.failure) for each in model.outcomes if each.figures is None]
        moved = [row for variant, figures in measured for row in _moved(variant, figures)]
        tables: list[Table] = []
        if measured:
            tables.append(without_empty(COLUMNS, [_row(model, *each) for each in measured]))
        if moved:
            tables.append((MOVED, moved))
        estimated = [row for each in measured for row in _estimates(report, model, *each)]
        if estimated:
            tables.append((("variant", *(f"{ranks} ranks" for ranks in (report.gpus, *RANKS)), "measured"), estimated))
        if failed:
            tables.append((("variant", "why"), [*failed]))
        yield Chapter(model.name, tuple(tables), heading(report, model))


def heading(report: RanksReport, model: MeasuredRanks) -> str:
    """The model in words."""
    text = f"{model.factory} on {report.gpus} ranks, each at batch size {model.batch}"
    text += f"; a step has {model.step}" if model.step else ""
    text += f"; FSDP2's units are {model.units}" if model.units else ""
    text += "".join(f"; {name}={value}" for name, value in report.variables.items())
    gathered = dict.fromkeys(each.figures.gathering for each in model.outcomes if each.figures is not None)
    text += "".join(f". {each}" for each in gathered if each)
    return f"{text}." + (f" Nothing more was measured: {model.failure}" if model.failure else "")


def _row(model: MeasuredRanks, variant: RankVariant, figures: RankFigures) -> tuple[str, ...]:
    ratio, peak = model.ratio(variant, figures), figures.peak_mib
    return (
        variant.name,
        _ms(figures.step_ms),
        NOTHING if ratio is None else f"{ratio:.3f}",
        *map(_ms, (figures.host_ms, figures.nccl_ms, figures.exposed_ms)),
        NOTHING if peak is None else f"{peak:.0f}",
    )


def _moved(variant: RankVariant, figures: RankFigures) -> Iterator[tuple[str, ...]]:
    for each in figures.collectives:
        yield variant.name, each.kind, str(each.calls), f"{each.nbytes / 1e6:.2f}", _ms(each.bare_ms)


def _estimates(
    report: RanksReport, model: MeasuredRanks, variant: RankVariant, figures: RankFigures
) -> Iterator[tuple[str, ...]]:
    alone, found = model.alone(variant), _on_more(report, model, variant, figures)
    if alone is not None and found:
        here = bracket(alone, sum(each.bare_ms for each in figures.collectives))
        yield variant.name, *map(_bracket, (here, *found.values())), _ms(figures.step_ms)


def _on_more(
    report: RanksReport, model: MeasuredRanks, variant: RankVariant, figures: RankFigures
) -> dict[int, Bracket]:
    """Estimates by the number of ranks; {} without the step alone, and for what moves nothing."""
    alone = model.alone(variant)
    if alone is None or not figures.collectives:
        return {}
    return {ranks: estimate(alone, figures.collectives, ranks, report.link) for ranks in RANKS}


def _bracket(found: Bracket) -> str:
    return f"{_ms(found.low)} to {_ms(found.high)}"


def _ms(value: float | None) -> str:
    return NOTHING if value is None else in_milliseconds(value)


def notes(report: RanksReport) -> list[str]:
    """How to read the tables, without those that are not there."""
    measured = [(model, each) for model in report.models for each in model.outcomes]
    estimated = any(each.figures and _on_more(report, model, each.variant, each.figures) for model, each in measured)
    return [METHOD, FIGURES, *([ESTIMATED.format(link=report.link)] if estimated else ())]


def to_plain(report: RanksReport) -> dict[str, object]:
    """The report as a dict for JSON."""
    return {
        **plain_head("ranks", report.command, report.date, report.environment),
        "gpus": report.gpus,
        "link": report.link,
        "variables": report.variables,
        "models": [
            {
                "name": model.name,
                "factory": model.factory,
                "batch_size": model.batch,
                "units": model.units,
                "step": model.step,
                "failure": model.failure,
                "lines": [_line(report, model, each) for each in model.outcomes],
            }
            for model in report.models
        ],
        "notes": notes(report),
    }


def _line(report: RanksReport, model: MeasuredRanks, outcome: RankOutcome) -> dict[str, object]:
    variant = outcome.variant
    line: dict[str, object] = {
        "variant": variant.name,
        "sharing": variant.sharing.value,
        "numbers": variant.numbers.value,
        "compiled": variant.compiled,
        "failure": outcome.failure,
    }
    if outcome.figures is None:
        return line
    figures = outcome.figures
    found = _on_more(report, model, variant, figures)
    if found:
        line["estimates"] = {ranks: dataclasses.asdict(each) for ranks, each in found.items()}
    return line | {"ratio": model.ratio(variant, figures), **dataclasses.asdict(figures)}


def write_files(report: RanksReport, folder: Path) -> tuple[Path, Path]:
    """Write STEM.json and STEM.md into an existing folder, each atomically. Raises InputError."""
    title = f"loka bench model --gpus, {report.date}"
    page = markdown_page(title, report.command, f"{report.environment}.", chapters(report), notes(report))
    return write_report(folder, report.stem, to_plain(report), page)
