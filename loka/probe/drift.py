"""Drift of a model's operands since its profile was made, site by site, in octaves.

The distance of an operand is the largest of three:

- magnitudes: the one-dimensional Wasserstein distance between the two histograms of log2 |x| of non-zero elements, in
  octaves: the average move of a magnitude. If all values become eight times as large, that is 3 octaves.
- amax: the change of log2 of the usual amax (median over calls), at half its value: it depends on single elements, and
  varies more than the magnitudes between short samples of the same training.
- zeros: the change of the share of zeros, times ZEROS octaves: a change by a quarter counts as one octave.

Where only one of the two has a non-zero element, or non-finite elements where the profile has none, the distance is
bins.OCTAVES, the whole range of the histograms: the profile cannot be valid.

The thresholds are above the distances between different seeds of one model, each trained from scratch for 60 steps of
512 samples (zoo.ranker, ten seeds, 45 pairs, the largest of 30 operands): at most 1.15 octaves for inputs and 3.7 for
gradients, with medians of 0.4 and 1.3. From step 140 to 200 they are 0.7 and 1.8. Gradients vary with the seed and
shrink or grow during training, so their threshold is wider; dynamic scales follow that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from loka.numerics.enums import Operand
from loka.probe.profile.profile import OperandSummary, Profile, SiteProfile
from loka.probe.stats.site_stats import OCTAVES, PER_OCTAVE

THRESHOLD = {Operand.INPUT: 1.5, Operand.GRAD_OUTPUT: 4.0}  # octaves
AMAX = 0.5  # octaves of distance per octave of the usual amax
ZEROS = 4.0  # octaves of distance for a share of zeros that changes from 0 to 1
FEW_ROWS = 4.0  # scatter of n sampled rows in octaves, times sqrt(n)
NAMED = 4  # sites listed by `way_back`


@dataclass(frozen=True, slots=True)
class SiteDrift:
    """Drift of one activation operand of a site from its profile."""

    site: str
    operand: Operand
    distance: float  # octaves
    threshold: float  # octaves
    words: str  # the largest change, in words

    @property
    def exceeded(self) -> bool:
        """True if the profile no longer describes this operand."""
        return self.distance > self.threshold


def compare(profile: Profile, fresh: Profile) -> tuple[SiteDrift, ...]:
    """Compare a profile with a fresh sample of the same model; summaries suffice.

    One row for each activation operand that either side has seen, in the order of `fresh`, then sites that it lacks.
    Thresholds are raised by FEW_ROWS / sqrt(rows), the scatter of few rows.
    """
    known = {site.name: site for site in profile.sites}
    pairs = [(site.name, known.pop(site.name, None), site) for site in fresh.sites]
    found = [row for pair in pairs for row in _site(*pair)]
    return (*found, *(row for old in known.values() for row in _site(old.name, old, None)))


def exceeded(drifts: Iterable[SiteDrift]) -> tuple[SiteDrift, ...]:
    """The drifts beyond their threshold, the largest excess first."""
    return tuple(sorted((drift for drift in drifts if drift.exceeded), key=_excess, reverse=True))


def way_back(drifts: Iterable[SiteDrift]) -> str:
    """Text of the call on a running model's patch that returns these sites to their native GEMMs.

    Sites that share one generated forward return together: the call reports if it needs more names.
    """
    names = list(dict.fromkeys(drift.site for drift in drifts))
    shown = [repr(name) for name in names[:NAMED]]
    return f"patch.keep({', '.join([*shown, '...'] if len(names) > NAMED else shown)})"


def age(profile: Profile, now: datetime | None = None) -> str:
    """The training that the profile has seen, and its age, as text. `now` is timezone-aware; None: the present."""
    seen = f"{profile.samples} samples over {profile.steps} training steps"
    try:
        created = datetime.fromisoformat(profile.created)
    except ValueError:
        return f"{seen}, at an unknown time"
    if created.tzinfo is None:
        created = created.replace(tzinfo=UTC)
    days = ((now or datetime.now(UTC)) - created).days
    if days < 0:
        return f"{seen}, made on {created:%Y-%m-%d}, which lies ahead: a clock was wrong"
    old = "today" if days == 0 else f"{days} day{'' if days == 1 else 's'} ago"
    return f"{seen}, made on {created:%Y-%m-%d}, {old}"


def magnitude_distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """Wasserstein distance in octaves between two histograms of magnitudes, (bins.MAGNITUDE_BINS,), neither empty.

    In one dimension it is the area between the two distribution functions. The geometric centres of neighbouring bins
    are exactly half an octave apart.
    """
    total_a, total_b = sum(a), sum(b)
    below_a = below_b = 0
    area = 0.0
    for count_a, count_b in zip(a, b, strict=True):
        below_a += count_a
        below_b += count_b
        area += abs(below_a / total_a - below_b / total_b)
    return area / PER_OCTAVE


def _excess(drift: SiteDrift) -> float:
    return drift.distance / drift.threshold


def _site(name: str, old: SiteProfile | None, new: SiteProfile | None) -> list[SiteDrift]:
    rows = []
    for operand, threshold in THRESHOLD.items():
        before, after = _operand(old, operand), _operand(new, operand)
        if before is None and after is None:
            continue
        if before is None or after is None:
            rows.append(SiteDrift(name, operand, float(OCTAVES), threshold, _one_sided(old, new, before)))
            continue
        distance, words = _distance(before, after)
        sampled = min(before.sampled, after.sampled)
        few = FEW_ROWS / math.sqrt(sampled) if sampled else float(OCTAVES)
        rows.append(SiteDrift(name, operand, distance, threshold + few, words))
    return rows


def _operand(site: SiteProfile | None, operand: Operand) -> OperandSummary | None:
    """The summary of an operand that was called at least once."""
    found = () if site is None else site.operands
    return next((summary for summary in found if summary.operand is operand and summary.calls), None)


def _one_sided(old: SiteProfile | None, new: SiteProfile | None, before: OperandSummary | None) -> str:
    if new is None:
        return "the model no longer has this site"
    if old is None:
        return "the profile does not know this site"
    if before is None:
        return "the profile never saw it, and now it runs"
    return "it ran when the profile was made, and not now"


def _distance(before: OperandSummary, after: OperandSummary) -> tuple[float, str]:
    """The distance between two samples of one operand, and its cause."""
    if after.nonfinite_calls and not before.nonfinite_calls:
        return float(
            OCTAVES
        ), f"NaN or infinity in {after.nonfinite_calls} of {after.calls} calls, the profile saw none"
    some_before, some_after = any(before.magnitudes), any(after.magnitudes)
    if not some_before and not some_after:
        return 0.0, "all zeros, as in the profile"
    if not some_after:
        return float(OCTAVES), "all zeros now; in the profile it had others"
    if not some_before:
        return float(OCTAVES), "all zeros in the profile; now it has others"
    amax = _octaves(before.usual_amax, after.usual_amax)
    zeros = after.zeros - before.zeros
    return max(
        (magnitude_distance(before.magnitudes, after.magnitudes), _describe_magnitudes(before, after)),
        (AMAX * abs(amax), f"usual amax {before.usual_amax:.3g} -> {after.usual_amax:.3g} ({amax:+.1f} octaves)"),
        (ZEROS * abs(zeros), f"zeros {before.zeros:.1%} -> {after.zeros:.1%} of the elements"),
    )


def _describe_magnitudes(before: OperandSummary, after: OperandSummary) -> str:
    shift = _octaves(before.rms, after.rms)
    return f"magnitudes moved; rms {before.rms:.3g} -> {after.rms:.3g} ({shift:+.1f} octaves)"


def _octaves(before: float, after: float) -> float:
    """log2(after / before); 0 if either is zero, when the ratio is meaningless."""
    return math.log2(after / before) if before > 0.0 and after > 0.0 else 0.0
