"""Says why the region around a site goes no further where a BatchNorm or a dropout ends it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from loka.sites.neighbours import BOUNDARIES
from loka.sites.site import Site

_BATCH_NORM = "in training its statistics are those of the whole batch, and a kernel sees some of the rows"
_DROPOUT = "in training it draws random numbers, in the order of the model's own calls"


def region_ends(site: Site, region: Sequence[str]) -> tuple[str, ...]:
    """The BatchNorm or dropout before and after a region, each with its module and the reason.

    `region` are the operations that are fused; () if there are none. Empty where something else ends the region.
    """
    before, after = site.boundaries or ("", "")
    found = []
    if (op := _boundary(site.followed_by)) and set(_up_to(site.followed_by)) <= set(region):
        found.append(f"{_shown(op, after)} after it: {_reason(op)}")
    if op := _boundary(site.fed_by):
        between = [name for name in _up_to(site.fed_by) if name not in region]
        rest = f"; {' and '.join(between)} between them is no GEMM's, so that no kernel has it" if between else ""
        found.append(f"{_shown(op, before)} before it: {_reason(op)}{rest}")
    return tuple(found)


def _up_to(ops: Sequence[str]) -> tuple[str, ...]:
    """The operations up to the first boundary."""
    return tuple(takewhile(lambda op: op not in BOUNDARIES, ops))


def _boundary(ops: Sequence[str]) -> str:
    return next((op for op in ops if op in BOUNDARIES), "")


def _shown(op: str, module: str) -> str:
    what = "BatchNorm" if op == "batch_norm" else "dropout"
    return f"{what} {module!r}" if module else f"a {what} in the model's own forward"


def _reason(op: str) -> str:
    return _BATCH_NORM if op == "batch_norm" else _DROPOUT
