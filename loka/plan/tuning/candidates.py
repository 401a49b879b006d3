"""The candidate plans of a policy that a measured step can choose between.

Some hold for the whole model: the plan as it stands, BF16 by the compiler and in fused kernels, each recipe that is
left open, and interactions one way or the other. Others are the plan with one group of sites switched, where the
predicted times are close. A group is a chain of linears, or a site apart, with all others that are alike: one layer of
eight would be lost in the noise. Candidates in which the same runs are one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from loka.errors import InputError
from loka.gc import deferred_gc
from loka.graph.sites.site import Site
from loka.graph.trace.tracer import Tracer
from loka.numerics.enums import Fuse
from loka.plan.evidence import ProfiledSites, open_measurements, open_profile
from loka.plan.examine import Examined, examine, tracer_of
from loka.plan.format import pattern_of
from loka.plan.plan import Plan, SitePlan
from loka.plan.plan_of import Decided, RecordedPlan, decided, kernels_for
from loka.plan.totals import predicted_step, total_time
from loka.plan.tuning.choices import AS_IT_STANDS, Choice, SiteChoice, SitePrecision, is_open
from loka.plan.tuning.fingerprints import decisions_sha256
from loka.plan.tuning.record import TunedInputs, tuned_inputs
from loka.policy.policy import Policy
from loka.policy.settings import SiteSettings

NATIVE_TITLE = "BF16 by the compiler"
STANDING_TITLE = "as planned by predicted times"
CLOSE = 0.25  # of a group's predicted time: a switch that is predicted to cost more is not measured; of the model's
MOST_GROUPS = 12  # that are switched, those with most time first

_LISTED = 2  # patterns in a group's name

_NATIVE = Choice((SiteChoice(SitePrecision.BF16, fuse=Fuse.NEVER),), interactions=False)
_FUSED = Choice((SiteChoice(SitePrecision.BF16, fuse=Fuse.ALWAYS),))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A choice and its plan."""

    title: str
    choice: Choice
    plan: Plan
    decisions: str  # sha256 of what runs
    predicted_us: float | None

    @property
    def sites_fp8(self) -> int:
        """Sites with a GEMM in FP8."""
        return sum(site.fp8 for site in self.plan.sites)


@dataclass(frozen=True, slots=True)
class Group:
    """Sites that are switched together."""

    name: str  # "layers.*.mlp.0 and 2 more"
    sites: tuple[str, ...]
    plans: tuple[SitePlan, ...]

    @property
    def predicted_us(self) -> float:
        """Predicted time of its sites in a step; 0 where none is known."""
        return sum(each.site.calls * each.timing.chosen.us for each in self.plans if each.timing is not None)


class Candidates:
    """The candidates of a policy. Builds the model, and traces it once for all of them.

    Raises InputError as `make_plan` does.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        with deferred_gc():
            self._known: ProfiledSites | None = open_profile(policy)
            self._costs: RecordedPlan | None = open_measurements(policy)
            self._examined: Examined = examine(policy)
            self._tracer: Tracer = tracer_of(self._examined)
            self._standing = self._decided(AS_IT_STANDS)

    @property
    def inputs(self) -> TunedInputs:
        """What decides which candidates there are."""
        found = self._examined
        return tuned_inputs(self.policy, found.built, found.sites, found.settings, self._known)

    @property
    def standing(self) -> Candidate:
        """The plan as it stands, by predicted times."""
        return _candidate(STANDING_TITLE, AS_IT_STANDS, self._standing.plan)

    def found(self, end: float = math.inf, clock: Callable[[], float] = time.monotonic) -> tuple[Candidate, ...]:
        """All candidates in the order to measure them; no further switch is planned after `end` on the clock.

        The plan as it stands and BF16 by the compiler come first, the others by what is expected of them.
        """
        with deferred_gc():
            native, *others = self._whole()
            for group, choice, title in self._switches():
                if clock() > end:
                    break
                made = self._made(title, choice)
                if made is not None and self._is_close(made, group):
                    others.append(made)
            return _once([self.standing, native, *sorted(others, key=self._promise)])

    def combined(self, choices: Sequence[Choice], title: str) -> Candidate | None:
        """A candidate of several choices, one after the other; None where it cannot be planned."""
        choice = choices[0]
        for other in choices[1:]:
            choice = choice.then(other)
        with deferred_gc():
            return self._made(title, choice)

    def _whole(self) -> list[Candidate]:
        choices = [(NATIVE_TITLE, _NATIVE), ("BF16 in fused kernels", _FUSED)]
        for recipe in self._recipes(self._examined.settings):
            more = f", {recipe}" if recipe else ""
            forced = (SiteChoice(SitePrecision.FP8, recipe), *self._apart)
            choices.append((f"FP8 wherever it is safe{more}", Choice(forced)))
            choices.append((f"FP8 by predicted times{more}", Choice((SiteChoice(SitePrecision.OPEN, recipe),))))
        choices += [
            ("all interactions in LoKA's kernels", Choice(interactions=True)),
            ("interactions left to the compiler", Choice(interactions=False)),
        ]
        return [made for title, choice in choices if (made := self._made(title, choice)) is not None]

    @property
    def _apart(self) -> tuple[SiteChoice, ...]:
        """Leaves alone the sites that interactions compute: in FP8 they would not be part of these."""
        taken = tuple(name for each in self._standing.plan.interactions for name in each.sites)
        return (SiteChoice(SitePrecision.OPEN, sites=taken),) if taken else ()

    def _switches(self) -> Iterator[tuple[Group, Choice, str]]:
        for group in self.groups()[:MOST_GROUPS]:
            names = frozenset(group.sites)
            settings = [
                wanted
                for site, wanted in zip(self._examined.sites, self._examined.settings, strict=True)
                if site.name in names
            ]
            ways = [("BF16", SiteChoice(SitePrecision.BF16, sites=group.sites))]
            ways += [
                ("BF16 in fused kernels", SiteChoice(SitePrecision.BF16, fuse=Fuse.ALWAYS, sites=group.sites)),
                ("BF16 by the compiler", SiteChoice(SitePrecision.BF16, fuse=Fuse.NEVER, sites=group.sites)),
            ]
            for recipe in self._recipes(settings):
                ways.append(
                    (f"FP8, {recipe}" if recipe else "FP8", SiteChoice(SitePrecision.FP8, recipe, sites=group.sites))
                )
            for title, way in ways:
                yield group, Choice((way,)), f"{group.name}: {title}"

    def groups(self) -> tuple[Group, ...]:
        """The groups of sites in which something is left open, those with most predicted time first."""
        plan = self._standing.plan
        wanted = dict(zip((site.name for site in self._examined.sites), self._examined.settings, strict=True))
        plans = {each.site.name: each for each in plan.called}
        chained = {name for chain in self._standing.chains for name in chain}
        apart = {name for each in plan.interactions for name in each.sites}
        alone = (name for name in plans if name not in chained | apart)
        units = [*self._standing.chains, *((name,) for name in alone)]
        alike: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
        for unit in units:
            own = [name for each in unit for name in plans[each].site.rule_names]
            if any(name in wanted and is_open(wanted[name]) for name in own):
                key = tuple(_likeness(plans[each].site, wanted) for each in unit)
                alike.setdefault(key, []).append(unit)
        groups: list[Group] = []
        for same in alike.values():
            names = [name for unit in same for name in unit]
            members = tuple(member for name in names for member in plans[name].site.rule_names)
            title = _named(same)
            if any(each.name == title for each in groups):
                title = f"{names[0]} and alike ({len(names)} sites)"
            groups.append(Group(title, members, tuple(plans[name] for name in names)))
        return tuple(sorted(groups, key=lambda group: -group.predicted_us))

    def _recipes(self, settings: Sequence[SiteSettings]) -> tuple[str, ...]:
        """The recipes that are left open, or "" for the policy's own; none where no GEMM is open."""
        opened = [wanted for wanted in settings if is_open(wanted)]
        if not opened:
            return ()
        labels = (each.recipe for wanted in opened for each in (wanted, *wanted.alternatives) if wanted.alternatives)
        return tuple(dict.fromkeys(labels)) or ("",)

    def _promise(self, candidate: Candidate) -> tuple[int, float]:
        """The less, the earlier it is measured: what is for the whole model and may be fastest, switches that are
        predicted to change something, other switches, and last what is predicted to be far slower.

        A candidate without a prediction may be as fast as the plan as it stands.
        """
        standing = self.standing.predicted_us or 0.0
        predicted = candidate.predicted_us or standing
        if not candidate.choice.is_switch:
            near = candidate.choice == _FUSED or predicted <= (1 + CLOSE) * standing
            return (0 if near else 3), predicted
        return (1 if predicted != standing else 2), predicted

    def _is_close(self, made: Candidate, group: Group) -> bool:
        standing = self.standing.predicted_us
        if standing is None or made.predicted_us is None:
            return True
        return made.predicted_us - standing <= CLOSE * group.predicted_us

    def _made(self, title: str, choice: Choice) -> Candidate | None:
        """A candidate; None where a rule that names a site, or another mod, does not allow it."""
        try:
            made = _candidate(title, choice, self._decided(choice).plan)
        except InputError:
            return None
        same = _interacting(made.plan) == _interacting(self._standing.plan)
        return made if same else replace(made, predicted_us=None)  # what the compiler does there is in no sum

    def _decided(self, choice: Choice) -> Decided:
        kernels = kernels_for(self.policy)
        by = self.policy.tuned_name
        return decided(self._examined, self._known, self._costs, kernels, self._tracer, choice, by)


def _candidate(title: str, choice: Choice, plan: Plan) -> Candidate:
    return Candidate(title, choice, plan, decisions_sha256(plan), _predicted(plan))


def _predicted(plan: Plan) -> float | None:
    """Predicted time of a step: what it waits for, where the policy says how the model runs, otherwise of its sites."""
    total = total_time(plan)
    if total is None:
        return None
    step = predicted_step(plan, total)
    return total.us if step is None else max(step.host_us, step.gpu_us)


def _interacting(plan: Plan) -> list[tuple[str, str]]:
    return [(each.owner, each.form) for each in plan.interactions]


def _once(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The first of those in which the same runs."""
    found: dict[str, Candidate] = {}
    for each in candidates:
        found.setdefault(each.decisions, each)
    return tuple(found.values())


def _likeness(site: Site, wanted: dict[str, SiteSettings]) -> tuple[object, ...]:
    around = (site.fed_by, site.followed_by, site.gemms)
    asked = tuple(id(wanted.get(name)) for name in site.rule_names)
    return (site.kind, site.rows, site.k, site.n, site.calls, around, asked)


def _named(units: Sequence[tuple[str, ...]]) -> str:
    """A group's name: its sites' names with stars, `layers.*.mlp.* (8 sites)`."""
    names = [name for unit in units for name in unit]
    patterns = tuple(dict.fromkeys(map(pattern_of, names)))
    if len(names) == 1:
        return names[0]
    more = f" and {len(patterns) - _LISTED} more" if len(patterns) > _LISTED else ""
    return f"{', '.join(patterns[:_LISTED])}{more} ({len(names)} sites)"
