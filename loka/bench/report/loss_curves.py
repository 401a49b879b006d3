"""Curves and differences of the pairs that `loka train` and `loka compare` keep, with bands over seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from loka.bench.quality.compare_quality import Quality
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
    zero: float | None  # the height of 0 in per cent from the bottom, where 0 is inside


@dataclass(frozen=True, slots=True)
class SeedChart:
    """The difference of NE of each seed on one axis, their mean with its interval, and the budget; in per cent."""

    axis: Axis
    dots: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None
    zero: float
    budget: float | None
    words: str


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
    ne: SeedChart


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
    quality = Quality(pairs, len({pair.seed for pair in pairs}), facts.budget_percent or 0.0)
    return RunChart(
        verb=verb,
        file=kept.path.as_posix(),
        first=first,
        second=second,
        device=facts.device,
        pairs=len(pairs),
        seeds=len(quality.seeds),
        samples=pairs[0].as_is.samples,
        shared_steps=facts.shared_steps,
        loss=_loss(pairs, first, second),
        difference=_difference(pairs, first, second),
        ne=_seeds(quality, facts.budget_percent),
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
    series = [
        (first, "as-is", [pair.as_is.train_loss for pair in pairs]),
        (second, "patched", [pair.patched.train_loss for pair in pairs]),
    ]
    return _chart(pairs, "", [(name, style, *_spread(runs)) for name, style, runs in series], decimals=4)


def _difference(pairs: Sequence[PairResult], first: str, second: str) -> CurveChart:
    """The relative difference of the loss in per cent, with the 95 % interval of its mean over the seeds."""
    seeds: dict[int, list[list[float]]] = {}
    for pair in pairs:
        losses = zip(pair.as_is.train_loss, pair.patched.train_loss, strict=True)
        seeds.setdefault(pair.seed, []).append([100 * (b - a) / abs(a) if a else 0.0 for a, b in losses])
    runs = [tuple(map(fmean, zip(*draws, strict=True))) for draws in seeds.values()]
    curve = (f"{second} minus {first}", "difference", *_spread(runs, interval=True))
    return _chart(pairs, "%", [curve], decimals=4, with_zero=True)


Means = tuple[tuple[float, ...], tuple[float, ...]]  # of each point: the mean, and half the band's height


def _spread(runs: Sequence[Sequence[float]], interval: bool = False) -> Means:
    """Means over runs, with their standard deviations, or with half their 95 % intervals; zeros for a single run."""
    points = list(zip(*runs, strict=True))
    means = tuple(map(fmean, points))
    if len(runs) < _FEWEST_FOR_A_BAND:
        return means, (0.0,) * len(means)
    factor = t_quantile(0.975, len(runs) - 1) / math.sqrt(len(runs)) if interval else 1.0
    return means, tuple(factor * stdev(point) for point in points)


def _chart(
    pairs: Sequence[PairResult],
    unit: str,
    series: Sequence[tuple[str, str, tuple[float, ...], tuple[float, ...]]],
    decimals: int,
    with_zero: bool = False,
) -> CurveChart:
    ends = [mean + sign * half for _, _, means, halves in series for mean, half in zip(means, halves, strict=True)
            for sign in (-1, 1)]  # fmt: skip
    low, high = min(ends), max(ends)
    if with_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low)
    y = axis_of(low - margin, high + margin)
    samples = pairs[0].as_is.samples
    x = axis_of(0.0, float(samples))
    count = len(series[0][2])

    def points(values: Sequence[float]) -> list[tuple[float, float]]:
        return [(BOX * (index + 0.5) / count, BOX - y.at(value)) for index, value in enumerate(values)]

    curves = []
    for name, style, means, halves in series:
        upper = points([mean + half for mean, half in zip(means, halves, strict=True)])
        lower = points([mean - half for mean, half in zip(means, halves, strict=True)])
        banded = band(upper, lower) if any(halves) else ""
        last = f"{means[-1]:+.{decimals}f} %" if unit else f"{means[-1]:.{decimals}f}"
        curves.append(Curve(name, style, line(points(means)), banded, last))
    zero = y.at(0.0) if y.low <= 0 <= y.high and with_zero else None
    return CurveChart(x, y, unit, tuple(curves), zero)


def _seeds(quality: Quality, budget: float | None) -> SeedChart:
    differences, interval = quality.differences, quality.interval
    ends = [*differences, 0.0, *(interval or ()), *((budget,) if budget is not None else ())]
    margin = 0.08 * ((max(ends) - min(ends)) or 1.0)
    axis = axis_of(min(ends) - margin, max(ends) + margin)
    words = f"{quality.mean:+.4f} %"
    if interval is not None:
        words += f", 95 % interval {interval[0]:+.4f} % to {interval[1]:+.4f} %"
    return SeedChart(
        axis=axis,
        dots=tuple(map(axis.at, differences)),
        mean=axis.at(quality.mean),
        interval=(axis.at(interval[0]), axis.at(interval[1])) if interval is not None else None,
        zero=axis.at(0.0),
        budget=axis.at(budget) if budget is not None else None,
        words=words,
    )
