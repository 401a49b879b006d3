"""The operations before and after a GEMM."""

from __future__ import annotations

from loka.graph.sites.op_names import BOUNDARIES
from loka.graph.sites.operations import Operation

DEPTH = 4  # neighbours recorded on each side


def fed_by(node: Operation | None) -> tuple[str, ...]:
    """Operations that produce an input, nearest first; ends at a GEMM, at a fork of activations, or at the inputs."""
    return tuple(each.op for each in _before(node))


def followed_by(node: Operation | None) -> tuple[str, ...]:
    """Operations that consume an output, nearest first; ends at a GEMM, or with the names of several consumers."""
    return tuple(each.op for each in _after(node))


def next_to(source: Operation | None, result: Operation | None) -> tuple[Operation | None, Operation | None]:
    """The operation right before a GEMM, and the first one after it; views are looked through."""
    return next(iter(_before(source)), None), next(iter(_after(result)), None)


def boundaries(source: Operation | None, result: Operation | None) -> tuple[str, str]:
    """The modules that run the first of BOUNDARIES in `fed_by` and in `followed_by`; "" where there is none."""
    sides = ((each.owner for each in nodes if each.op in BOUNDARIES) for nodes in (_before(source), _after(result)))
    before, after = (next(side, "") for side in sides)
    return before, after


def _before(node: Operation | None) -> list[Operation]:
    found: list[Operation] = []
    while node is not None and not node.constant and node.op != "input" and len(found) < DEPTH:
        if not node.view:
            found.append(node)
        parents = [p for p in dict.fromkeys(node.parents) if not p.constant]
        node = None if node.gemm or len(parents) != 1 else parents[0]
    return found


def _after(node: Operation | None) -> list[Operation]:
    found: list[Operation] = []
    while node is not None and len(found) < DEPTH:
        users = _consumers(node)
        found.extend({user.op: user for user in reversed(users)}[op] for op in dict.fromkeys(u.op for u in users))
        node = users[0] if len(users) == 1 and not users[0].gemm else None
    return found[:DEPTH]


def _consumers(node: Operation) -> list[Operation]:
    """The readers of a result, looking through views, in the order of the calls."""
    found: dict[Operation, None] = {}
    waiting = list(reversed(node.children))
    while waiting:
        child = waiting.pop()
        if child.view:
            waiting.extend(reversed(child.children))
        else:
            found[child] = None
    return list(found)
