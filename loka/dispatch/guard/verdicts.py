"""Judging the figures of a module: by its limit, by its own past, and over several checks.

A figure is the norm of what FP8 changes over the norm of the model's own tensor. The gradient of a weight is a sum over
samples whose terms may cancel, in one batch nearly all, while their errors do not; so the norm below is the root mean
square over the last checks, if that is larger, and its limit is wider. Still it grows where a gradient goes through
zero; so drift is told by the error itself too, which does not. One check alone condemns nothing that is finite.

The numbers below were chosen on healthy training on a CPU: 19,700 checks of a small model, and 1,100 of a ranker and a
tower of blocks. In multiples of what the plan promises, outputs reached 2.4, but for two single checks of a head whose
logits passed zero (4.5 and 6.3); gradients of inputs 1.3; those of weights 4.9, while the loss stood still and the
gradients of the head nearly cancelled. No figure was over the limits below twice in a row.
"""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from loka.dispatch.bound_state import BoundModule
from loka.paths import open_plain

OUTPUT, INPUT_GRADIENT, VECTORS = "output", "gradient of its input", "gradients of its vectors"


@dataclass(frozen=True, slots=True)
class Figure:
    """Norms of one tensor in both runs. `norms`: of the difference and of the model's own, (2,) float64."""

    label: str
    norms: Tensor


@dataclass(frozen=True, slots=True)
class Norms:
    """L2 norms: of the difference that FP8 makes, and of the model's own; inf where a value is not finite."""

    apart: float
    own: float


def difference(label: str, found: Tensor, expected: Tensor) -> Figure:
    """The norms of `found - expected` and of `expected`; not finite where an element is not. Does not synchronise."""
    with torch.no_grad():
        apart = found.float() - expected.float()
        pair = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (apart, expected)]
        return Figure(label, torch.stack(pair))


def read(figures: Mapping[str, Sequence[Figure]]) -> dict[str, dict[str, Norms]]:
    """For each module and label the norms, those of several tensors together; waits for the device once."""
    flat = [figure.norms for each in figures.values() for figure in each]
    device = flat[0].device if flat else None
    norms = iter(torch.stack([pair.to(device) for pair in flat]).tolist() if flat else ())
    found = {}
    for name, each in figures.items():
        together: dict[str, list[tuple[float, float]]] = {}
        for figure in each:
            together.setdefault(figure.label, []).append(tuple(next(norms)))
        found[name] = {label: Norms(*map(_norm, zip(*pairs, strict=True))) for label, pairs in together.items()}
    return found


def _norm(values: Sequence[float]) -> float:
    return math.hypot(*values) if all(math.isfinite(value) for value in values) else math.inf


PLAN = "plan.json"
UNKNOWN_DB = 22.0  # SQNR of a GEMM that the plan has no figure for: a little under that of e5m2
FLOOR = 0.01  # kernels of a module round by themselves, in bfloat16 perhaps, beside its FP8 GEMMs


@dataclass(frozen=True, slots=True)
class Promise:
    """Relative errors (noise over signal) of a bound module by the plan: of its output and of its gradients."""

    output: float
    gradients: float


def promises(package: str, bound: Iterable[BoundModule]) -> dict[str, Promise]:
    """The promise for each module, by the `plan.json` beside its package.

    The errors of the GEMMs of a module add up as independent ones do: its fprops in its output, all of them in its
    gradients. A GEMM's is the lower end of the SQNR by the profile's evidence, otherwise that of its kernel's
    measurement, otherwise `UNKNOWN_DB`.
    """
    known = _sqnr(package)
    found = {}
    for each in bound:
        forward = backward = FLOOR**2
        for index, site in enumerate(each.counters.sites):
            for gemm in each.counters.planned(index):
                noise = 10 ** (-known.get((site, gemm), UNKNOWN_DB) / 10)
                backward += noise
                forward += noise if gemm == "fprop" else 0.0
        found[each.name] = Promise(math.sqrt(forward), math.sqrt(backward))
    return found


def _sqnr(package: str) -> dict[tuple[str, str], float]:
    """SQNR in dB of each planned GEMM, by site and GEMM; {} without a plan that can be read."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return {}
    try:
        with open_plain(Path(file).parent / PLAN) as opened:
            plan = json.loads(opened.read().decode())
        found = {}
        for site in plan["sites"]:
            for number in site["gemms"]:
                decision = plan["decisions"][number]
                if (value := _figure(decision)) is not None:
                    found[site["site"]["name"], decision["gemm"]] = value
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}  # a plan of another version
    return found


def _figure(decision: Mapping[str, Any]) -> float | None:
    evidence = decision.get("evidence") or {}
    low = (evidence.get("sqnr_db") or {}).get("low")
    measured = [each.get("sqnr_db") for each in decision.get("times", ()) if each["kernel"] == decision["kernel"]]
    values = [float(value) for value in (low, *measured) if value is not None]
    return values[0] if values and math.isfinite(values[0]) else None


NORMS = 16  # checks whose norms a figure is relative to
ENOUGH = 8  # norms before a figure counts
CONFIRMED = 3  # checks in a row with a figure over its limit
PAST = 64  # figures that drift is told by
RECENT = 5  # the last figures, which are compared with those before
DRIFT = 4.0  # how much larger these are, where the promise is exceeded too
SUMS = 3.0  # how much wider the limits of sums over samples are
LARGEST = 1 / 6  # a limit over the margin, at most: 0.5 by default


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a module has to go: the figure, its value and limit."""

    figure: str
    value: float
    limit: float
    reason: str


@dataclass(slots=True)
class _Track:
    """The past of one figure."""

    norms: deque[float] = field(default_factory=lambda: deque(maxlen=NORMS))
    recent: deque[tuple[float, float]] = field(default_factory=deque)  # the last `RECENT` errors, relative and absolute
    past: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=PAST)
    )  # those before; no drifted ones
    over: int = 0  # checks in a row

    def add(self, relative: float, absolute: float, promise: float) -> None:
        """Take in the errors of a check."""
        if len(self.recent) == RECENT and not self._drifted(*(oldest := self.recent.popleft()), promise):
            self.past.append(oldest)
        self.recent.append((relative, absolute))

    def state(self) -> list[Any]:
        """The fields in order, as plain data."""
        return [list(self.norms), [list(pair) for pair in self.recent], [list(pair) for pair in self.past], self.over]

    @classmethod
    def of(cls, norms: Any, recent: Any, past: Any, over: Any) -> _Track:
        """A track of what `state` gave."""
        track = cls(over=int(over))
        track.norms.extend(map(float, norms))
        track.recent.extend((float(relative), float(absolute)) for relative, absolute in recent)
        track.past.extend((float(relative), float(absolute)) for relative, absolute in past)
        return track

    def drift(self, promise: float) -> tuple[float, float] | None:
        """The relative error lately and before, if both it and the absolute one have drifted."""
        if len(self.recent) < RECENT:
            return None
        relative, absolute = (median(each) for each in zip(*self.recent, strict=True))
        return (relative, _usual(each for each, _ in self.past)) if self._drifted(relative, absolute, promise) else None

    def _drifted(self, relative: float, absolute: float, promise: float) -> bool:
        if len(self.past) < ENOUGH:
            return False
        usual, usual_absolute = (_usual(each) for each in zip(*self.past, strict=True))
        return relative > max(DRIFT * usual, promise) and absolute > DRIFT * usual_absolute


@dataclass(frozen=True, slots=True)
class Past:
    """What `Judge.state` gave, read again."""

    tracks: dict[str, _Track]
    in_doubt: bool

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Past:
        """Raises LookupError, TypeError or ValueError for what is no such state."""
        tracks = {str(name): _Track.of(*fields) for name, *fields in state["figures"]}
        return cls(tracks, bool(state["in_doubt"]))


def _usual(values: Iterable[float]) -> float:
    """The lower quartile: a slow drift is for long in more than half of the past."""
    return quantiles(values, n=4)[0]


class Judge:
    """Judges the checks of one module, in order."""

    def __init__(self, promise: Promise, margin: float) -> None:
        self._promise = promise
        self._margin = margin
        self._tracks: dict[str, _Track] = {}
        self.errors: dict[str, float] = {}  # of the last check
        self.in_doubt = False  # over a limit, and not yet told from chance: the next steps should be checked too

    def judge(self, norms: Mapping[str, Norms]) -> Fault | None:
        """Take in the norms of a check; the fault if the module is at fault."""
        self.errors = {}
        self.in_doubt = False
        found = None
        for figure, each in norms.items():
            promise = self._promise.output if figure == OUTPUT else self._promise.gradients
            verdict = self._one(figure, each, promise)
            if found is None or (verdict is not None and verdict.value / verdict.limit > found.value / found.limit):
                found = verdict
        return found

    def forget(self) -> None:
        """Start anew: the module has fallen back, or returns."""
        for track in self._tracks.values():
            track.recent.clear()
            track.over = 0

    def state(self) -> dict[str, Any]:
        """The past of all figures, as plain data."""
        return {"in_doubt": self.in_doubt, "figures": [[name, *each.state()] for name, each in self._tracks.items()]}

    def go_on(self, past: Past) -> None:
        """Take on the past of another judge."""
        self._tracks, self.in_doubt = past.tracks, past.in_doubt

    def _one(self, figure: str, norms: Norms, promise: float) -> Fault | None:
        expected = promise if figure in (OUTPUT, INPUT_GRADIENT) else SUMS * promise
        limit = self._margin * min(expected, LARGEST)
        if not math.isfinite(norms.own):  # the model's own doing
            return None
        if not math.isfinite(norms.apart):
            self.errors[figure] = math.inf
            return Fault(figure, math.inf, limit, f"FP8 makes values of its {figure} that are not finite")
        track = self._tracks.setdefault(figure, _Track())
        track.norms.append(norms.own)
        below = max(norms.own, math.hypot(*track.norms) / math.sqrt(len(track.norms)))
        value = norms.apart / below if below > 0 else 0.0
        self.errors[figure] = value
        track.add(value, norms.apart, expected)
        track.over = track.over + 1 if value > limit else 0
        if track.over:
            if track.over >= CONFIRMED and len(track.norms) >= ENOUGH:
                return Fault(
                    figure, value, limit, f"its {figure} differs by {value:.3g}, over its limit of {limit:.3g}"
                )
            self.in_doubt = True
        if (drift := track.drift(expected)) is not None:
            lately, before = drift
            reason = f"its {figure} drifts: it differs by {lately:.3g} now, and by {before:.3g} before"
            return Fault(figure, lately, max(DRIFT * before, expected), reason)
        return None
