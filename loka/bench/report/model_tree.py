"""The model as a tree of modules, with the precision of every GEMM in it.

Branches that differ in nothing but a number of their name (`layers.0`, `layers.1`) are one node of the tree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain

from loka.graph.sites.site import Opaque
from loka.numerics.enums import Format
from loka.plan.format import format_evidence, format_operands, format_reasons, grouped
from loka.plan.plan import Evidence, GemmPlan, Plan, SitePlan
from loka.plan.select.interaction_times import interaction_by_site

WIDEST = 100  # children of a node; those with fewer FLOPs are summed up
_NAMED_PARTS = re.compile(r"#\d+\Z|[^.]+?(?=#\d+\Z|\.|\Z)")


class Precision(StrEnum):
    """The precision that a GEMM runs in: a colour of the page. The values are the names of its CSS classes."""

    NATIVE = "native"
    FUSED = "fused"
    E4M3 = "e4m3"
    E5M2 = "e5m2"
    MIXED = "mixed"


LABELS = {
    Precision.NATIVE: "native",
    Precision.FUSED: "BF16 fused",
    Precision.E4M3: "FP8 e4m3",
    Precision.E5M2: "FP8 e5m2",
    Precision.MIXED: "FP8 mixed",
}
MEANINGS = {
    Precision.NATIVE: "in the model's own dtype, by the kernels that it always had",
    Precision.FUSED: "in the model's own dtype, with a generated kernel for what stands around it",
    Precision.E4M3: "both operands in e4m3",
    Precision.E5M2: "both operands in e5m2",
    Precision.MIXED: "one operand in e4m3, the other in e5m2",
}


def precision_of(gemm: GemmPlan, fused: bool) -> Precision:
    """The precision of a GEMM; `fused` says whether a generated kernel takes what stands around its site along."""
    if gemm.operands is None:
        return Precision.FUSED if fused else Precision.NATIVE
    formats = {recipe.format for recipe in gemm.operands}
    if len(formats) > 1:
        return Precision.MIXED
    return Precision.E4M3 if formats == {Format.E4M3} else Precision.E5M2


def fused_sites(plan: Plan) -> frozenset[str]:
    """The sites around or within which a generated kernel computes more than the GEMM."""
    return frozenset(interaction_by_site(plan)) | {each.site.name for each in plan.sites if each.region}


def site_precision(site: SitePlan, fused: bool) -> Precision:
    """The precision of most of a site's GEMMs, the first of them where several are as many."""
    found = Counter(precision_of(gemm, fused) for gemm in site.gemms)
    return found.most_common(1)[0][0] if found else Precision.NATIVE


def precision_shares(plan: Plan) -> dict[Precision, float]:
    """The precisions that the model has, with their shares of the training GEMM FLOPs."""
    fused, shares = fused_sites(plan), dict[Precision, float]()
    for site in plan.sites:
        for gemm in site.gemms:
            precision = precision_of(gemm, site.site.name in fused)
            shares[precision] = shares.get(precision, 0.0) + site.site.share
    if plan.opaque_gemms:
        shares[Precision.NATIVE] = shares.get(Precision.NATIVE, 0.0) + plan.opaque_gemms
    total = sum(shares.values()) or 1.0
    return {each: shares[each] / total for each in Precision if each in shares}


@dataclass(frozen=True, slots=True)
class SiteNode:
    """A site, the first of several alike ones, of which the worst evidence is shown."""

    found: SitePlan
    m: int
    fused: bool
    evidence: tuple[str, ...]  # of each GEMM; "" where there is none

    @property
    def reason(self) -> str:
        """The reason of the decision."""
        return format_reasons(self.found)


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A module, or several alike ones, of which all amounts are together."""

    label: str  # "fmb", "0 to 2"
    title: str  # the whole name of the first
    count: int  # alike modules that the node stands for
    sites: int  # in it
    amounts: dict[Precision, float]  # of the model's training GEMM FLOPs
    site: SiteNode | None  # what it computes itself
    children: tuple[TreeNode, ...]

    @property
    def share(self) -> float:
        """Of the model's training GEMM FLOPs."""
        return sum(self.amounts.values())

    @property
    def precisions(self) -> list[Precision]:
        """Those of its GEMMs, with most FLOPs first."""
        return sorted(self.amounts, key=lambda each: -self.amounts[each])


@dataclass(slots=True)
class _Branch:
    """A module while the tree is made."""

    label: str
    title: str
    site: SitePlan | None = None
    children: dict[str, _Branch] = field(default_factory=dict)


def model_tree(plan: Plan) -> tuple[TreeNode, ...]:
    """The modules below the model that hold sites, in model order."""
    root = _Branch("", "")
    for site in plan.sites:
        branch, title = root, ""
        for part in name_parts(site.site.name):
            title = title + part if not title or part.startswith("#") else f"{title}.{part}"
            branch = branch.children.setdefault(part, _Branch(part, title))
        branch.site = site
    making = _Making(plan)
    return *making.below([root]), *(making.opaque(each) for each in plan.opaque if each.calls)


def name_parts(name: str) -> list[str]:
    """A site's name in the steps of the tree: layers.0#1 -> layers, 0, #1."""
    return _NAMED_PARTS.findall(name) or [name]


class _Making:
    """Makes nodes of branches, with what is known of the whole plan."""

    def __init__(self, plan: Plan) -> None:
        self.batch, self.fused = plan.batch_size, fused_sites(plan)
        self.total = sum(each.site.share * len(each.gemms) for each in plan.sites) + plan.opaque_gemms or 1.0

    def opaque(self, products: Opaque) -> TreeNode:
        """A node for products that are no sites, three in a step for each in the forward."""
        title = f"in {', '.join(owner or 'the model' for owner in products.owners)}: LoKA does not replace it"
        amounts = {Precision.NATIVE: 3 * products.share / self.total}
        return TreeNode(products.what, title, products.calls, 0, amounts, None, ())

    def below(self, branches: Sequence[_Branch]) -> tuple[TreeNode, ...]:
        """The nodes below branches that are alike: their children are alike too, and in one order."""
        merged = [self._merged(each) for each in branches]
        return _trimmed([self._node(groups[0], [*chain(*groups)]) for groups in zip(*merged, strict=True)])

    def _merged(self, branch: _Branch) -> list[list[_Branch]]:
        """The children of a branch, alike ones together if they have numbers for names."""

        def kind(child: _Branch) -> Hashable:
            numbered = child.label.lstrip("#").isdecimal()
            return (child.label[:1] == "#", self._key(child)) if numbered else child.label

        return grouped(branch.children.values(), kind)

    def _key(self, branch: _Branch) -> Hashable:
        """What two alike branches have in common: everything but names and figures of evidence."""
        own = None
        if branch.site is not None:
            site = branch.site.site
            gemms = tuple((gemm.gemm, gemm.kernel, recipe_of(gemm)) for gemm in branch.site.gemms)
            own = (site.kind, site.rows, site.k, site.n, site.calls, branch.site.region, gemms)
        return own, tuple((each.label, self._key(each)) for each in branch.children.values())

    def _node(self, alike: Sequence[_Branch], everywhere: Sequence[_Branch]) -> TreeNode:
        """The node of branches below one parent that are alike, `everywhere` below all of its parents that are alike.

        One child alone, without alike ones and without a site above it, is joined to its parent.
        """
        first, children = alike[0], self.below(everywhere)
        if first.site is None and len(alike) == 1 and len(children) == 1 and children[0].count == 1:
            below = children[0].label
            return replace(children[0], label=f"{first.label}{'' if below.startswith('#') else '.'}{below}")
        sites = [each.site for each in everywhere if each.site is not None]
        amounts: dict[Precision, float] = {}
        own = (
            (precision_of(gemm, site.site.name in self.fused), site.site.share / self.total)
            for site in sites
            for gemm in site.gemms
        )
        for precision, amount in (*own, *(item for each in children for item in each.amounts.items())):
            amounts[precision] = amounts.get(precision, 0.0) + amount
        return TreeNode(
            label=_range([each.label for each in alike]),
            title=first.title,
            count=len(alike),
            sites=len(sites) + sum(each.sites for each in children),
            amounts=amounts,
            site=self._site(sites) if sites else None,
            children=children,
        )

    def _site(self, sites: Sequence[SitePlan]) -> SiteNode:
        first = sites[0]
        evidence = zip(*([gemm.evidence for gemm in each.gemms] for each in sites), strict=True)
        m, fused = first.site.rows.at(self.batch), first.site.name in self.fused
        return SiteNode(first, m, fused, tuple(map(_worst, evidence)))


def recipe_of(gemm: GemmPlan) -> str:
    """The recipe without static ranges: "e4m3 rowwise pow2"; "" in the model's dtype."""
    if gemm.operands is None:
        return ""
    first, second = gemm.operands
    return format_operands(gemm.gemm, (first.without_amax, second.without_amax))


def _worst(evidence: Sequence[Evidence | None]) -> str:
    known = [each for each in evidence if each is not None]
    return format_evidence(max(known, key=lambda each: each.mere.high)) if known else ""


def _trimmed(nodes: Sequence[TreeNode]) -> tuple[TreeNode, ...]:
    """The nodes with most FLOPs, in model order, and one for all others."""
    if len(nodes) <= WIDEST:
        return tuple(nodes)
    order = sorted(range(len(nodes)), key=lambda index: -nodes[index].share)
    rest = [nodes[index] for index in order[WIDEST - 1 :]]
    amounts = {each: sum(node.amounts.get(each, 0.0) for node in rest) for each in Precision}
    amounts = {each: amount for each, amount in amounts.items() if amount}
    sites = sum(node.sites for node in rest)
    summed = TreeNode(f"{len(rest)} more", "those with fewer FLOPs", 1, sites, amounts, None, ())
    return (*(nodes[index] for index in sorted(order[: WIDEST - 1])), summed)


def _range(labels: Sequence[str]) -> str:
    """The labels of alike branches: `0 to 2`, `0, 3`, `0, 2, 4, ...`."""
    if len(labels) == 1:
        return labels[0]
    numbers = [int(each.lstrip("#")) for each in labels]
    if len(labels) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{labels[0]} to {labels[-1]}"
    return ", ".join(labels) if len(labels) <= 3 else f"{', '.join(labels[:3])}, …"
