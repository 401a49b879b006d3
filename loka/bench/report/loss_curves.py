"""Curves and differences of the pairs that `loka train` and `loka compare` keep, with bands over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from loka.bench.quality.compare_quality import Judgement, Quality
from loka.bench.quality.pair_file import COMPARE_FOLDER, TRAIN_FOLDER, KeptPairs, read_pairs
from loka.bench.quality.training import PairResult
from loka.bench.report.geometry import BOX, Axis, axis_of, band, line
from loka.plan.plan import Plan
from loka.plan.serialize import plan_sha256
from loka.probe.estimate import t_quantile

_FEWEST_FOR_A_BAND = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through the means over the pairs, with its band, as paths of a box of 100 by 100."""

    name: str
    style: str  # CSS class: "as-is", "patched" or "difference"
    path: str
    band: str  # "" for a single pair
    last: str  # the last mean in words


@dataclass(frozen=True, slots=True)
class CurveChart:
    """Curves over the samples that were trained on."""

    x: Axis  # samples
    y: Axis
    unit: str  # of y: "", "%"
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class SeedChart:
    """The difference of NE of each seed on one axis, their mean with its interval, and the budget; in per cent."""

    of: str  # " of head click", or "" where the policy names no heads
    axis: Axis
    differences: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None
    budget: float | None

    @property
    def words(self) -> str:
        """The mean, with its interval."""
        interval = self.interval and f", 95 % interval {self.interval[0]:+.4f} % to {self.interval[1]:+.4f} %"
        return f"{self.mean:+.4f} %{interval or ''}"


@dataclass(frozen=True, slots=True)
class RunChart:
    """The runs of one file."""

    verb: str  # "train" or "compare"
    file: str
    first: str  # the names of the two models
    second: str
    device: str
    pairs: int
    seeds: int
    samples: int
    shared_steps: int  # see RunFacts
    loss: CurveChart
    difference: CurveChart
    ne: tuple[SeedChart, ...]  # of each head


@dataclass(frozen=True, slots=True)
class KeptRuns:
    """Runs of this plan, and the files of other plans."""

    charts: tuple[RunChart, ...]
    others: tuple[str, ...]


def kept_runs(plan: Plan, folders: Sequence[Path] = (TRAIN_FOLDER, COMPARE_FOLDER)) -> KeptRuns:
    """The runs of a plan in `folders`, which are named after their verbs; files that are none are ignored."""
    wanted, charts, others = plan_sha256(plan), [], []
    for folder in folders:
        for path in sorted(folder.glob(f"{plan.name}-*.jsonl")):
            kept = read_pairs(path)
            if kept is None or not kept.pairs:
                continue
            if kept.facts.plan != wanted:
                others.append(path.as_posix())
            elif (chart := run_chart(folder.name, kept)) is not None:
                charts.append(chart)
    return KeptRuns(tuple(charts), tuple(others))


def run_chart(verb: str, kept: KeptPairs) -> RunChart | None:
    """The chart of a file's pairs; None where no loss was kept. Pairs of another number of points are left out."""
    facts, pairs = kept.facts, _comparable(kept.pairs)
    if not pairs:
        return None
    first, second = ("original", "with mods") if facts.against == "original" else ("without FP8", "with FP8")
    heads = Judgement.of(pairs, len({pair.seed for pair in pairs}), facts.budget_percent or 0.0).heads
    return RunChart(
        verb=verb,
        file=kept.path.as_posix(),
        first=first,
        second=second,
        device=facts.device,
        pairs=len(pairs),
        seeds=len(heads[0].seeds),
        samples=pairs[0].as_is.samples,
        shared_steps=facts.shared_steps,
        loss=_loss(pairs, first, second),
        difference=_difference(pairs, first, second),
        ne=tuple(_seeds(head, facts.budget_percent) for head in heads),
    )


def _comparable(pairs: Sequence[PairResult]) -> tuple[PairResult, ...]:
    """The pairs with the usual number of points and samples, all of them finite."""
    kinds = Counter(map(_kind, pairs))
    if not kinds:
        return ()
    usual = max(kinds, key=lambda kind: kinds[kind])
    finite = [pair for pair in pairs if all(map(math.isfinite, (*pair.as_is.train_loss, *pair.patched.train_loss)))]
    return tuple(pair for pair in finite if _kind(pair) == usual and usual[0] and _has_ne(pair))


def _kind(pair: PairResult) -> tuple[int, int, int]:
    return len(pair.as_is.train_loss), len(pair.patched.train_loss), pair.as_is.samples


def _has_ne(pair: PairResult) -> bool:
    return math.isfinite(pair.as_is.ne) and math.isfinite(pair.patched.ne) and pair.as_is.ne > 0


def _loss(pairs: Sequence[PairResult], first: str, second: str) -> CurveChart:
    as_is, patched = ([getattr(pair, run).train_loss for pair in pairs] for run in ("as_is", "patched"))
    return _chart(pairs, "", [(first, "as-is", *_spread(as_is)), (second, "patched", *_spread(patched))])


def _difference(pairs: Sequence[PairResult], first: str, second: str) -> CurveChart:
    """The relative difference of the loss in per cent, with the 95 % interval of its mean over the seeds."""
    seeds: dict[int, list[list[float]]] = {}
    for pair in pairs:
        losses = zip(pair.as_is.train_loss, pair.patched.train_loss, strict=True)
        seeds.setdefault(pair.seed, []).append([100 * (b - a) / abs(a) if a else 0.0 for a, b in losses])
    runs = [tuple(map(fmean, zip(*draws, strict=True))) for draws in seeds.values()]
    return _chart(pairs, "%", [(f"{second} minus {first}", "difference", *_spread(runs, interval=True))])


def _spread(runs: Sequence[Sequence[float]], interval: bool = False) -> tuple[list[float], list[float]]:
    """Means over runs, with their standard deviations, or with half their 95 % intervals; zeros for a single run."""
    points = list(zip(*runs, strict=True))
    if len(runs) < _FEWEST_FOR_A_BAND:
        return [fmean(each) for each in points], [0.0] * len(points)
    factor = t_quantile(0.975, len(runs) - 1) / math.sqrt(len(runs)) if interval else 1.0
    return [fmean(each) for each in points], [factor * stdev(each) for each in points]


def _chart(
    pairs: Sequence[PairResult], unit: str, series: Sequence[tuple[str, str, list[float], list[float]]]
) -> CurveChart:
    """The chart of some series: a name, a style, the means, and half the heights of their bands. One in per cent has
    a line at 0."""
    upper = [[mean + half for mean, half in zip(means, halves, strict=True)] for _, _, means, halves in series]
    lower = [[mean - half for mean, half in zip(means, halves, strict=True)] for _, _, means, halves in series]
    ends = [end for values in (*upper, *lower, [0.0] if unit else []) for end in values]
    margin = 0.06 * (max(ends) - min(ends))
    y = axis_of(min(ends) - margin, max(ends) + margin)

    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        return [(BOX * (index + 0.5) / len(values), BOX - y.at(value)) for index, value in enumerate(values)]

    curves = []
    for (name, style, means, halves), top, bottom in zip(series, upper, lower, strict=True):
        last = f"{means[-1]:+.4f} %" if unit else f"{means[-1]:.4f}"
        banded = band(points(top), points(bottom)) if any(halves) else ""
        curves.append(Curve(name, style, line(points(means)), banded, last))
    return CurveChart(axis_of(0.0, float(pairs[0].as_is.samples)), y, unit, tuple(curves))


def _seeds(quality: Quality, budget: float | None) -> SeedChart:
    differences, interval = tuple(quality.differences), quality.interval
    ends = [*differences, 0.0, *(interval or ()), *((budget,) if budget is not None else ())]
    margin = 0.08 * ((max(ends) - min(ends)) or 1.0)
    of, axis = f" of head {quality.head}" if quality.head else "", axis_of(min(ends) - margin, max(ends) + margin)
    return SeedChart(of, axis, differences, quality.mean, interval, budget)
