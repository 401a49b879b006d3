"""Products with both matrices of a mixing layer, split afterwards, as the product with each.

`a, b = torch.split(W @ x, [r, m], dim=1)` is `a = W[0:r] @ x; b = W[r:r + m] @ x`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from loka.graph.canonical.contractions import Contraction, Source, canonical_values
from loka.graph.canonical.evaluation import Evaluable, drawn, evaluable, evaluated
from loka.graph.canonical.parts import traced_of
from loka.graph.ir import PART, Ref, RefKind, Statement
from loka.graph.patterns.fm_interaction import changes_in_place
from loka.graph.trace.observed_shapes import Shape

_BATCH = 3  # drawn for a dimension that differs between calls


@dataclass(frozen=True, slots=True)
class _Part:
    """The statements that take a part of a product, the last of which is the part; its columns of the matrix."""

    places: tuple[int, ...]
    start: int
    stop: int


def split_products(
    statements: Sequence[Statement],
    shapes: Mapping[str, Shape],
    readers: Mapping[str, Collection[int]],
    only: Collection[str] | None = None,
) -> tuple[Statement, ...]:
    """The statements with each product of the embeddings of samples that is split as one product (`PART`) a part.

    The product is W @ x of x (B, n, d), in whatever form, and nothing but the parts, which are all of it, reads it.
    `shapes` are those of the locals, `readers` the places of the statements that read each; `only` names the parts to
    make, None for all.
    """
    finder = _Finder(statements, shapes, readers)
    made: dict[int, tuple[Statement, ...]] = {}
    gone: set[int] = set()
    for place, step in enumerate(statements):
        parts = finder.parts_of(place)
        if parts and (only is None or all(statements[part.places[-1]].target in only for part in parts)):
            gone.update(each for part in parts for each in part.places)
            made[place] = tuple(finder.products(step, parts))
    return tuple(
        each for place, step in enumerate(statements) for each in made.get(place, () if place in gone else (step,))
    )


class _Finder:
    """Finds the parts of the products of one forward."""

    def __init__(
        self, statements: Sequence[Statement], shapes: Mapping[str, Shape], readers: Mapping[str, Collection[int]]
    ) -> None:
        self._statements, self._shapes, self._readers = statements, shapes, readers
        self._values = canonical_values(statements, shapes, readers)
        self._places = {step.target: place for place, step in enumerate(statements)}

    def parts_of(self, place: int) -> tuple[_Part, ...]:
        """The parts of a product, in the order of the statements; () where it is not split, or no such product."""
        step, shape = self._statements[place], self._shapes.get(self._statements[place].target, ())
        value = self._values.get(step.target)
        node = None if value is None else value.node
        if step.call is None or value is None or not isinstance(node, Contraction) or len(shape) != 3:
            return ()
        sources = isinstance(node.left, Source) and isinstance(node.right, Source)
        axis = value.axes.index(2)  # that of the matrix
        if not sources or node.batch or node.contracted[0] != 1 or shape[axis] is None:
            return ()
        found = tuple(self._leaves(step.target, (), axis, step.target))
        taken = [number for part in found for number in range(part.start, part.stop)]
        places = {each for part in found for each in part.places}
        whole = len(found) > 1 and all(part.places for part in found) and sorted(taken) == list(range(shape[axis] or 0))
        if not whole or changes_in_place(self._statements[place : max(places) + 1]):
            return ()
        return tuple(sorted(found, key=lambda part: part.places[-1]))

    def _leaves(self, name: str, before: tuple[int, ...], axis: int, product: str) -> Iterator[_Part]:
        """What reads a product, or a tuple of its parts; a statement that is no part of it is empty."""
        for place in sorted(self._readers.get(name, ())):
            step = self._statements[place] if place < len(self._statements) else None
            known = None if step is None or step.call or step.written or len(step.operands) != 1 else evaluable(step)
            if step is None or known is None:
                yield _Part((), 0, 0)
            elif step.target in self._shapes:
                yield self._part((*before, place), axis, product)
            else:
                yield from self._leaves(step.target, (*before, place), axis, product)

    def _part(self, places: tuple[int, ...], axis: int, product: str) -> _Part:
        """The columns that statements take of a product; none where they do something else."""
        sizes = tuple(_BATCH if size is None else size for size in self._shapes[product])
        (whole,) = drawn([sizes], seed=1)
        steps = [known for place in places if (known := evaluable(self._statements[place])) is not None]
        found = _result(steps, Ref(RefKind.LOCAL, product), whole)
        for start in range(sizes[axis]) if found is not None and found.dim() == 3 else ():
            stop = start + found.shape[axis] if found is not None else start
            if (
                stop <= sizes[axis]
                and found is not None
                and torch.equal(found, whole.narrow(axis, start, stop - start))
            ):
                return _Part(places, start, stop)
        return _Part((), 0, 0)

    def products(self, step: Statement, parts: Sequence[_Part]) -> Iterator[Statement]:
        """One product for each part, the first with what they stand for."""
        node = self._values[step.target].node
        rows = isinstance(node, Contraction) and node.contracted[1] == 1  # the matrix is (N, K)
        places = sorted({each for part in parts for each in part.places})
        written = tuple(traced_of((step, *(self._statements[each] for each in places))))
        for number, part in enumerate(parts):
            cut = f"[{part.start}:{part.stop}]" if rows else f"[:, {part.start}:{part.stop}]"
            operands = tuple(
                replace(ref, text=ref.text + cut) if ref.kind is RefKind.ATTRIBUTE else ref for ref in step.operands
            )
            target = self._statements[part.places[-1]].target
            yield replace(step, target=target, op=PART, operands=operands, written=() if number else written)


def _result(steps: Sequence[Evaluable], ref: Ref, value: torch.Tensor) -> torch.Tensor | None:
    found = evaluated(steps, {ref: value})
    return found if isinstance(found, torch.Tensor) else None
