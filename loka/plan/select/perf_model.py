"""Models of time: of parts, each looked up once, and their sums; and of launches on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import hypot, sqrt

from loka.devices.spec import DeviceSpec, Execution, HostCosts
from loka.devices.targets import DEFAULT
from loka.graph.patterns.norm import BATCH_NORM
from loka.kernels.fused.norm.norms import NORMS
from loka.kernels.measurements.part_bounds import bound_us, interaction_us, is_aligned, padded, padding_us
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartCosts, PartKind, PartTime, TimeSource, less_sure
from loka.numerics.enums import Format
from loka.plan.plan import NATIVE, StepTime
from loka.plan.select.workload import COMPILED, DROPOUT, RENDERED, STATIC_SCALES, STATIC_SCALES_TILES, TIMES

_NORM, _ACTIVATIONS = "layer_norm", ("silu", "hardswish", "relu")  # substitutes for others that move the same bytes


@dataclass(frozen=True, slots=True)
class Latency:
    """A time with its noise, half the interquartile range, both in microseconds."""

    us: float
    noise: float
    source: TimeSource

    def __add__(self, other: Latency) -> Latency:
        return Latency(self.us + other.us, hypot(self.noise, other.noise), less_sure(self.source, other.source))

    def estimate(self, factor: float) -> Latency:
        """The time of something that takes so many times as long."""
        return Latency(self.us * factor, self.noise * factor, less_sure(self.source, TimeSource.ESTIMATED))

    def ties_with(self, other: Latency) -> bool:
        """True if the two cannot be distinguished: their difference is within the noise of both together."""
        return abs(self.us - other.us) <= hypot(self.noise, other.noise)


def call_time(forward: Latency, backward: Latency, host_us: float | None = None) -> StepTime:
    """The time of both directions, with the noise of their sum."""
    total = forward + backward
    return StepTime(forward.us, backward.us, total.source, host_us, total.noise)


# Time of a norm with its gradient by torch.compile over rendered: the median of 26 regions on an H100, from 1.08 to
# 1.78 (docs/results/dispatch-2026-11-21.md: compiled BF16 against LoKA's own). An activation alone is one pass in both.
COMPILED_NORMS = 1.5
# Time of kernels that are not recorded, as a multiple of the rendered kernel that they are derived from. For static
# scales: the passes of measured steps less their GEMMs, the median of four regions with LayerNorms and the mean of two
# with BlockNorms (1.19 and 1.30), on an H100.
_OVER_RENDERED = {STATIC_SCALES: 1.03, STATIC_SCALES_TILES: 1.25}

# Time of a BatchNorm with an activation, statistics and sums included, over that of the rendered LayerNorm with the
# same result; by kernel, work, and whether the result is FP8: means of three regions on an H200 (docs/results/LOG.md,
# "BatchNorm on an H200"), from which each is up to 16 % away.
_OVER_LAYER_NORM = {
    (RENDERED, PartKind.FORWARD, True): 1.36,
    (RENDERED, PartKind.FORWARD, False): 1.67,
    (RENDERED, PartKind.BACKWARD, True): 1.26,
    (RENDERED, PartKind.BACKWARD, False): 1.39,
    (COMPILED, PartKind.FORWARD, False): 1.72,
    (COMPILED, PartKind.BACKWARD, False): 1.85,
}
# Microseconds that a part takes longer for a million elements, on the same card: with a dropout than without, for its
# random numbers and its mask, and with a GELU than with a SiLU. Between a BatchNorm and its gradient's sums torch's
# dropout takes a pass of its own, 2.4 in all, which is left out. GELU: of kernels at (32768, 3072), from 0.03 to 0.5
# but for one (docs/results/LOG.md, "a GELU without an erf"), and by torch.compile (there, "a matrix for each group").
_GELU, _SILU = "gelu", "silu"
_ADDED_US = {
    (DROPOUT, RENDERED, PartKind.FORWARD): 3.3,
    (DROPOUT, RENDERED, PartKind.BACKWARD): 0.7,
    (DROPOUT, COMPILED, PartKind.FORWARD): 3.0,
    (DROPOUT, COMPILED, PartKind.BACKWARD): 0.7,
    (_GELU, RENDERED, PartKind.FORWARD): 0.3,
    (_GELU, RENDERED, PartKind.BACKWARD): 0.3,
    (_GELU, COMPILED, PartKind.FORWARD): 0.5,
    (_GELU, COMPILED, PartKind.BACKWARD): 1.1,
}
_DERIVED_NOISE = 0.1  # of both

# Noise of an interaction's time estimated from its bytes: eight measured kernels (docs/results/LOG.md, "where Wukong
# small's step went") are from 10 % below it to 15 % above.
BY_BYTES = 0.1

# Time of a product with rows that are not aligned from which torch.compile pads it, in microseconds. It measures both
# forms in a loop, where the padded one takes as long as its launches. On an H200 it padded those of 150 us and more,
# and none of 105 and less, however much faster that would be (docs/results/LOG.md, "products that torch.compile pads").
# In a step it counts no copy of what it computes itself: it padded dgrads and wgrads, whose columns alone are not
# aligned, of 90 us and more, and left a fprop of 134 us ("unaligned products in a step" there).
_PADDED_FROM = 145.0
_PADDED_COLUMNS_FROM = 80.0

NOTHING = Latency(0.0, 0.0, TimeSource.MEASURED)


class PerfModel:
    """Looks parts up in `costs`, each once.

    A part other than a GEMM that was not measured gets the time of a substitute, scaled by the bytes of both: its own
    norm with another activation or without one, a LayerNorm for another norm, e4m3 rowwise for another recipe, a
    quantizer for another kind of work. It counts as estimated. A GEMM that was not measured has no time. Norms compiled
    by torch take `COMPILED_NORMS` times the rendered ones; this is estimated too, as are kernels with static scales, a
    BatchNorm or a dropout, from the time without, and a GELU, from that of a SiLU. An interaction without any
    measurement is estimated from its bytes for LoKA's kernels, and has no compiled time. A native GEMM with rows that
    are not aligned takes the time of the padded one and its copies where torch.compile pads it, unless `execution` is
    eager; None: it is not known.
    """

    def __init__(self, costs: PartCosts, device: DeviceSpec = DEFAULT, execution: Execution | None = None) -> None:
        self.costs = costs
        self.device = device
        self._pads = execution is not Execution.EAGER
        self._known: dict[Part, Latency | None] = {}

    def part(self, part: Part) -> Latency | None:
        """A part's time; None where it cannot be derived."""
        if part not in self._known:
            self._known[part] = self._look_up(part)
        return self._known[part]

    def sum(self, parts: Iterable[Part]) -> Latency | None:
        """The time of several parts, one after the other; None where one of them is unknown."""
        us, squares, source = 0.0, 0.0, TimeSource.MEASURED
        for part in parts:
            latency = self.part(part)
            if latency is None:
                return None
            us, squares, source = us + latency.us, squares + latency.noise**2, less_sure(source, latency.source)
        return Latency(us, sqrt(squares), source)

    def _look_up(self, part: Part) -> Latency | None:
        words = part.around.split() if part.kernel in (RENDERED, COMPILED) else ()
        if TIMES in words:
            without = self.part(replace(part, around=" ".join(word for word in words if word != TIMES)))
            return None if without is None else without.estimate(1.0)
        if DROPOUT in words:
            return self._with_added(part, DROPOUT)
        if BATCH_NORM in words:
            return self._with_batch_norm(part)
        if _GELU in words and self.costs.time(part) is None:
            return self._with_added(part, _GELU, _SILU)
        factor = _over_rendered(part)
        if factor is not None:
            rendered = self.part(replace(part, kernel=RENDERED))
            return rendered if rendered is None or factor == 1 else rendered.estimate(factor)
        timed = self.costs.time(part)
        if timed is not None:
            return self._padded(part, _latency(timed)) if part.work is PartKind.GEMM else _latency(timed)
        if part.work in INTERACTIONS:
            us = interaction_us(part, self.device)
            return Latency(us, us * BY_BYTES, TimeSource.ESTIMATED) if part.kernel == RENDERED else None
        for other in _substitutes(part) if part.work is not PartKind.GEMM else ():
            timed = self.costs.time(other)
            if timed is not None:
                return _latency(timed).estimate(bound_us(part, self.device) / bound_us(other, self.device))
        return None

    def _padded(self, part: Part, own: Latency) -> Latency:
        """A GEMM's time with the padding of torch.compile, where it pads it."""
        if not self._pads or part.kernel != NATIVE or is_aligned(part):
            return own
        columns_alone = padded(part).contraction == part.contraction
        if own.us < (_PADDED_COLUMNS_FROM if columns_alone else _PADDED_FROM):
            return own
        timed = self.costs.time(padded(part))
        if timed is None:
            return own
        copies = padding_us(part, self.device)
        there = _latency(timed) + Latency(copies, copies * BY_BYTES, TimeSource.ESTIMATED)
        return min(own, there, key=lambda latency: latency.us)

    def _with_added(self, part: Part, word: str, other: str = "") -> Latency | None:
        """A part with a dropout or a GELU: the part without it, or with the `other`, and what it adds."""
        words = (other if each == word else each for each in part.around.split())
        known = self.part(replace(part, around=" ".join(filter(None, words))))
        if known is None:
            return None
        added = _ADDED_US[word, part.kernel, part.work] * part.rows * part.columns / 1e6
        return known + Latency(added, added * _DERIVED_NOISE, TimeSource.ESTIMATED)

    def _with_batch_norm(self, part: Part) -> Latency | None:
        """A part with a BatchNorm, from the LayerNorm's rendered kernel."""
        known = self.part(replace(part, around=part.around.replace(BATCH_NORM, _NORM), kernel=RENDERED))
        if known is None:
            return None
        made = known.estimate(_OVER_LAYER_NORM[part.kernel, part.work, _is_fp8(part)])
        return replace(made, noise=hypot(made.noise, made.us * _DERIVED_NOISE))


def _over_rendered(part: Part) -> float | None:
    """Time of a part as a multiple of the rendered kernel that it is derived from; None for one that is recorded."""
    if part.work in INTERACTIONS:
        return None
    if part.kernel == COMPILED:
        return COMPILED_NORMS if any(word in NORMS for word in part.around.split()) else 1.0
    return _OVER_RENDERED.get(part.kernel)


def _latency(timed: PartTime) -> Latency:
    return Latency(timed.us, timed.us * timed.spread, timed.source)


def _substitutes(part: Part) -> list[Part]:
    """Parts that move similar bytes, the nearest first."""
    found = [replace(part, around=around) for around in _like(part.around)]
    if _is_fp8(part):
        found += [replace(each, recipe="e4m3 rowwise") for each in (part, *found)]
    quantizer = replace(part, work=PartKind.QUANTIZE, recipe="e4m3 rowwise", around="")
    return [each for each in dict.fromkeys((*found, quantizer)) if each != part]


def _like(around: str) -> list[str]:
    """Similar norms and activations, the nearest first."""
    norms = [word for word in around.split() if word in NORMS]
    activations = _ACTIVATIONS if len(around.split()) > len(norms) else ()
    found = [" ".join((*norms, activation)) for activation in activations]
    found += norms
    return (
        list(dict.fromkeys((*found, *(f"{_NORM} {activation}" for activation in activations), _NORM))) if around else []
    )


def _is_fp8(part: Part) -> bool:
    """True if a part writes FP8."""
    return part.recipe.split(" ")[0] in tuple(Format)


@dataclass(frozen=True, slots=True)
class HostModel:
    """Prices launches by how the model runs."""

    costs: HostCosts
    execution: Execution

    def us(self, gemms: int, parts: Iterable[Part], generated: bool) -> float:
        """Host time of a site's GEMMs and of the parts around them in one step, microseconds.

        `generated`: by a generated class with FP8 GEMMs or fused kernels; otherwise by the model's own operations. The
        transposed copies of a site are one launch.
        """
        if self.execution.replays:
            return 0.0
        works = [part.work for part in parts]
        copies = works.count(PartKind.REQUANTIZE_TRANSPOSE)
        launches = gemms + len(works) - max(0, copies - 1)
        return launches * (self.costs.generated if generated else self.costs.torch)[self.execution]
