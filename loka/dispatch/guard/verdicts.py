"""Judging the figures of a module: by its limit, by its own past, and over several checks.

A figure is the norm of what FP8 changes over the norm of the model's own tensor. The gradient of a weight is a sum over
samples whose terms may cancel, in one batch nearly all, while their errors do not; so the norm below is the root mean
square over the last checks, if that is larger. One check alone condemns nothing that is finite.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from loka.dispatch.guard.figures import Norms
from loka.dispatch.guard.promises import Promise
from loka.dispatch.guard.runs import INPUT_GRADIENT, OUTPUT

NORMS = 16  # checks whose norms a figure is relative to
ENOUGH = 8  # norms before a figure counts
CONFIRMED = 3  # checks in a row with a figure over its limit
PAST = 64  # figures that drift is told by
RECENT = 5  # the last figures, which are compared with those before
DRIFT = 4.0  # how much larger these are, where the promise is exceeded too


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a module has to go: the figure, its value and limit."""

    figure: str
    value: float
    limit: float
    reason: str


@dataclass(slots=True)
class _Track:
    """The past of one figure."""

    norms: deque[float] = field(default_factory=lambda: deque(maxlen=NORMS))
    recent: deque[float] = field(default_factory=deque)  # the last `RECENT` values
    past: deque[float] = field(default_factory=lambda: deque(maxlen=PAST))  # those before, without what had drifted
    over: int = 0  # checks in a row

    def drift_limit(self, promise: float) -> float:
        """What the median of the recent values may be; inf while too few are known."""
        return max(DRIFT * median(self.past), promise) if len(self.past) >= ENOUGH else math.inf

    def add(self, value: float, promise: float) -> None:
        """Take in a value."""
        if len(self.recent) == RECENT and (oldest := self.recent.popleft()) <= self.drift_limit(promise):
            self.past.append(oldest)
        self.recent.append(value)


class Judge:
    """Judges the checks of one module, in order."""

    def __init__(self, promise: Promise, margin: float) -> None:
        self._promise = promise
        self._margin = margin
        self._tracks: dict[str, _Track] = {}
        self.errors: dict[str, float] = {}  # of the last check
        self.in_doubt = False  # over a limit, and not yet told from chance: the next steps should be checked too

    def judge(self, norms: Mapping[str, Norms]) -> Verdict | None:
        """Take in the norms of a check; the verdict if the module is at fault."""
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

    def _one(self, figure: str, norms: Norms, promise: float) -> Verdict | None:
        limit = self._margin * promise
        if not math.isfinite(norms.own):  # the model's own doing
            return None
        if not math.isfinite(norms.apart):
            self.errors[figure] = math.inf
            return Verdict(figure, math.inf, limit, f"FP8 makes values of its {figure} that are not finite")
        track = self._tracks.setdefault(figure, _Track())
        track.norms.append(norms.own)
        below = max(norms.own, math.hypot(*track.norms) / math.sqrt(len(track.norms)))
        value = norms.apart / below if below > 0 else 0.0
        self.errors[figure] = value
        track.add(value, promise)
        track.over = track.over + 1 if value > limit else 0
        if track.over:
            if track.over >= CONFIRMED and len(track.norms) >= ENOUGH:
                return Verdict(
                    figure, value, limit, f"its {figure} differs by {value:.3g}, over its limit of {limit:.3g}"
                )
            self.in_doubt = True
        # No sum over samples is in these two, so that they change slowly in a healthy module.
        if figure in (OUTPUT, INPUT_GRADIENT) and len(track.recent) == RECENT:
            recent, allowed = median(track.recent), track.drift_limit(promise)
            if recent > allowed:
                return Verdict(
                    figure,
                    recent,
                    allowed,
                    f"its {figure} drifts: it differs by {recent:.3g} now, and by {median(track.past):.3g} before; "
                    f"the plan promises {promise:.3g}",
                )
        return None
