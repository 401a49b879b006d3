"""Gain of each mod: the time of all sites as planned, compared with the same model planned without the mod."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from loka.errors import InputError
from loka.mods.registry import ModKind, names_of
from loka.plan.plan import Gain, ModPlan, Plan
from loka.plan.select.interaction_times import step_times
from loka.plan.totals import total_time
from loka.policy.policy import Policy


def with_gains(plan: Plan, policy: Policy, replan: Callable[[Policy], Plan]) -> Plan:
    """The plan of a policy with the gain of each of its mods; `replan` plans the policy without one mod."""
    mods = []
    for number, mod in enumerate(plan.mods):
        if not mod.adaptations and not mod.rewritten:
            mods.append(mod)
            continue
        if mod.use in names_of(ModKind.INTERACTIONS):
            mods.append(replace(mod, gain=gain_by_fusing(plan, mod)))
            continue
        fewer = (*policy.mods[:number], *policy.mods[number + 1 :])
        try:
            without = replan(replace(policy, mods=fewer))
        except InputError:  # other mods, or rules, may need the result of this one
            mods.append(mod)
            continue
        mods.append(replace(mod, gain=gain_of(without, plan)))
    return replace(plan, mods=tuple(mods))


def gain_by_fusing(plan: Plan, mod: ModPlan) -> Gain | None:
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
    if before is None or after is None or _untimed(without) != _untimed(with_it):
        return None
    if before.left_out != after.left_out:
        return None
    gained = round(before.us - after.us, 3)
    return Gain(gained, round(gained / before.us, 4))


def _untimed(plan: Plan) -> frozenset[str]:
    return frozenset(site.site.name for site in plan.sites if site.timing is None and site.site.calls)
