"""A plan as rows of a table: one a site, or one for all sites that are alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loka.numerics.names import Gemm
from loka.plan.plan import Plan, SitePlan
from loka.plan.words import decision_words, reason_words

_NUMBER = re.compile(r"(?<![^.#])\d+(?![^.#])")  # a part of a name that is a number: the 3 in "layers.3.fmb"
_PARTS = re.compile(r"([.#])")


@dataclass(frozen=True, slots=True)
class Row:
    """Sites that are alike but for the numbers in their names. `pattern` is a glob where they are several."""

    pattern: str
    count: int
    kind: str
    rows: str  # M of one call, at the plan's batch size; with the number of calls where there are several
    k: int
    n: int
    share: float  # of the model's forward GEMM FLOPs, all of them together
    runs_in: tuple[str, str, str]  # fprop, dgrad, wgrad
    region: tuple[str, ...]  # the operations of the region that is replaced around each
    reason: str


def group_sites(plan: Plan, alike: bool) -> tuple[Row, ...]:
    """The rows of a plan in model order; `alike`: sites that differ only in the numbers of their names share one."""
    groups: dict[tuple[object, ...], list[SitePlan]] = {}
    for number, found in enumerate(plan.sites):
        site = found.site
        key: tuple[object, ...] = (number,)
        if alike:
            # Sites that share decisions hold the same objects (loka.plan.resolve); their identities are enough here.
            key = (pattern_of(site.name), site.kind, site.rows, site.k, site.n, site.calls, id(found.gemms))
            key = (*key, found.region, found.region_note)
        groups.setdefault(key, []).append(found)
    return tuple(_row(plan, group) for group in groups.values())


def pattern_of(name: str) -> str:
    """A name with each part that is a number as a star: layers.3.fmb.0 -> layers.*.fmb.*"""
    return _NUMBER.sub("*", name)


def common_pattern(names: Sequence[str]) -> str:
    """The names' common glob: a part on which they differ is a star. All have as many parts."""
    parts = zip(*(_PARTS.split(name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def _row(plan: Plan, group: list[SitePlan]) -> Row:
    first = group[0]
    site = first.site
    m = site.rows.at(plan.batch_size)
    return Row(
        pattern=site.name if len(group) == 1 else common_pattern([each.site.name for each in group]),
        count=len(group),
        kind=site.kind.value,
        rows=str(m) if site.calls == 1 else f"{m} x{site.calls}",
        k=site.k,
        n=site.n,
        share=sum(each.site.share for each in group),
        runs_in=(
            decision_words(first, Gemm.FPROP),
            decision_words(first, Gemm.DGRAD),
            decision_words(first, Gemm.WGRAD),
        ),
        region=first.region,
        reason=reason_words(first),
    )
