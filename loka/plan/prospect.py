"""What other plans of a policy say of one: the gain of each of its mods, and what FP8 would bring where it has none.

Beside FP8 stands what exact mods gain, or would gain where the policy keeps `auto` from planning them.

A gain is the time of the model planned without the mod, less that of the plan. A policy without a profile keeps every
GEMM that `compute: auto` leaves open, and small batches are faster in BF16: either way a first plan says nothing about
what there is to win. So it is planned again: as if FP8 were safe everywhere, and then for larger batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loka.errors import InputError
from loka.mods.registry import ModKind, names_of
from loka.numerics.enums import Compute
from loka.plan.format import format_share, format_speedup, format_us
from loka.plan.plan import Gain, ModPlan, Plan
from loka.plan.select.interaction_times import step_times
from loka.plan.totals import comparable, total_time
from loka.policy.policy import Policy
from loka.policy.settings import SiteSettings

FACTORS = (1, 2, 4, 8, 16, 32)  # of the policy's batch size
WORTH = 1.05  # the speed-up from which a batch size is named
LEAST_GAIN = 0.01  # of exact mods, as a share of the time with them, that is named
MANY = 1000  # sites beyond which planning several times takes too long


@dataclass(frozen=True, slots=True)
class ExactGain:
    """What mods that keep the function gain, as planned or if the policy named them. Times are of a training step's
    sites and interactions, in microseconds.
    """

    uses: tuple[str, ...]  # the mods
    us: float
    without_us: float
    planned: bool

    @property
    def words(self) -> str:
        """`what merge_siblings gains, as planned: 10.2 us instead of 82.0 us, 8.01x`."""
        many = len(self.uses) > 1
        gain = f"{'gain' if many else 'gains'}, as planned"
        if not self.planned:
            gain = f"would gain if mods named {'them' if many else 'it'}"
        return (
            f"what {' and '.join(self.uses)} {gain}: {format_us(self.us)} instead of {format_us(self.without_us)}, "
            f"{format_speedup(self.without_us / self.us)}"
        )


@dataclass(frozen=True, slots=True)
class Prospect:
    """What FP8 would bring at a batch size. Times are of a training step's sites, in microseconds."""

    batch_size: int
    share_fp8: float  # of the training GEMM FLOPs
    us: float
    without_fp8_us: float
    assumed: bool  # that FP8 is safe, for want of a profile
    exact: tuple[ExactGain, ...] = ()  # what there is to gain without FP8

    @property
    def speedup(self) -> float:
        """Speed-up by FP8 itself: over native GEMMs with what LoKA fuses."""
        return self.without_fp8_us / self.us

    def describe(self, batch_size: int) -> str:
        """A sentence; `batch_size` is the policy's. What exact mods gain comes first."""
        return "; ".join([*(each.words for each in self.exact), self._of_fp8(batch_size)])

    def _of_fp8(self, batch_size: int) -> str:
        hardly = f"FP8 would hardly gain {'more ' if self.exact else ''}at batch size"
        given = "if a profile finds it safe (loka probe)" if self.assumed else "by this profile"
        gain = (
            f"{format_share(self.share_fp8)} of the training GEMM FLOPs in FP8, {format_us(self.us)} instead of "
            f"{format_us(self.without_fp8_us)}, {format_speedup(self.speedup)}"
        )
        if self.speedup < WORTH:
            return f"{hardly}s up to {self.batch_size}, {given}: the GEMMs are too small"
        if self.batch_size == batch_size:
            return f"what FP8 would bring here, {given}: {gain}"
        return f"{hardly} {batch_size}; at {self.batch_size}, {given}: {gain}"


def prospect_of(plan_at: Callable[[int, bool], Plan], plan: Plan, settings: Sequence[SiteSettings]) -> Prospect | None:
    """What FP8 would bring where a plan has none though `compute: auto` leaves it open; None otherwise, without times,
    where something else than time keeps every GEMM (evidence, a forward), and for models of more than MANY sites.

    `plan_at(batch_size, assumed)` plans the policy at another batch size, with its profile or, if `assumed`, as if FP8
    were safe. The first batch size is taken where it gains, or the largest that was tried.
    """
    left_open = any(asked.compute is Compute.AUTO for wanted in settings for asked in wanted.gemms.values())
    if plan.share_fp8 > 0 or plan.measurements is None or not left_open or not 0 < len(plan.called) <= MANY:
        return None
    assumed, found = plan.profile is None, None
    for factor in FACTORS:
        planned = plan_at(factor * plan.batch_size, assumed)
        total = total_time(planned)
        if total is None:
            return None
        found = Prospect(planned.batch_size, planned.share_fp8, total.us, total.without_fp8_us, assumed)
        if planned.share_fp8 > 0 and found.speedup >= WORTH:
            return found
        if not any(site.timing is not None and site.timing.kept for site in planned.sites):
            return None
    return found


def with_exact_gains(prospect: Prospect, plan: Plan, with_auto: Plan | None) -> Prospect:
    """The prospect with what exact mods gain in a plan, and, in `with_auto`, if `auto` planned more of them.

    What they gain there is by their `Gain`, or that of their interactions; others are left out.
    """
    found = [_exact_gain(plan, plan.mods, True)]
    if with_auto is not None:
        named = {mod.source for mod in plan.mods}
        found.append(_exact_gain(with_auto, [mod for mod in with_auto.mods if mod.source not in named], False))
    return replace(prospect, exact=tuple(each for each in found if each is not None))


def _exact_gain(plan: Plan, mods: Sequence[ModPlan], planned: bool) -> ExactGain | None:
    total = total_time(plan)
    gains: dict[str, float] = {}
    for mod in mods:
        by_fusing = mod.use in names_of(ModKind.INTERACTIONS) and mod.gain is None
        gain = _gain_by_fusing(plan, mod) if by_fusing else mod.gain
        if mod.exact and gain is not None and gain.us > 0:
            gains[mod.use] = gains.get(mod.use, 0.0) + gain.us
    gained = sum(gains.values())
    if total is None or gained < LEAST_GAIN * total.us:
        return None
    return ExactGain(tuple(gains), total.us, round(total.us + gained, 3), planned)


def with_gains(plan: Plan, policy: Policy, replan: Callable[[Policy], Plan]) -> Plan:
    """The plan of a policy with the gain of each of its mods; `replan` plans the policy without one mod."""
    return replace(plan, mods=tuple(_with_gain(plan, mod, policy, replan) for mod in plan.mods))


def _with_gain(plan: Plan, mod: ModPlan, policy: Policy, replan: Callable[[Policy], Plan]) -> ModPlan:
    if mod.gain is not None or (not mod.adaptations and not mod.rewritten):
        return mod
    if mod.use in names_of(ModKind.INTERACTIONS):
        return replace(mod, gain=_gain_by_fusing(plan, mod))
    try:
        without = replan(policy.without_mod(mod.source))
    except InputError:  # other mods, or rules, may need the result of this one
        return mod
    return replace(mod, gain=gain_of(without, plan))


def _gain_by_fusing(plan: Plan, mod: ModPlan) -> Gain | None:
    """Gain of the interactions that a mod fuses over torch.compile; None where no such time is known.

    Its sites are no separate GEMMs in this plan, so that a plan without the mod does not have comparable times.
    """
    total, owners = total_time(plan), {each.owner for each in mod.rewritten}
    times = [found for found in step_times(plan.interactions) if found[0].owner in owners]
    if total is None or not times:
        return None
    gained = round(sum(each.calls * (as_is.us - chosen.us) for each, chosen, as_is in times), 3)
    return Gain(gained, round(gained / (total.us + gained), 4))


def gain_of(without: Plan, with_it: Plan) -> Gain | None:
    """Gain of the second plan over the first; None where the sites without times differ.

    Interactions count in both. A site in only one of the plans must be timed, as a mod may merge several sites.
    """
    before, after = total_time(without), total_time(with_it)
    if before is None or after is None or not comparable(without, with_it):
        return None
    gained = round(before.us - after.us, 3)
    return Gain(gained, round(gained / before.us, 4))
