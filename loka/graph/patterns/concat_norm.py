"""Concatenation norms: a concatenation of rows, a residual and a norm, which one kernel can compute.

joined = torch.cat([a, b], 1)      # (B, n_a, d), (B, n_b, d); or a single tensor
summed = joined + x                # optional after a concatenation
out = layer_norm(summed, (d,), weight, bias)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from loka.graph.expression import Call, Ref, RefKind, items_of
from loka.graph.ir import ConcatNorm, ForwardIR, Shape, Statement
from loka.graph.patterns.linear_chain import pair_of, readers_of
from loka.graph.patterns.norm import ChainNorm, NormRun, norm_ending_at

_CONCATENATIONS = ("torch.cat", "torch.concat", "torch.concatenate")


def find_concat_norms(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[ConcatNorm, ...]:
    """The concatenation norms of a forward, in order of their norms; `shapes` are those of targets and arguments.

    A block_norm with one block, the whole row, counts as an rms_norm; its changes of view are fused too.

    Intermediate values must have no other readers, and all tensors must be (B, n, d), B the batch.
    """
    return tuple(_found(forward, shapes))


def _found(forward: ForwardIR, shapes: Mapping[str, Shape]) -> Iterator[ConcatNorm]:
    statements, readers = forward.statements, readers_of(forward)
    places = {statement.target: place for place, statement in enumerate(statements)}

    def only_for(name: str, first: int, last: int | None = None) -> int | None:
        """Index of the statement that sets a local with no readers but `first` to `last`; None where there is none."""
        around = set(range(first, (first if last is None else last) + 1))
        read = readers.get(name, set())
        return places.get(name) if read and read <= around and places.get(name, first) < first else None

    for place in range(len(statements)):
        run = norm_ending_at(statements, place)
        if run is None or statements[run.first].operands[0].kind is not RefKind.LOCAL or not _is_whole(run, shapes):
            continue
        inner = range(run.first, run.last)
        before = only_for(run.source, run.first, run.last)
        if before is None or not all(readers.get(statements[n].target, set()) <= {*inner, run.last} for n in inner):
            continue
        skipped, parts, residual = [before], concatenated(statements[before]), None
        pair = pair_of(statements[before], "add")
        if not parts and pair is not None:
            first, second = pair
            for joined, other in ((first, second), (second, first)):
                inside = only_for(joined.text, before)
                found = concatenated(statements[inside]) if inside is not None else ()
                if found and inside is not None:
                    skipped, parts, residual = [inside, before], found, other
                    break
            else:
                parts, residual = (first,), second
        read = (*parts, residual) if residual is not None else parts
        if parts and all(_is_rows(ref, shapes, run.norm.width) for ref in read) and _fits(parts, residual, shapes):
            rows = tuple(shapes[part.text][1] or 0 for part in parts)
            yield ConcatNorm(place, (*skipped, *inner), parts, residual, rows)


def concatenated_norm(forward: ForwardIR, join: ConcatNorm) -> ChainNorm | None:
    """The norm at the end of the pattern, as its kernel computes it; None where that statement is no norm."""
    run = norm_ending_at(forward.statements, join.norm)
    if run is None or run.norm.kind != "block_norm":
        return None if run is None else run.norm
    return replace(run.norm, kind="rms_norm")


def _is_whole(run: NormRun, shapes: Mapping[str, Shape]) -> bool:
    """True if a norm is over whole rows: for a block_norm, if there is one block."""
    return run.norm.kind != "block_norm" or shapes.get(run.source, ())[-1:] == (run.norm.width,)


def concatenated(statement: Statement) -> tuple[Ref, ...]:
    """The parts that a statement concatenates along the rows of each sample; () for another operation."""
    value = statement.value
    if not isinstance(value, Call) or statement.call is not None or value.target not in _CONCATENATIONS:
        return ()
    given = {**dict(zip(("tensors", "dim"), value.args, strict=False)), **dict(value.kwargs)}
    is_of_rows = set(given) == {"tensors", "dim"} and given["dim"] in (1, -2)
    return statement.operands if is_of_rows and items_of(given["tensors"]) == statement.operands else ()


def _is_rows(ref: Ref, shapes: Mapping[str, Shape], width: int) -> bool:
    shape = shapes.get(ref.text, ())
    whole = len(shape) == 3 and shape[0] is None and shape[1] is not None
    return ref.kind is RefKind.LOCAL and whole and shape[2] == width


def _fits(parts: tuple[Ref, ...], residual: Ref | None, shapes: Mapping[str, Shape]) -> bool:
    """True if the sum does not broadcast."""
    rows = sum(shapes[part.text][1] or 0 for part in parts)
    return residual is None or shapes[residual.text][1] == rows
