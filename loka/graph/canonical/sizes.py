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


def numbers_in_norms(statements: Sequence[Statement], shapes: Mapping[str, Shape]) -> tuple[Statement, ...]:
    """The statements with each norm over `x.shape[2]`, a size that no call changes, as one over that number."""
    wholes, sizes = dict[str, Shape](), dict[str, int]()
    made = list[Statement]()
    for step in statements:
        of = step.operands[0].text if len(step.operands) == 1 else ""
        if _WHOLE.fullmatch(step.template) and of in shapes:
            wholes[step.target] = shapes[of]
        for form, known in ((_PART, wholes), (_SIZE, shapes)):
            part, shape = form.fullmatch(step.template), known.get(of, ())
            size = shape[int(part[1])] if part is not None and -len(shape) <= int(part[1]) < len(shape) else None
            sizes.update({step.target: size} if size is not None else {})
        made.append(_with_numbers(step, sizes) if step.op in TORCH_NORMS else step)
    return tuple(made)


def _with_numbers(step: Statement, sizes: Mapping[str, int]) -> Statement:
    kept = tuple(ref for ref in step.operands if ref.text not in sizes)
    if len(kept) == len(step.operands):
        return step
    texts = [str(sizes.get(ref.text, "")) or f"{{{kept.index(ref)}}}" for ref in step.operands]
    return replace(step, template=step.template.format(*texts), operands=kept, written=(step,))
