"""The operations before and after a GEMM, without views."""

from __future__ import annotations

from loka.graph.sites.operations import Operation

DEPTH = 4  # neighbours recorded on each side


def operations_before(node: Operation | None) -> list[Operation]:
    """Operations that produce an input, nearest first; ends at a GEMM, at a fork of activations, or at the inputs."""
    found: list[Operation] = []
    while node is not None and not node.constant and node.op != "input" and len(found) < DEPTH:
        if not node.view:
            found.append(node)
        parents = [p for p in dict.fromkeys(node.parents) if not p.constant]
        node = None if node.gemm or len(parents) != 1 else parents[0]
    return found


def operations_after(node: Operation | None) -> list[Operation]:
    """Operations that consume an output, nearest first; ends at a GEMM, or with one of each name of its consumers."""
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
