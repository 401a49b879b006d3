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

import ast
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from loka.errors import LokaError
from loka.graph.ir import ForwardIR, Ref, RefKind, Shape, Statement
from loka.graph.patterns.linear_chain import readers_of
from loka.graph.patterns.norm import arguments, literal, operand
from loka.graph.patterns.region import ACTIVATIONS
from loka.mods.adaptation import Unchanged
from loka.mods.rewriting import rewriting_tools
from loka.mods.rewriting.rewriting_tools import OperandTexts, PlainLinear, Size
from loka.mods.rewriting.rewriting_tracer import JoinedSites

NAME = "batch_small"
FEWEST = 3
SHARED = "other linears read its input: merge_siblings is for these"
FEW = f"fewer than {FEWEST} linears of its shape that the mod is for, over different inputs, stand in one forward"


@dataclass(frozen=True, slots=True)
class Batch(JoinedSites):
    """Linears to batch, in the order of the batch; sites have their names in the forward."""

    mod: ClassVar[str] = NAME
    k: int
    n: int
    base: str | None  # an expression over the local `source` whose slices along the first dimension are the inputs
    source: str  # "" if the inputs are stacked

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
        here = max((depth.get(ref.text, 0) for ref in step.operands if ref.kind is RefKind.LOCAL), default=0)
        if place in linears:
            levels.setdefault(here, []).append(linears[place])
        depth[step.target] = here + (place in linears)
    return [levels[level] for level in sorted(levels)]


def _unsupported_reason(forward: ForwardIR, group: Sequence[PlainLinear]) -> str | None:
    if len(group) < FEWEST:
        return FEW
    in_place = rewriting_tools.in_place_reason(forward, rewriting_tools.common_activation(forward, group) or ())
    if in_place is not None:
        return in_place
    moved = _dependent(forward, {linear.place for linear in group})
    steps = (forward.statements[place] for place in sorted(moved))
    stuck = next((step for step in steps if step.op not in rewriting_tools.PURE), None)
    if stuck is not None:
        what = stuck.text().partition(" = ")[2] if stuck.op == "module" else stuck.op
        return f"between the linears stands {what!r}, which cannot be moved behind them"
    return None


def _dependent(forward: ForwardIR, places: set[int]) -> set[int]:
    """The statements before the last of `places` that depend on results of `places`."""
    made = set[str]()
    found = set()
    for place in range(min(places), max(places) + 1):
        step = forward.statements[place]
        if any(ref.kind is RefKind.LOCAL and ref.text in made for ref in step.operands):
            found.add(place)
            made.add(step.target)
        if place in places:
            made.add(step.target)
    return found


def _batch(forward: ForwardIR, group: Sequence[PlainLinear], size: Size, shapes: Mapping[str, Shape]) -> Batch:
    """The batch of a group, in the order of the slices if the inputs are slices of one local."""
    slices = [_slice(forward, linear.x, size.k, shapes) for linear in group]
    base, source, order = None, "", list(range(len(group)))
    known = [each for each in slices if each is not None]
    if len(known) == len(group) and len({(each.source, each.flat) for each in known}) == 1:
        order.sort(key=lambda number: known[number].index)
        first, last = known[order[0]], known[order[-1]]
        if last.index - first.index == len(group) - 1:
            source, base = first.source, _base(first, len(group), size.k, shapes[first.source])
    members = tuple(group[number].site for number in order)
    return Batch(rewriting_tools.joined_name(members), members, size.k, size.n, base, source)


def _base(first: _Slice, parts: int, k: int, shape: Shape) -> str:
    """Template of the inputs as (parts, B, K), without a copy."""
    begin, unit = first.index, k if first.flat else 1
    whole = begin == 0 and shape[1] == parts * unit
    cut = "{0}" if whole else f"{{0}}[:, {begin * unit or ''}:{(begin + parts) * unit}]"
    return f"{cut}.unflatten(-1, ({parts}, {k})).transpose(0, 1)" if first.flat else f"{cut}.transpose(0, 1)"


def _slice(forward: ForwardIR, x: str, k: int, shapes: Mapping[str, Shape]) -> _Slice | None:
    """The part of another local that x is; None where it is none."""
    steps = {step.target: step for step in forward.statements}
    step = steps.get(x)
    if step is None or step.op != "getitem" or len(step.operands) != 1 or step.operands[0].kind is not RefKind.LOCAL:
        return None
    source = step.operands[0].text
    index = _index(step.template)
    if isinstance(index, int):
        parts = steps.get(source)
        return _part(parts, index, k, shapes)
    shape = shapes.get(source, ())
    if len(shape) == 3 and isinstance(index, tuple) and shape[1] is not None and isinstance(index[0], int):
        return _Slice(source, index[0] % shape[1], False) if -shape[1] <= index[0] < shape[1] else None
    if len(shape) == 2 and isinstance(index, tuple) and shape[1] is not None and isinstance(index[0], slice):
        begin, end, step_ = index[0].indices(shape[1])
        if (end - begin, step_) == (k, 1) and begin % k == 0:
            return _Slice(source, begin // k, True)
    return None


def _index(template: str) -> int | tuple[int | slice] | None:
    """Index of a template: i for "{0}[i]", (i,) for "{0}[:, i]", (slice(i, j),) for "{0}[:, i:j]"; None for others."""
    node = ast.parse(template.format("x"), mode="eval").body
    if not isinstance(node, ast.Subscript):
        return None
    if (whole := _number(node.slice)) is not None:
        return whole
    if not isinstance(node.slice, ast.Tuple) or len(node.slice.elts) != 2:
        return None
    rows, columns = node.slice.elts
    if not isinstance(rows, ast.Slice) or any((rows.lower, rows.upper, rows.step)):
        return None
    if (one := _number(columns)) is not None:
        return (one,)
    if not isinstance(columns, ast.Slice):
        return None
    ends = [None if end is None else _number(end) for end in (columns.lower, columns.upper, columns.step)]
    given = (columns.lower, columns.upper, columns.step)
    return (slice(*ends),) if all(e is None or f is not None for e, f in zip(given, ends, strict=True)) else None


def _number(node: ast.expr) -> int | None:
    value = literal(node) if isinstance(node, ast.Constant | ast.UnaryOp) else None
    return value if type(value) is int else None


def _part(step: Statement | None, index: int, k: int, shapes: Mapping[str, Shape]) -> _Slice | None:
    """The `index`-th result of an unbind, chunk or split into equal parts along the second dimension."""
    parsed = arguments(step) if step is not None else None
    if step is None or parsed is None or step.op not in ("unbind", "chunk", "split") or len(step.operands) != 1:
        return None
    function, positional, named = parsed
    method = function == f"operand_0.{step.op}"
    if not method and (not positional or operand(step, positional[0]) != step.operands[0]):
        return None
    given = [literal(node) for node in positional[0 if method else 1 :]]
    values = dict(zip(("dim",) if step.op == "unbind" else ("size", "dim"), given, strict=False))
    values |= {"dim" if name == "dim" else "size": literal(node) for name, node in named.items()}
    source = step.operands[0].text
    shape, dim = shapes.get(source, ()), values.get("dim", 0)
    if step.operands[0].kind is not RefKind.LOCAL or index < 0 or len(shape) < 2 or shape[1] is None:
        return None
    if dim not in (1, 1 - len(shape)):
        return None
    if step.op == "unbind":
        return _Slice(source, index, False) if len(shape) == 3 else None
    size, sizes = values.get("size"), shape[1] // k if shape[1] % k == 0 else 0
    equal = size in ((sizes,) if step.op == "chunk" else (k,)) or size in ([k] * sizes, (k,) * sizes)
    return _Slice(source, index, True) if len(shape) == 2 and sizes and equal else None


def _batched(
    forward: ForwardIR, batch: Batch, group: Sequence[PlainLinear], after: tuple[int, ...] | None
) -> list[Statement]:
    """The statements that replace the linears, and the activation after them."""
    name = rewriting_tools.free_names(forward)
    made: list[Statement] = []

    def stacked(hint: str, templates: Sequence[str], operands: OperandTexts) -> Ref:
        target = name(hint)
        made.append(Statement(target, "stack", f"torch.stack([{', '.join(templates)}])", tuple(operands.refs)))
        return Ref(RefKind.LOCAL, target)

    def of_calls(hint: str, templates: Sequence[str]) -> Ref:
        operands = OperandTexts()
        pairs = zip(templates, group, strict=True)
        parts = [operands.take(template, each.statement.operands) for template, each in pairs]
        return stacked(hint, parts, operands)

    whole = _whole(forward, [each.x for each in group])
    if batch.base is not None:
        x = Ref(RefKind.LOCAL, batch.source)
    elif whole is not None:
        x = whole
    else:
        operands = OperandTexts()
        x = stacked("inputs", [operands.add(Ref(RefKind.LOCAL, each.x)) for each in group], operands)
    base = batch.base or "{0}"
    weights = of_calls("weights", [each.call.weight for each in group])
    biases = [each.call.bias for each in group if each.call.bias is not None]
    products = name("products")
    if biases:
        template = f"torch.baddbmm({{2}}.unsqueeze(1), {base}, {{1}}.transpose(1, 2))"
        read: tuple[Ref, ...] = (x, weights, of_calls("biases", biases))
        made.append(Statement(products, "baddbmm", template, read, note=batch.name))
    else:
        template = f"torch.bmm({base}, {{1}}.transpose(1, 2))"
        made.append(Statement(products, "bmm", template, (x, weights), note=batch.name))
    return made + rewriting_tools.taken_apart(forward, products, group, after, ("unbind", "{0}.unbind(0)"), name)


def _whole(forward: ForwardIR, inputs: Sequence[str]) -> Ref | None:
    """The tensor whose slices along the first dimension are the inputs, in order: the products of an earlier batch."""
    steps = {step.target: step for step in forward.statements}
    parts = [steps.get(x) for x in inputs]
    taken = {part.operands for part in parts if part is not None and part.op == "getitem"}
    if len(taken) != 1 or any(part is None or _index(part.template) != i for i, part in enumerate(parts)):
        return None
    unbound = steps.get(taken.pop()[0].text)
    if unbound is None or unbound.template != "{0}.unbind(0)":
        return None
    made = steps.get(unbound.operands[0].text)
    if made is not None and made.op in ACTIVATIONS:
        made = steps.get(made.operands[0].text)
    if made is None or made.op not in ("bmm", "baddbmm") or "+" not in made.note:  # a batch is named after its members
        return None
    weights = steps[made.operands[1].text]
    return unbound.operands[0] if len(weights.operands) == len(inputs) else None


def _gathered(forward: ForwardIR, targets: Sequence[str]) -> ForwardIR:
    """The forward with a concatenation or stack that is the only reader of all parts computed from the whole tensor."""
    readers = readers_of(forward)
    places = {place for target in targets for place in readers.get(target, set())}
    if len(places) != 1 or max(places) >= len(forward.statements):
        return forward
    (place,) = places
    step = forward.statements[place]
    parsed = arguments(step)
    if parsed is None or parsed[0] not in ("torch.cat", "torch.stack") or not parsed[1]:
        return forward
    function, (listed, *rest), named = parsed
    refs = [operand(step, node) for node in listed.elts] if isinstance(listed, ast.List | ast.Tuple) else []
    if refs != [Ref(RefKind.LOCAL, target) for target in targets]:
        return forward
    dims = [literal(node) for node in (*rest, *(node for key, node in named.items() if key == "dim"))]
    if len(rest) + len(named) != len(dims) or dims not in ([1], [-1] if function == "torch.cat" else [-2]):
        return forward
    unbound = next(each for each in forward.statements if each.target == targets[0]).operands[0].text
    whole = next(each for each in forward.statements if each.target == unbound).operands
    op, view = ("flatten", "{0}.flatten(1)") if function == "torch.cat" else ("contiguous", "{0}.contiguous()")
    transposed = Statement(rewriting_tools.free_names(forward)("transpose"), "transpose", "{0}.transpose(0, 1)", whole)
    gathered = replace(step, op=op, template=view, operands=(Ref(RefKind.LOCAL, transposed.target),))
    statements = [*forward.statements[:place], transposed, gathered, *forward.statements[place + 1 :]]
    return rewriting_tools.without_dead(rewriting_tools.with_statements(forward, statements), {*targets, unbound})
