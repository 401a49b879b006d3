"""Sizes around norms: of the input, read after the norm, and of the norm itself, taken from a shape."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from loka.graph.canonical.parts import traced_of
from loka.graph.ir import Ref, RefKind, Statement
from loka.graph.patterns.norm import TORCH_NORMS, parse_norm
from loka.graph.trace.observed_shapes import Shape

_SIZES = frozenset({"size", "shape"})
_WHOLE = re.compile(r"\{0\}\.(?:shape|size\(\))")  # x.shape
_PART = re.compile(r"\{0\}\[(-?\d+)\]")  # shape[2]
_SIZE = re.compile(r"\{0\}\.(?:shape\[|size\()(-?\d+)[\])]")  # x.shape[2], x.size(2)


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


def numbers_in_norms(
    statements: Sequence[Statement], shapes: Mapping[str, Shape], readers: Mapping[str, Collection[int]]
) -> tuple[Statement, ...]:
    """The statements with each norm over `x.shape[2]`, a size that no call changes, as one over that number.

    A read of a shape for this norm alone becomes a part of it. `readers` are those of `readers_of`.
    """
    wholes, sizes = dict[str, Shape](), dict[str, int]()
    made: dict[int, Statement] = {}
    reads: dict[str, int] = {}  # the places of reads of shapes
    for place, step in enumerate(statements):
        of = step.operands[0].text if len(step.operands) == 1 else ""
        if _WHOLE.fullmatch(step.template) and of in shapes:
            wholes[step.target] = shapes[of]
        for form, known in ((_PART, wholes), (_SIZE, shapes)):
            part, shape = form.fullmatch(step.template), known.get(of, ())
            size = shape[int(part[1])] if part is not None and -len(shape) <= int(part[1]) < len(shape) else None
            sizes.update({step.target: size} if size is not None else {})
        if step.target in sizes or step.target in wholes:
            reads[step.target] = place
        made[place] = step
        if step.op in TORCH_NORMS and any(ref.text in sizes for ref in step.operands):
            own = _read_for(place, reads, readers)
            made[place] = _with_numbers((*(made.pop(each) for each in own), step), sizes)
    return tuple(made[place] for place in sorted(made))


def _read_for(norm: int, reads: Mapping[str, int], readers: Mapping[str, Collection[int]]) -> list[int]:
    """The places, in order, of the reads of shapes that one norm alone needs."""
    own = {norm}
    for name, place in reversed(list(reads.items())):
        if readers.get(name) and own.issuperset(readers[name]):
            own.add(place)
    return sorted(own - {norm})


def _with_numbers(run: tuple[Statement, ...], sizes: Mapping[str, int]) -> Statement:
    """The norm that ends a run, with numbers for sizes."""
    norm = run[-1]
    kept = tuple(ref for ref in norm.operands if ref.text not in sizes)
    texts = [str(sizes.get(ref.text, "")) or f"{{{kept.index(ref)}}}" for ref in norm.operands]
    return replace(norm, template=norm.template.format(*texts), operands=kept, written=run)
