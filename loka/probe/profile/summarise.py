"""Summaries of statistics: of a site for planning, and of single steps for `Probe(log=...)`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Format, Operand
from loka.numerics.quantize import BLOCK, FORMATS
from loka.probe.profile.profile import (
    Estimate,
    OperandSummary,
    Profile,
    Quantiles,
    RecordedStats,
    Shares,
    SiteProfile,
)
from loka.probe.stats import moments
from loka.probe.stats.merge import merge_sites
from loka.probe.stats.operand_tracker import OperandTracker, without_filling
from loka.probe.stats.site_stats import (
    LOWEST,
    PER_OCTAVE,
    RELATIVE_LOWEST,
    SPREAD_STEPS,
    VIEWS,
    ZERO_BIN,
    HistogramView,
    LowRank,
    Moments,
    OperandStats,
    SiteStats,
    WeightStats,
)
from loka.probe.stats.site_trackers import Trackers, apart
from loka.version import __version__

_LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99)  # of Quantiles


def summarise(stats: SiteStats, estimates: tuple[Estimate, ...], rows: int) -> SiteProfile:
    """The summary of a site. `rows` is M of a call. Operands that were never seen are left out."""
    operands = [_activation(operand) for operand in (stats.input, stats.grad_output) if operand is not None]
    if stats.weight is not None:
        operands.insert(0 if stats.input is None else 1, _weight(stats.weight))
    return SiteProfile(stats.name, stats.k, stats.n, rows, tuple(operands), estimates)


def timestamp() -> str:
    """The current time, UTC, in seconds: 2026-11-21T04:43:00Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def unite(a: RecordedStats, b: RecordedStats) -> RecordedStats:
    """Merge two full profiles of the same model, from different runs or shards.

    `steps` is the larger, `samples` the sum, `every` the larger (at least one step in this number was sampled); name,
    batch size and rows of a call are those of the run with more steps, `created` is the later. Estimates and findings
    are dropped, as each belongs to one of the two. Raises InputError if the models or their sites differ.
    """
    _check_same(a.profile, b.profile)
    later, earlier = (b, a) if b.profile.steps > a.profile.steps else (a, b)
    others = {stats.name: stats for stats in earlier.stats}
    merged = tuple(merge_sites(stats, others[stats.name]) for stats in later.stats)
    rows = [_rows(site, earlier.profile.site(site.name)) for site in later.profile.sites]
    sites = tuple(summarise(stats, (), count) for stats, count in zip(merged, rows, strict=True))
    profile = replace(
        later.profile,
        loka_version=__version__,
        created=max(a.profile.created, b.profile.created),
        every=max(a.profile.every, b.profile.every),
        samples=a.profile.samples + b.profile.samples,
        sites=sites,
        findings=(),
        synthetic=a.profile.synthetic or b.profile.synthetic,
    )
    return RecordedStats(profile, merged)


def _rows(later: SiteProfile, earlier: SiteProfile | None) -> int:
    """M of the last call; of the earlier run if the site did not run in the later one."""
    return later.rows if later.rows or earlier is None else earlier.rows


def _check_same(a: Profile, b: Profile) -> None:
    if a.model != b.model:
        raise InputError(
            f"profiles of two models cannot be merged: {a.model} and {b.model}; merge runs of one model only"
        )
    other = sorted({each.mod for each in {*a.mods} ^ {*b.mods}})
    if other:
        raise InputError(
            f"profiles of two models cannot be merged: what {', '.join(other)} changed in {a.model} is not the same in "
            "both; merge runs of one model only"
        )
    advice = "the model changed between the runs: probe it again"
    mine, theirs = ({site.name: (site.k, site.n) for site in profile.sites} for profile in (a, b))
    for name in [*mine, *theirs]:
        if name not in mine or name not in theirs:
            raise InputError(f"site {name!r} is in only one of the two profiles of {a.model}; {advice}")
        if mine[name] != theirs[name]:
            (k, n), (k_other, n_other) = mine[name], theirs[name]
            raise InputError(
                f"site {name!r} has K = {k}, N = {n} in one profile and K = {k_other}, N = {n_other} in the other; "
                f"{advice}"
            )


def _activation(stats: OperandStats) -> OperandSummary:
    values = stats.values.sum(dim=0)
    amax = _amax(stats, values)
    covariance = moments.covariance(stats.moments)
    return OperandSummary(
        operand=stats.operand,
        width=stats.moments.mean.numel(),
        calls=stats.calls,
        rows=stats.rows,
        sampled=stats.sampled,
        nonfinite=stats.nonfinite,
        nonfinite_calls=stats.nonfinite_calls,
        zeros=_part(values[ZERO_BIN], values.sum()),
        amax=amax,
        usual_amax=_usual_amax(stats.call_amax, stats.operand, amax),
        rms=_rms(stats.moments),
        magnitudes=_magnitudes(values),
        shares=_shares(stats.relative),
        row_spread=_spread(stats.row_spread),
        block_spread=_spread(stats.block_spread),
        covariance_error=covariance.error if isinstance(covariance, LowRank) else 0.0,
    )


def _weight(stats: WeightStats) -> OperandSummary:
    """Summary of a weight; rms and spreads are of the kept rows, with non-finite elements as zeros."""
    kept = stats.rows.double().nan_to_num(0.0, 0.0, 0.0)
    return OperandSummary(
        operand=Operand.WEIGHT,
        width=stats.column_mean.numel(),
        calls=0,
        rows=stats.row_mean.numel(),
        sampled=stats.row_mean.numel(),
        nonfinite=stats.nonfinite,
        nonfinite_calls=0,
        zeros=_part(stats.values[ZERO_BIN], stats.values.sum()),
        amax=float(stats.amax),
        usual_amax=float(stats.amax),
        rms=float(kept.square().mean().sqrt()) if kept.numel() else 0.0,
        magnitudes=_magnitudes(stats.values),
        shares=(),
        row_spread=_spread_of((kept,)),
        block_spread=_spread_of(torch.split(kept, BLOCK, dim=1)),
        covariance_error=max(stats.u.error, stats.v.error),
    )


def _part(count: Tensor, total: Tensor) -> float:
    return int(count) / int(total) if int(total) else 0.0


def _magnitudes(values: Tensor) -> tuple[int, ...]:
    """Counts of |x| from counts by value, (VALUE_BINS,): both signs together, without the zeros."""
    return tuple((values[ZERO_BIN + 1 :] + values[:ZERO_BIN].flip(0)).tolist())


def _amax(stats: OperandStats, values: Tensor) -> float:
    """The largest |x| of fully finite calls.

    For other calls only its bin is known, and the lower edge of that bin is taken; the lowest bin has none.
    """
    seen = torch.tensor(_magnitudes(values)).nonzero()
    highest = int(seen.max()) if seen.numel() else 0
    octave, half = divmod(highest, PER_OCTAVE)
    edge = (1.0 + half / PER_OCTAVE) * math.exp2(LOWEST[stats.operand] + octave) if highest else 0.0
    return max(edge, float(stats.column_amax.max()) if stats.column_amax.numel() else 0.0)


def _usual_amax(call_amax: Tensor, operand: Operand, amax: float) -> float:
    """The median of the calls' amax: the geometric centre of its bin, at most the largest amax."""
    total = int(call_amax.sum())
    if total == 0:
        return 0.0
    place = int(torch.searchsorted(call_amax.cumsum(0), (total + 1) // 2))
    if place == 0:
        return 0.0
    return min(amax, math.exp2(LOWEST[operand] + (place - 0.5) / SPREAD_STEPS))


def _rms(stats: Moments) -> float:
    if stats.count == 0 or stats.mean.numel() == 0:
        return 0.0
    return float((stats.mean.square() + stats.diagonal.clamp(min=0.0) / stats.count).mean().sqrt())


def _shares(relative: Tensor) -> tuple[Shares, ...]:
    """The losses of each format in each view, from counts of u = |x| * 448 / amax, (len(VIEWS), RELATIVE_BINS).

    A format with largest value f * 448 rounds f * u. Values up to half of its smallest subnormal become zero, and those
    below its smallest normal are subnormal; both are edges of octaves of u.
    """
    return tuple(
        share_of(view, format, counts) for view, counts in zip(VIEWS, relative, strict=True) for format in Format
    )


def share_of(view: HistogramView, format: Format, counts: Tensor) -> Shares:
    """The losses of a format with this view's scales, from its counts, (RELATIVE_BINS,)."""
    info = FORMATS[format]
    factor = info.max / FORMATS[Format.E4M3].max
    lost = _bins_below(info.smallest_subnormal / 2 / factor)
    poor = _bins_below(info.smallest_normal / factor)
    total = counts.sum()
    return Shares(
        view=view,
        format=format,
        underflow=_part(counts[1:lost].sum(), total),
        subnormal=_part(counts[lost:poor].sum(), total),
    )


def _bins_below(u: float) -> int:
    """Number of bins of `relative`, including that of zeros, below u, a power of two."""
    mantissa, exponent = math.frexp(u)
    if mantissa != 0.5:
        raise ValueError(f"{u} is no edge of an octave")
    return 2 + (exponent - 1) - RELATIVE_LOWEST


def _spread(counts: Tensor) -> Quantiles | None:
    """Quantiles from counts in steps of 1 / SPREAD_STEPS octaves, (SPREAD_BINS,), interpolated within a step.

    Rows (blocks) of zeros, in bin 0, have no spread.
    """
    counts = counts[1:].double()
    total = float(counts.sum())
    if total == 0:
        return None
    after = counts.cumsum(0)
    return Quantiles(*(_quantile(counts, after, level * total) / SPREAD_STEPS for level in _LEVELS))


def _quantile(counts: Tensor, after: Tensor, rank: float) -> float:
    """The position, in bins, below which `rank` of the counts are. `after[i]` is the sum of counts[: i + 1]."""
    place = min(int(torch.searchsorted(after, rank)), counts.numel() - 1)
    within = float(counts[place])
    below = float(after[place]) - within
    return place + (rank - below) / within


def _spread_of(blocks: tuple[Tensor, ...]) -> Quantiles | None:
    """Quantiles of log2(amax / rms) over the rows of matrices, without zero rows."""
    spreads = [
        (block.abs().amax(1) / block.square().mean(1).sqrt()).log2()[block.any(1)] for block in blocks if block.numel()
    ]
    found = torch.cat(spreads) if spreads else torch.empty(0, dtype=torch.float32)
    if found.numel() == 0:
        return None
    return Quantiles(*found.quantile(torch.tensor(_LEVELS, dtype=found.dtype)).clamp(min=0.0).tolist())


UNDERFLOW_FORMAT = Format.E4M3  # that underflow is of
UNDERFLOW_VIEWS = (HistogramView.TENSORWISE, HistogramView.ROWWISE)  # by dynamic scales of this kind


class StepFigures:
    """The figures of what trackers saw since the last reading."""

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}

    def read(self, sites: Iterable[Trackers]) -> dict[str, float]:
        """Figures by `SITE/OPERAND/FIGURE`, of operands that were seen since. Waits for the devices, once each."""
        sites = [each for each in sites if each.input.calls or each.grad_output.calls]
        trackers = {
            f"{each.live.site.name}/{tracker.operand.value}": tracker
            for each in sites
            for tracker in (each.input, each.grad_output)
        }
        figures: dict[str, float] = {}
        for name, totals in _on_host({name: _totals(tracker) for name, tracker in trackers.items()}).items():
            tracker = trackers[name]
            now = torch.cat((torch.tensor([tracker.calls, tracker.sampled], dtype=torch.float64), totals))
            since = now - self._before.get(name, torch.zeros_like(now))
            self._before[name] = now
            if since[0] > 0:
                found = _figures(tracker.width, since, amax=float(totals[4]))
                figures |= {f"{name}/{figure}": value for figure, value in found.items()}
        whole = [each for each in sites if not each.live.is_sharded]  # others would wait for all ranks
        weights = _on_host({f"{each.live.site.name}/{Operand.WEIGHT.value}": _weight_figures(each) for each in whole})
        for name, both in weights.items():
            figures |= {f"{name}/amax": float(both[0]), f"{name}/rms": float(both[1])}
        return figures


def _totals(tracker: OperandTracker) -> Tensor:
    with apart(tracker.device):
        return tracker.totals()


def _weight_figures(site: Trackers) -> Tensor:
    """amax and rms of the weight, (2,) float64; non-finite if an element is."""
    with apart(site.device):
        weight = site.live.weight.value.detach().to(torch.float32)
        return torch.stack((weight.abs().amax(), weight.square().mean().sqrt())).double()


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of different lengths on the host, with one copy from each device."""
    found: dict[str, Tensor] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        names = [name for name, tensor in tensors.items() if tensor.device == device]
        joined = torch.cat([tensors[name] for name in names]).cpu()
        found |= zip(names, torch.split(joined, [tensors[name].numel() for name in names]), strict=True)
    return {name: found[name] for name in tensors}


def _figures(width: int, since: Tensor, amax: float) -> dict[str, float]:
    """The figures of an operand from the calls, the sampled rows and the totals between two readings."""
    _, sampled, rows, power, zeros, nonfinite = since[:6].tolist()
    elements = round(sampled) * width
    figures = {
        "amax": amax,
        "rms": (max(power, 0.0) / (rows * width)) ** 0.5 if rows >= 0.5 else 0.0,
        "zeros": zeros / elements if elements else 0.0,
        "nonfinite": nonfinite / elements if elements else 0.0,
    }
    relative = since[7:].round().to(torch.int64).view(len(VIEWS), -1)
    counts = without_filling(relative, round(zeros), round(nonfinite), elements)
    for view in UNDERFLOW_VIEWS:
        figures[f"underflow_{view.value}"] = share_of(view, UNDERFLOW_FORMAT, counts[VIEWS.index(view)]).underflow
    return figures
