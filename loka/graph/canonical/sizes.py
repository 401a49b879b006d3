"""Sizes of a norm's input that are read after the norm, read of its result: the input may be in a kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from loka.graph.canonical.parts import traced_of
from loka.graph.ir import Ref, RefKind, Statement
from loka.graph.patterns.norm import parse_norm
from loka.graph.trace.observed_shapes import Shape

_SIZES = frozenset({"size", "shape"})


def sizes_of_norms(
    statements: Sequence[Statement],
    shapes: Mapping[str, Shape],
    readers: Mapping[str, Collection[int]],
    attributes: Mapping[str, tuple[int, ...]],
) -> tuple[Statement, ...]:
    """The statements with each norm, and the size of its input that the next statement reads, as a canonical group.

    The arguments are those of `canonical_runs`.
    """
    made = list(statements)
    for place, (norm, size) in enumerate(pairwise(statements)):
        given = norm.operands[:1]
        if size.op not in _SIZES or size.operands != given or norm.target == "_" or parse_norm(norm) is None:
            continue
        made[place] = replace(norm, written=tuple(traced_of((norm, size))))
        made[place + 1] = replace(size, operands=(Ref(RefKind.LOCAL, norm.target),))
    return tuple(made)
