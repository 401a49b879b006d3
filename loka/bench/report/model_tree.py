"""The model as a tree of modules, with the precision of every GEMM in it.

Branches that differ in nothing but a number of their name (`layers.0`, `layers.1`) are one node of the tree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from loka.bench.report.geometry import percent
from loka.bench.report.precision import Precision, fused_sites, precision_of
from loka.plan.format import format_evidence, format_operands, format_reasons
from loka.plan.plan import Evidence, GemmPlan, Plan, SitePlan

WIDEST = 100  # children of a node; those with fewer FLOPs are summed up
DEEPEST = 24  # levels of the tree; what lies deeper keeps the rest of its name
_NAMED_PARTS = re.compile(r"[^.#]+|#[^.#]*")


@dataclass(frozen=True, slots=True)
class GemmRow:
    """One GEMM of a site. Of several alike sites, the evidence is the worst."""

    gemm: str
    precision: Precision
    recipe: str  # "e4m3 rowwise pow2"; "" in the model's dtype
    kernel: str
    evidence: str  # "" where there is none


@dataclass(frozen=True, slots=True)
class SiteNode:
    """The GEMMs of a site, or of several alike ones, with their size and the reason of the decision."""

    kind: str
    size: str  # "M 4096, K 128, N 256"
    region: str  # "layer_norm -> linear -> silu"; "" for the GEMM alone
    reason: str
    gemms: tuple[GemmRow, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a stacked bar that is as long as the node's share of the model, in per cent."""

    precision: Precision
    x: float
    width: float


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A module, or several alike ones. `share` is of the model's training GEMM FLOPs, of all of them together."""

    label: str  # "fmb", "0 to 2"
    title: str  # the whole name of the first
    count: int  # alike modules that the node stands for
    sites: int  # in it, all alike modules together
    share: float
    parts: tuple[Part, ...]  # the share's precisions
    precisions: tuple[Precision, ...]  # of each GEMM in it, those with most FLOPs first
    site: SiteNode | None  # what it computes itself
    children: tuple[TreeNode, ...]


@dataclass(slots=True)
class _Branch:
    """A module while the tree is made. Amounts are shares of the training GEMM FLOPs."""

    label: str
    title: str
    site: SitePlan | None = None
    children: dict[str, _Branch] = field(default_factory=dict)


def model_tree(plan: Plan) -> tuple[TreeNode, ...]:
    """The modules below the model that hold sites, in model order."""
    root = _Branch("", "")
    for site in plan.sites:
        _insert(root, site)
    total = sum(each.site.share * len(each.gemms) for each in plan.sites) or 1.0
    making = _Making(plan, fused_sites(plan), total)
    return _trimmed([making.node(alike, alike) for alike in _merged(root, making.key)])


def name_parts(name: str) -> list[str]:
    """A site's name in the steps of the tree: layers.0#1 -> layers, 0, #1."""
    found = list(_NAMED_PARTS.finditer(name))
    if len(found) > DEEPEST:
        return [*(each[0] for each in found[: DEEPEST - 1]), name[found[DEEPEST - 1].start() :]]
    return [each[0] for each in found] or [name]


def _insert(root: _Branch, site: SitePlan) -> None:
    branch, title = root, ""
    for part in name_parts(site.site.name):
        title = title + part if not title or part.startswith("#") else f"{title}.{part}"
        branch = branch.children.setdefault(part, _Branch(part, title))
    branch.site = site


class _Making:
    """Makes nodes of branches, with what is known of the whole plan."""

    def __init__(self, plan: Plan, fused: frozenset[str], total: float) -> None:
        self.batch, self.fused, self.total = plan.batch_size, fused, total

    def key(self, branch: _Branch) -> object:
        """What two alike branches have in common: everything but names and figures of evidence."""
        site, own = branch.site, None
        if site is not None:
            facts = (site.site.kind, site.site.rows, site.site.k, site.site.n, site.site.calls, site.region)
            own = (*facts, tuple((gemm.gemm, gemm.kernel, self._recipe(gemm)) for gemm in site.gemms))
        return own, tuple((each.label, self.key(each)) for each in branch.children.values())

    def node(self, alike: Sequence[_Branch], everywhere: Sequence[_Branch]) -> TreeNode:
        """The node of branches below one parent that are alike, `everywhere` below all of its parents that are alike.

        One child alone, without alike ones and without a site above it, is joined to its parent.
        """
        first = alike[0]
        children = self._children(everywhere)
        if first.site is None and len(alike) == 1 and len(children) == 1 and children[0].count == 1:
            return replace(children[0], label=_joined(first.label, children[0].label))
        amounts = self._amounts(everywhere)
        return TreeNode(
            label=_range(alike),
            title=first.title,
            count=len(alike),
            sites=sum(map(_count, everywhere)),
            share=sum(amounts.values()) / self.total,
            parts=_parts(amounts, self.total),
            precisions=tuple(sorted(amounts, key=lambda each: -amounts[each])),
            site=self._site([each.site for each in everywhere if each.site is not None]),
            children=children,
        )

    def _children(self, branches: Sequence[_Branch]) -> tuple[TreeNode, ...]:
        """The nodes below branches with one key: their children are alike, and in one order."""
        merged = [_merged(each, self.key) for each in branches]
        return _trimmed(
            [self.node(groups[0], [branch for group in groups for branch in group])
             for groups in zip(*merged, strict=True)]
        )  # fmt: skip

    def _amounts(self, branches: Iterable[_Branch]) -> dict[Precision, float]:
        found: dict[Precision, float] = {}
        for branch in branches:
            if branch.site is not None:
                for gemm in branch.site.gemms:
                    precision = self._precision(branch.site, gemm)
                    found[precision] = found.get(precision, 0.0) + branch.site.site.share
            for precision, amount in self._amounts(branch.children.values()).items():
                found[precision] = found.get(precision, 0.0) + amount
        return found

    def _precision(self, site: SitePlan, gemm: GemmPlan) -> Precision:
        return precision_of(gemm, site.site.name in self.fused)

    def _recipe(self, gemm: GemmPlan) -> str:
        if gemm.operands is None:
            return ""
        first, second = gemm.operands
        return format_operands(gemm.gemm, (first.without_amax, second.without_amax))

    def _site(self, sites: Sequence[SitePlan]) -> SiteNode | None:
        if not sites:
            return None
        first = sites[0]
        rows = first.site.rows.at(self.batch)
        calls = f", {first.site.calls} times a step" if first.site.calls != 1 else ""
        return SiteNode(
            kind=first.site.kind.value,
            size=f"M {rows}, K {first.site.k}, N {first.site.n}{calls}",
            region=" → ".join(first.region),
            reason=format_reasons(first),
            gemms=tuple(
                GemmRow(
                    gemm=gemm.gemm.value,
                    precision=self._precision(first, gemm),
                    recipe=self._recipe(gemm),
                    kernel=gemm.kernel,
                    evidence=_worst([each.gemms[index].evidence for each in sites]),
                )
                for index, gemm in enumerate(first.gemms)
            ),
        )


def _merged(branch: _Branch, key: Callable[[_Branch], object]) -> list[list[_Branch]]:
    """The children of a branch, alike ones together if they have numbers for names."""
    found: dict[object, list[_Branch]] = {}
    for child in branch.children.values():
        numbered = child.label.lstrip("#").isdecimal()
        kind = (child.label[:1] == "#", key(child)) if numbered else child.label
        found.setdefault(kind, []).append(child)
    return list(found.values())


def _trimmed(nodes: Sequence[TreeNode]) -> tuple[TreeNode, ...]:
    """The nodes with most FLOPs, in model order, and one for all others."""
    if len(nodes) <= WIDEST:
        return tuple(nodes)
    order = sorted(range(len(nodes)), key=lambda index: -nodes[index].share)
    kept, rest = sorted(order[: WIDEST - 1]), [nodes[index] for index in sorted(order[WIDEST - 1 :])]
    shares: dict[Precision, float] = {}
    for part in (part for node in rest for part in node.parts):
        shares[part.precision] = shares.get(part.precision, 0.0) + part.width / 100
    summed = TreeNode(
        label=f"{len(rest)} more",
        title="those with fewer FLOPs",
        count=1,
        sites=sum(node.sites for node in rest),
        share=sum(node.share for node in rest),
        parts=_parts(shares, 1.0),
        precisions=tuple(sorted(shares, key=lambda each: -shares[each])),
        site=None,
        children=(),
    )
    return (*(nodes[index] for index in kept), summed)


def _count(branch: _Branch) -> int:
    return (branch.site is not None) + sum(map(_count, branch.children.values()))


def _joined(label: str, below: str) -> str:
    return f"{label}{below}" if below.startswith("#") else f"{label}.{below}"


def _range(branches: Sequence[_Branch]) -> str:
    """The labels of alike branches: `0 to 2`, `0, 3`, `0, 2, 4, ...`."""
    labels = [each.label for each in branches]
    if len(labels) == 1:
        return labels[0]
    numbers = [int(each.lstrip("#")) for each in labels]
    if len(labels) > 2 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{labels[0]} to {labels[-1]}"
    return ", ".join(labels) if len(labels) <= 3 else f"{', '.join(labels[:3])}, …"


def _parts(amounts: dict[Precision, float], total: float) -> tuple[Part, ...]:
    """The parts of a stacked bar, FP8 first."""
    parts, x = [], 0.0
    for precision in reversed(Precision):
        if precision in amounts:
            width = amounts[precision] / total
            parts.append(Part(precision, percent(x), percent(width)))
            x += width
    return tuple(parts)


def _worst(evidence: Sequence[Evidence | None]) -> str:
    known = [each for each in evidence if each is not None]
    return format_evidence(max(known, key=lambda each: each.mere.high)) if known else ""
