"""FM interactions: the small products that combine a sample's embeddings, which one kernel can compute.

inner = x.transpose(1, 2) @ rank        # x (B, n, d), rank (n, r)
products = x @ inner                    # (B, n, r): all pairs, at low rank
compressed = compress @ x               # (B, c, d), weighted sums; optional

They are found in canonical form (`loka.graph.canonical`), in which products have this form however they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from loka.graph.expression import PRODUCT, Arg, Call, Ref, RefKind, local, locals_in, method, text_of
from loka.graph.ir import WEIGHTED, FmInteraction, ForwardIR, Shape, Statement
from loka.graph.patterns.linear_chain import readers_of


def find_fm_interactions(forward: ForwardIR, shapes: Mapping[str, Shape]) -> tuple[FmInteraction, ...]:
    """The FM interactions of a forward, each as long as possible; `shapes` are those of the targets and arguments.

    Both matrices must be Parameters, and products that the kernel keeps to itself must have no other readers.
    """
    return tuple(_Finder(forward, shapes).found())


def without_sums(mix: FmInteraction, forward: ForwardIR) -> FmInteraction:
    """The interaction with its products alone: the weighted sums stay the forward's own statements."""
    readers, inside = readers_of(forward), {mix.outer}
    for place in sorted(mix.skipped, reverse=True):
        if readers[forward.statements[place].target] <= inside:
            inside.add(place)
    reads = [place for place in inside if mix.x in (ref.text for ref in forward.statements[place].operands)]
    return replace(
        mix,
        first=min(reads),
        compress=None,
        skipped=tuple(sorted(inside - {mix.outer})),
        gemms=mix.gemms[:1],
        weights=None,
        sizes=(*mix.sizes[:3], 0),
        views=mix.views[:1],
    )


class _Finder:
    """Finds FM interactions among the products of a forward's statements."""

    def __init__(self, forward: ForwardIR, shapes: Mapping[str, Shape]) -> None:
        self._statements, self._shapes = forward.statements, shapes
        self._readers = readers_of(forward)
        self._places = {step.target: place for place, step in enumerate(forward.statements)}

    def found(self) -> Iterator[FmInteraction]:
        """The interactions, in order of their products; one for each tensor of embeddings."""
        mixed: set[str] = set()
        for outer, step in enumerate(self._statements):
            x, inner = factors_of(step)
            mix = None if x is None or inner is None or x in mixed else self._mix(x, inner, outer)
            if mix is not None:
                mixed.add(mix.x)
                yield mix

    def _mix(self, x: str, inner: str, outer: int) -> FmInteraction | None:
        embeddings, gemm = self._shapes.get(x, ()), self._places.get(inner, outer)
        known = len(embeddings) == 3 and embeddings[0] is None and None not in embeddings[1:]
        if not known or not self._sums_embeddings(gemm, x) or self._readers[inner] != {outer}:
            return None
        sums = self._weighted_sums(x, gemm)
        view = None if sums is None else self._only_view(sums)
        compress, skipped = (sums, {gemm}) if view is None or sums is None else (view, {gemm, sums})
        inside = {outer, *skipped} | (set() if compress is None else {compress})
        transposed = self._places.get(_weighted(self._statements[gemm])[0] or "")
        if transposed is not None and transposed_from(self._statements[transposed]) == x:
            skipped |= {transposed} if self._readers[self._statements[transposed].target] <= inside else set()
        reads = [place for place in inside | skipped if local(x) in self._statements[place].operands]
        _, n, d = embeddings
        of_sums = () if sums is None else (PRODUCT if view is not None else method(PRODUCT, "transpose", 1, 2),)
        return FmInteraction(
            first=min(reads),
            outer=outer,
            compress=compress,
            skipped=tuple(sorted(skipped)),
            gemms=(gemm,) if sums is None else (gemm, sums),
            x=x,
            rank=self._matrix(gemm, over_rows=True),
            weights=None if sums is None else self._matrix(sums, over_rows=False),
            sizes=(n or 0, d or 0, self._width(gemm), 0 if sums is None else self._width(sums)),
            views=(PRODUCT, *of_sums),
        )

    def _sums_embeddings(self, place: int, x: str) -> bool:
        """True for a product of x (B, n, d) with a matrix, summed over the n: a linear of x with its axes swapped."""
        step = self._statements[place]
        read, _ = _weighted(step)
        if read is None or (step.call is None and step.op != WEIGHTED):
            return False
        pairs = ((read, x), (x, read))
        made = ((self._places.get(name), other) for name, other in pairs)
        return any(place is not None and transposed_from(self._statements[place]) == other for place, other in made)

    def _weighted_sums(self, x: str, inner: int) -> int | None:
        """The first product that sums over the embeddings by another matrix, and is no part of a further product."""
        places = (place for place in range(len(self._statements)) if place != inner)
        found = (place for place in places if self._sums_embeddings(place, x))
        return next((place for place in found if not self._is_multiplied(place)), None)

    def _is_multiplied(self, place: int) -> bool:
        """True if a product, or a view that alone reads it, goes into a product of two tensors."""
        view = self._only_view(place)
        read = self._readers.get(self._statements[place if view is None else view].target, set())
        return any(factors_of(self._statements[each])[0] for each in read if each < len(self._statements))

    def _only_view(self, place: int) -> int | None:
        """The statement that turns the axes of a product, if that alone reads it."""
        target = self._statements[place].target
        read = self._readers.get(target, set())
        view = min(read, default=place) if len(read) == 1 else len(self._statements)
        return view if view < len(self._statements) and transposed_from(self._statements[view]) == target else None

    def _width(self, place: int) -> int:
        return self._shapes[self._statements[place].target][-1] or 0

    def _matrix(self, place: int, over_rows: bool) -> str:
        """The Parameter of a product, transposed where it is summed over its columns and should be over its rows."""
        _, weight = _weighted(self._statements[place])
        flipped = isinstance(weight, Call)
        name = text_of(weight.args[0] if isinstance(weight, Call) else weight)
        return name if flipped is over_rows else f"{name}.t()"


def factors_of(step: Statement) -> tuple[str | None, str | None]:
    """The locals of a product of two; (None, None) for another operation."""
    value = step.value
    if not isinstance(value, Call) or value.target != "torch.matmul" or len(locals_in(*value.args)) != 2:
        return None, None
    x, y = locals_in(*value.args)
    return (x, y) if value.args == (local(x), local(y)) else (None, None)


def _weighted(step: Statement) -> tuple[str | None, Arg]:
    """The local and the Parameter, perhaps transposed, of a linear without a bias; (None, None) for another one."""
    value = step.value
    if not isinstance(value, Call) or value.target != "torch.nn.functional.linear" or len(value.args) != 2:
        return None, None
    x, weight = value.args
    matrix = weight.args[0] if isinstance(weight, Call) and weight.target == ".t" else weight
    is_weight = isinstance(matrix, Ref) and matrix.kind is RefKind.ATTRIBUTE
    return (x.text, weight) if is_weight and isinstance(x, Ref) and x.kind is RefKind.LOCAL else (None, None)


def transposed_from(step: Statement) -> str | None:
    """The local whose second and third axes a statement swaps; None for another operation."""
    value = step.value
    if isinstance(value, Call) and value.target == ".contiguous":
        value = value.args[0]
    if not isinstance(value, Call) or value.target != ".transpose" or value.args[1:] != (1, 2):
        return None
    x = value.args[0]
    return x.text if isinstance(x, Ref) and x.kind is RefKind.LOCAL else None
