"""Small linears of one shape over different tensors of one shape become one batched GEMM.

y0 = linear(x[:, 0], w0, b0)             weights = stack([w0, w1, w2])
y1 = linear(x[:, 1], w1, b1)     ->      products = baddbmm(stack([b0, b1, b2]).unsqueeze(1), x.transpose(0, 1),
y2 = linear(x[:, 2], w2, b2)                                weights.transpose(1, 2))
                                         y0, y1, y2 = products.unbind(0)

The function stays the same up to rounding. Launching many small GEMMs takes longer than computing them; the batched
form has one launch forward and two backward. Inputs that are slices of one tensor are read in place, others are stacked
(M x K elements each). Each forward copies the weights into one tensor. The product stays in the model's dtype: at such
sizes FP8 is slower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from loka.errors import LokaError
from loka.graph.expression import PRODUCT, Arg, Call, Ref, RefKind, items_of, local, locals_in, method, text_of
from loka.graph.ir import ForwardIR, Shape, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.sites.flow import ACTIVATIONS
from loka.mods.adaptation import Unchanged
from loka.mods.rewriting import rewriting_tools
from loka.mods.rewriting.rewriting_tools import PlainLinear, Size
from loka.mods.rewriting.rewriting_tracer import JoinedSites

NAME = "batch_small"
FEWEST = 3
_ALL = Call("slice", (None, None, None))
SHARED = "other linears read its input: merge_siblings is for these"
FEW = f"fewer than {FEWEST} linears of its shape that the mod is for, over different inputs, stand in one forward"


@dataclass(frozen=True, slots=True)
class Batch(JoinedSites):
    """Linears to batch, in the order of the batch; sites have their names in the forward."""

    mod: ClassVar[str] = NAME
    k: int
    n: int
    base: Arg  # what has the inputs as its slices along the first dimension; None if they are stacked

    @property
    def what(self) -> str:
        """Description of the batch."""
        inputs = "stacked inputs" if self.base is None else "slices of one tensor"
        return f"{len(self.members)} linears of K {self.k}, N {self.n} over {inputs} are one batched product"

    def rewritten(self, forward: ForwardIR) -> ForwardIR:
        """The forward with the linears batched in the place of the last one; earlier readers are moved.

        An activation that follows each of them in the same way is computed on all products at once, and so is a
        concatenation or stack of all their results in order.

        Raises LokaError where the forward does not call them as `find` saw them.
        """
        sizes = dict.fromkeys(self.members, Size(self.k, self.n))
        calls = {linear.site: linear for linear in rewriting_tools.plain_linears(forward, sizes)[0]}
        if set(calls) != set(self.members):
            raise LokaError(f"{self.name!r} does not stand in its forward. Please report this fault in LoKA.")
        group = [calls[name] for name in self.members]
        places = {linear.place for linear in group}
        moved, last = _dependent(forward, places), max(places)
        after = rewriting_tools.common_activation(forward, group)
        ends = places if after is None else {*after}
        statements = [step for place, step in enumerate(forward.statements[: last + 1]) if place not in moved | places]
        statements += _batched(forward, self, group, after)
        statements += [step for place, step in enumerate(forward.statements) if place in moved - ends]
        statements += [step for place, step in enumerate(forward.statements) if place > last and place not in ends]
        views = {step.target for step in forward.statements if step.op in rewriting_tools.VIEWS}
        made = rewriting_tools.without_dead(rewriting_tools.with_statements(forward, statements), views)
        targets = [forward.statements[place].target for place in (after or [each.place for each in group])]
        return _gathered(made, targets)


@dataclass(frozen=True, slots=True)
class _Slice:
    """A linear's input as the `index`-th of equal parts of a local, along its second dimension."""

    source: str
    index: int
    flat: bool  # parts of (B, parts * K), not of (B, parts, K)


def find(
    forward: ForwardIR, sites: Mapping[str, Size], shapes: Mapping[str, Shape]
) -> tuple[tuple[Batch, ...], tuple[Unchanged, ...]]:
    """The linears of `sites` that can be batched, three or more, and reasons for other sites that the forward calls.

    `sites` are small enough; `shapes` are those of the forward's locals. Inputs must have two dimensions. Statements
    between the first and the last linear that read their results are moved after them; these can be views, norms,
    activations and sums. A forward that changes tensors in place has none, except for an activation that follows each
    linear in the same way.
    """
    plain, reasons = rewriting_tools.plain_linears(forward, sites)
    readers = Counter(linear.x for linear in plain)
    alike: dict[tuple[object, ...], list[PlainLinear]] = {}
    for linear in plain:
        shape = shapes.get(linear.x, ())
        if len(shape) != 2:
            reasons[linear.site] = "its input has not two dimensions, or has no one shape"
        elif readers[linear.x] > 1:
            reasons[linear.site] = SHARED
        else:
            alike.setdefault((sites[linear.site], shape, linear.call.bias is None), []).append(linear)
    found = []
    for group in (level for linears in alike.values() for level in _levels(forward, linears)):
        names = [linear.site for linear in group]
        reason = _unsupported_reason(forward, group)
        if reason is not None:
            reasons |= dict.fromkeys(names, reason)
        else:
            found.append(_batch(forward, group, sites[names[0]], shapes))
    return tuple(found), tuple(Unchanged(name, reason) for name, reason in reasons.items())


def _levels(forward: ForwardIR, group: Sequence[PlainLinear]) -> list[list[PlainLinear]]:
    """The linears grouped by the number of linears of the group on the path to them."""
    linears = {linear.place: linear for linear in group}
    depth: dict[str, int] = {}  # of locals
    levels: dict[int, list[PlainLinear]] = {}
    for place, step in enumerate(forward.statements):
        here = max((depth.get(name, 0) for name in _locals_of(step)), default=0)
        if place in linears:
            levels.setdefault(here, []).append(linears[place])
        depth[step.target] = here + (place in linears)
    return [levels[level] for level in sorted(levels)]


def _locals_of(step: Statement) -> list[str]:
    return [ref.text for ref in step.operands if ref.kind is RefKind.LOCAL]


def _unsupported_reason(forward: ForwardIR, group: Sequence[PlainLinear]) -> str | None:
    if len(group) < FEWEST:
        return FEW
    moved = _dependent(forward, {linear.place for linear in group})
    steps = (forward.statements[place] for place in sorted(moved))
    stuck = next((step for step in steps if step.op not in rewriting_tools.PURE), None)
    if stuck is not None:
        what = text_of(stuck.value) if stuck.op == "module" else stuck.op
        return f"between the linears stands {what!r}, which cannot be moved behind them"
    return None


def _dependent(forward: ForwardIR, places: set[int]) -> set[int]:
    """The statements before the last of `places` that depend on results of `places`."""
    made = set[str]()
    found = set()
    for place in range(min(places), max(places) + 1):
        step = forward.statements[place]
        if not made.isdisjoint(_locals_of(step)):
            found.add(place)
            made.add(step.target)
        if place in places:
            made.add(step.target)
    return found


def _batch(forward: ForwardIR, group: Sequence[PlainLinear], size: Size, shapes: Mapping[str, Shape]) -> Batch:
    """The batch of a group, in the order of the slices if the inputs are slices of one local."""
    slices = [_slice(forward, linear.x, size.k, shapes) for linear in group]
    base, order = None, list(range(len(group)))
    known = [each for each in slices if each is not None]
    if len(known) == len(group) and len({(each.source, each.flat) for each in known}) == 1:
        order.sort(key=lambda number: known[number].index)
        first, last = known[order[0]], known[order[-1]]
        if last.index - first.index == len(group) - 1:
            base = _base(first, len(group), size.k, shapes[first.source])
    members = tuple(group[number].site for number in order)
    return Batch(rewriting_tools.joined_name(members), members, size.k, size.n, base)


def _base(first: _Slice, parts: int, k: int, shape: Shape) -> Call:
    """The inputs as (parts, B, K), without a copy."""
    begin, unit = first.index, k if first.flat else 1
    cut: Arg = local(first.source)
    if begin > 0 or shape[1] != parts * unit:
        columns = Call("slice", (begin * unit or None, (begin + parts) * unit, None))
        cut = Call("operator.getitem", (cut, (_ALL, columns)))
    return method(method(cut, "unflatten", -1, (parts, k)) if first.flat else cut, "transpose", 0, 1)


def _slice(forward: ForwardIR, x: str, k: int, shapes: Mapping[str, Shape]) -> _Slice | None:
    """The part of another local that x is; None where it is none."""
    steps = {step.target: step for step in forward.statements}
    taken = _taken(steps.get(x))
    if taken is None:
        return None
    source, index = taken
    if type(index) is int:
        return _part(steps.get(source), index, k, shapes)
    shape = shapes.get(source, ())
    if len(shape) not in (2, 3) or shape[1] is None or not isinstance(index, tuple) or index[:-1] != (_ALL,):
        return None
    columns = index[1]
    if len(shape) == 3 and type(columns) is int:
        return _Slice(source, columns % shape[1], False) if -shape[1] <= columns < shape[1] else None
    if len(shape) == 2 and isinstance(columns, Call) and columns.target == "slice":
        ends = [each for each in columns.args if each is None or type(each) is int]
        begin, end, step = slice(*ends).indices(shape[1]) if len(ends) == 3 else (0, 0, 0)
        if (end - begin, step) == (k, 1) and begin % k == 0:
            return _Slice(source, begin // k, True)
    return None


def _taken(step: Statement | None) -> tuple[str, Arg] | None:
    """The local that a statement takes something of by an index, and the index; None for another statement."""
    value = step.value if step is not None else None
    if not isinstance(value, Call) or value.target != "operator.getitem":
        return None
    source, index = value.args
    return (source.text, index) if isinstance(source, Ref) and source.kind is RefKind.LOCAL else None


def _part(step: Statement | None, index: int, k: int, shapes: Mapping[str, Shape]) -> _Slice | None:
    """The `index`-th result of an unbind, chunk or split into equal parts along the second dimension."""
    value = step.value if step is not None else None
    if step is None or not isinstance(value, Call) or step.op not in ("unbind", "chunk", "split") or not value.args:
        return None
    parted, *given = value.args
    if not isinstance(parted, Ref) or parted.kind is not RefKind.LOCAL:
        return None
    source = parted.text
    values = dict(zip(("dim",) if step.op == "unbind" else ("size", "dim"), given, strict=False))
    values |= {"dim" if name == "dim" else "size": each for name, each in value.kwargs}
    shape, dim = shapes.get(source, ()), values.get("dim", 0)
    if index < 0 or len(shape) < 2 or shape[1] is None:
        return None
    if dim not in (1, 1 - len(shape)):
        return None
    if step.op == "unbind":
        return _Slice(source, index, False) if len(shape) == 3 else None
    size, sizes = values.get("size"), shape[1] // k if shape[1] % k == 0 else 0
    equal = size in ((sizes,) if step.op == "chunk" else (k,)) or size in (Call("list", (k,) * sizes), (k,) * sizes)
    return _Slice(source, index, True) if len(shape) == 2 and sizes and equal else None


def _batched(
    forward: ForwardIR, batch: Batch, group: Sequence[PlainLinear], after: tuple[int, ...] | None
) -> list[Statement]:
    """The statements that replace the linears, and the activation after them."""
    name = rewriting_tools.free_names(forward)
    made: list[Statement] = []

    def stacked(hint: str, parts: Sequence[Arg]) -> Ref:
        target = name(hint)
        made.append(Statement(target, "stack", Call("torch.stack", (Call("list", tuple(parts)),))))
        return local(target)

    x: Arg = batch.base
    if x is None:
        inputs = [each.x for each in group]
        whole = _whole(forward, inputs)
        x = stacked("inputs", [local(each) for each in inputs]) if whole is None else local(whole)
    weights = method(stacked("weights", [each.call.weight for each in group]), "transpose", 1, 2)
    biases = [each.call.bias for each in group if each.call.bias is not None]
    products = name("products")
    if biases:
        value = Call("torch.baddbmm", (method(stacked("biases", biases), "unsqueeze", 1), x, weights))
        made.append(Statement(products, "baddbmm", value, note=batch.name))
    else:
        made.append(Statement(products, "bmm", Call("torch.bmm", (x, weights)), note=batch.name))
    return made + rewriting_tools.taken_apart(forward, products, group, after, method(PRODUCT, "unbind", 0), name)


def _whole(forward: ForwardIR, inputs: Sequence[str]) -> str | None:
    """The tensor whose slices along the first dimension are the inputs, in order: the products of an earlier batch."""
    steps = {step.target: step for step in forward.statements}
    taken = [_taken(steps.get(x)) for x in inputs]
    source = taken[0][0] if taken[0] is not None else ""
    unbound = steps.get(source)
    if unbound is None or taken != [(source, place) for place in range(len(inputs))]:
        return None
    whole = next(iter(locals_in(unbound.value)), "")
    if unbound.value != method(local(whole), "unbind", 0):
        return None
    made = steps.get(whole)
    if made is not None and made.op in ACTIVATIONS:
        made = steps.get(made.operands[0].text)
    if made is None or made.op not in ("bmm", "baddbmm") or "+" not in made.note:  # a batch is named after its members
        return None
    (*_, weights) = _locals_of(made)
    return whole if len(steps[weights].operands) == len(inputs) else None


def _gathered(forward: ForwardIR, targets: Sequence[str]) -> ForwardIR:
    """The forward with a concatenation or stack that is the only reader of all parts computed from the whole tensor."""
    readers = readers_of(forward)
    places = {place for target in targets for place in readers.get(target, set())}
    if len(places) != 1 or max(places) >= len(forward.statements):
        return forward
    (place,) = places
    step = forward.statements[place]
    value, parts = step.value, tuple(map(local, targets))
    if not isinstance(value, Call) or value.target not in ("torch.cat", "torch.stack"):
        return forward
    flat = value.target == "torch.cat"
    given = (*(("dim", each) for each in value.args[1:]), *value.kwargs)
    if (
        not value.args
        or items_of(value.args[0]) != parts
        or given not in ((("dim", 1),), (("dim", -1 if flat else -2),))
    ):
        return forward
    unbound = next(each for each in forward.statements if each.target == targets[0]).operands[0].text
    whole = next(each for each in forward.statements if each.target == unbound).operands[0]
    name = rewriting_tools.free_names(forward)("transpose")
    transposed = Statement(name, "transpose", method(whole, "transpose", 0, 1))
    gathered = replace(
        step,
        op="flatten" if flat else "contiguous",
        value=method(local(name), "flatten", 1) if flat else method(local(name), "contiguous"),
    )
    statements = [*forward.statements[:place], transposed, gathered, *forward.statements[place + 1 :]]
    return rewriting_tools.without_dead(rewriting_tools.with_statements(forward, statements), {*targets, unbound})
