"""merge_siblings: linears that read one tensor become one GEMM, whose result is split.

q = linear(x, wq, bq)                    merged = linear(x, cat([wq, wk]), cat([bq, bk]))
k = linear(x, wk, bk)           ->       parts = merged.split((nq, nk), -1)
                                         q, k = parts[0], parts[1]

The function stays the same up to rounding. One GEMM of a larger N fills the GPU better than several small ones, x is
quantized once, and the input's gradient is one product instead of a sum of products. Each forward copies the weights
into one matrix (K x sum of N elements); with frozen FP8 weights that is done once. An activation that follows each
linear in the same way is computed on the merged result, so that it can be fused with the GEMM.

For a linear without a bias, if another one has a bias, its part of the merged bias is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from loka.errors import LokaError
from loka.graph.expression import PRODUCT, Arg, Call, local, method
from loka.graph.ir import GEMMS, ForwardIR, SiteCall, Statement
from loka.graph.sites.flow import ELEMENTWISE
from loka.graph.sites.op_names import BOUNDARIES
from loka.graph.sites.site import GemmKind, Site
from loka.mods.adaptation import Unchanged
from loka.mods.protocols import SiteMod, UnplannedModel
from loka.mods.rewriting import rewriting_tools
from loka.mods.rewriting.rewriting_tools import PlainLinear, Size
from loka.mods.rewriting.rewriting_tracer import JoinedSites
from loka.mods.rewriting.site_rewriting import ModelInChange, SiteOutcome, joined_site
from loka.policy.policy import ModRule
from loka.policy.settings import SiteSettings

NAME = "merge_siblings"
ALONE = "no other linear that the mod is for reads its input"


@dataclass(frozen=True, slots=True)
class Siblings(JoinedSites):
    """Linears to merge, in the order of their calls; sites have their names in the forward."""

    mod: ClassVar[str] = NAME
    sizes: tuple[int, ...]  # N of each
    k: int

    @property
    def what(self) -> str:
        """Description of the merger."""
        return f"{len(self.members)} linears over one input are one GEMM of K {self.k}, N {self.n}"

    def rewritten(self, forward: ForwardIR) -> ForwardIR:
        """The forward with the siblings merged in the place of the first one.

        Raises LokaError where the forward does not call them as `find` saw them.
        """
        sizes = {name: Size(self.k, n) for name, n in zip(self.members, self.sizes, strict=True)}
        calls = {linear.site: linear for linear in rewriting_tools.plain_linears(forward, sizes)[0]}
        if set(calls) != set(self.members) or len({linear.x for linear in calls.values()}) != 1:
            raise LokaError(f"{self.name!r} does not stand in its forward. Please report this fault in LoKA.")
        group = [calls[name] for name in self.members]
        after = rewriting_tools.common_activation(forward, group)
        name = rewriting_tools.free_names(forward)
        merged = name("_".join(linear.statement.target for linear in group) if len(group) < 4 else "merged")
        split = method(PRODUCT, "split", self.sizes, -1)
        made = rewriting_tools.taken_apart(forward, merged, group, after, split, name)
        places = {linear.place for linear in group}
        first, gone = min(places), places.union(after or ())
        rest = [step for place, step in enumerate(forward.statements) if place > first and place not in gone]
        return rewriting_tools.with_statements(
            forward, [*forward.statements[:first], _merged(merged, self, group), *made, *rest]
        )

    @property
    def n(self) -> int:
        """N of the merged GEMM."""
        return sum(self.sizes)


def find(forward: ForwardIR, sites: Mapping[str, Size]) -> tuple[tuple[Siblings, ...], tuple[Unchanged, ...]]:
    """The linears of `sites` that read one local, two or more, and reasons for the other sites that the forward calls.

    A forward that changes tensors in place has none, except for an activation that follows each sibling in the same
    way.
    """
    linears, reasons = rewriting_tools.plain_linears(forward, sites)
    groups: dict[str, list[PlainLinear]] = {}
    for linear in linears:
        groups.setdefault(linear.x, []).append(linear)
    found = []
    for group in groups.values():
        names = tuple(linear.site for linear in group)
        if len(group) < 2:
            reasons[names[0]] = ALONE
        else:
            sizes = tuple(sites[name].n for name in names)
            found.append(Siblings(rewriting_tools.joined_name(names), names, sizes, sites[names[0]].k))
    return tuple(found), tuple(Unchanged(name, reason) for name, reason in reasons.items())


def _merged(target: str, siblings: Siblings, group: Sequence[PlainLinear]) -> Statement:
    calls = [linear.call for linear in group]
    biases = [
        method(call.weight, "new_zeros", n) if call.bias is None else call.bias
        for call, n in zip(calls, siblings.sizes, strict=True)
    ]
    bias = None if all(call.bias is None for call in calls) else _joined(biases)
    call = SiteCall(siblings.name, local(group[0].x), _joined([call.weight for call in calls]), bias)
    return rewriting_tools.linear_statement(target, call, siblings.name)


def _joined(parts: Sequence[Arg]) -> Call:
    return Call("torch.cat", (Call("list", tuple(parts)),))


@dataclass(frozen=True, slots=True)
class MergeSiblingsMod:
    """Merges the sites of one K, M and dtype that read one tensor, and that have the same settings in the policy."""

    name: str = NAME
    exact: bool = True
    description: str = "linears that read one tensor are one GEMM: one launch, and the tensor is read once"

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Merge the sites of a policy entry."""
        outcome = SiteOutcome(model, rule, usual=(ALONE,))
        wanted = {site.name: site for site in outcome.wanted()}
        groups = [
            names
            for group in model.siblings
            for names in _alike(model, [name for name in group if name in wanted], outcome, rule.asked)
        ]
        owners: dict[str, list[str]] = {}
        for names in groups:
            owners.setdefault(model.around(names), []).extend(names)
        model.capture(owners)
        for names in groups:
            outcome.join(model.around(names), names, lambda forward, sizes, _: find(forward, sizes), merged_site)
        outcome.leave(wanted, ALONE)
        return outcome

    def proposal(self, model: UnplannedModel) -> str | None:
        """Number of sites that share an input tensor, in words; None for none."""
        if not model.siblings:
            return None
        tensors = f"{len(model.siblings)} tensors" if len(model.siblings) > 1 else "one tensor"
        return f"{sum(map(len, model.siblings))} sites read {tensors}"


def _alike(model: ModelInChange, group: Sequence[str], outcome: SiteOutcome, asked: bool) -> Iterator[list[str]]:
    """The sites of a group that can be one GEMM: of one K, M and dtype, and with the same settings.

    Unasked, those alone that go on alike: for others, as a gate and what it multiplies, no predicted time says whether
    one GEMM gains.
    """
    shapes: dict[tuple[object, ...], list[str]] = {}
    for name in group:
        site = model.sites[name]
        behind = () if asked else _behind(site)
        shapes.setdefault((site.k, site.rows, behind, *model.kind_of_weight(site)), []).append(name)
    for names in shapes.values():
        by_policy: list[list[str]] = []
        for name in names:
            same = next((each for each in by_policy if _same(model.settings[each[0]], model.settings[name])), None)
            if same is None:
                by_policy.append([name])
            else:
                same.append(name)
        for each in by_policy:
            if len(each) > 1:
                yield each
            elif len(names) > 1:
                other = next(name for name in names if name != each[0])
                outcome.leave(each, f"the policy treats it otherwise than {other!r}, which reads the same tensor")


def _behind(site: Site) -> tuple[str, ...]:
    """The operations between a site and the next product, without sums and products by elements."""
    return tuple(op for op in takewhile(lambda op: op not in GEMMS, site.followed_by) if op not in ELEMENTWISE)


def _same(one: SiteSettings, other: SiteSettings) -> bool:
    return (one.gemms, one.budget, one.fuse) == (other.gemms, other.budget, other.fuse)


def merged_site(name: str, owner: str, members: Sequence[Site]) -> Site:
    """The site of merged siblings: N and the shares of FLOPs add up; what follows all of them alike follows it."""
    first = members[0]
    alike = takewhile(lambda ops: len(set(ops)) == 1, zip(*(site.followed_by for site in members), strict=False))
    followed_by = tuple(ops[0] for ops in alike)
    before, after = first.boundaries or ((), ())
    return joined_site(
        name,
        owner,
        members,
        kind=GemmKind.FUNCTIONAL_LINEAR,
        n=sum(site.n for site in members),
        calls_eval=max(site.calls_eval for site in members),
        followed_by=followed_by,
        boundaries=(before, after[: sum(op in BOUNDARIES for op in followed_by)]) if first.boundaries else (),
    )


MOD: SiteMod = MergeSiblingsMod()
