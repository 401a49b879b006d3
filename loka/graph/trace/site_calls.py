"""Recognises a traced operation on a site's weight as y = linear(x, weight, bias) between two changes of view."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from loka.graph.ir import CannotTraceError, ForwardIR, SiteCall
from loka.graph.sites.products.einsum import matrix_letters, split_equation
from loka.graph.trace.merging import Op
from loka.graph.trace.printer import Template
from loka.graph.trace.traced_weights import Weights, is_single

_MATMULS = {operator.matmul, torch.matmul, torch.mm, torch.bmm}
_ADDED = {torch.addmm, torch.baddbmm}
_GEMM_METHODS = {"matmul", "mm", "__matmul__", "addmm", "bmm", "baddbmm"}
_GEMMS = {
    *(*_MATMULS, *_ADDED),
    *(torch.einsum, torch.tensordot, torch.nn.functional.linear, torch.nn.functional.conv1d),
}

_MOVES = ("{0}.transpose(", "{0}.permute(", "{0}.movedim(")


def site_call(op: Op, weights: Weights, template: Template) -> SiteCall | None:
    """The operation as a linear; None where it is no GEMM with a site's Parameter.

    Raises CannotTraceError where a site's Parameter is used in a GEMM that cannot be written as a linear.
    """
    target, args, kwargs = op.node.target, list(op.args), dict(op.kwargs)
    if op.child in weights.names:  # where linears share a Parameter, a call belongs to the linear that it is in
        weights = replace(weights, sites=dict.fromkeys(weights.sites, op.child))
    is_gemm = target in _GEMMS if op.node.op == "call_function" else target in _GEMM_METHODS
    used = [weights.site(value) for value in _flat([*args, *kwargs.values()]) if weights.site(value) is not None]
    if not is_gemm or not used:
        return None
    large = next((value for value in _flat([*args, *kwargs.values()]) if weights.shape(value) is not None), None)
    folds = target in (torch.einsum, torch.nn.functional.conv1d) or is_single(weights.shape(large))
    if large is not None and not folds:
        raise CannotTraceError(f"'{weights.site(large)}' has {len(weights.shape(large) or ())} dimensions, not 2")
    call = None
    if target is torch.nn.functional.linear:
        call = _linear(_bind(("input", "weight", "bias"), args, kwargs), weights, template)
    elif target in _MATMULS or target in ("matmul", "mm", "bmm", "__matmul__"):
        call = _matmul(list(_bind(("input", "other"), args, _renamed(kwargs)).values()), weights, template)
    elif target in _ADDED or target in ("addmm", "baddbmm"):
        call = _addmm(_bind(("input", "mat1", "mat2", "beta", "alpha"), args, kwargs), weights, template)
    elif target is torch.einsum:
        call = _einsum(args, weights, template)
    elif target is torch.tensordot:
        call = _tensordot(_bind(("a", "b", "dims"), args, kwargs), weights, template)
    elif target is torch.nn.functional.conv1d:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        call = _convolution(_bind(names, args, kwargs), weights, template)
    if call is None:
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        raise CannotTraceError(f"'{used[0]}' goes into '{name}' in a form that is not y = x @ weight.T")
    return call


def with_contiguous_products(forward: ForwardIR) -> ForwardIR:
    """The forward with each product whose axes are moved copied, as torch's own is contiguous: a view may read it."""
    made = [step if step.call is None else replace(step, call=_contiguous(step.call)) for step in forward.statements]
    return replace(forward, statements=tuple(made))


def _contiguous(call: SiteCall) -> SiteCall:
    return replace(call, out=f"{call.out}.contiguous()") if call.out.startswith(_MOVES) else call


def _linear(bound: dict[str, object], weights: Weights, template: Template) -> SiteCall | None:
    site = weights.site(bound.get("weight"))
    if site is None or set(bound) - {"input", "weight", "bias"}:
        return None
    x, bias = template.arg(bound["input"]), bound.get("bias")
    added = None if bias is None else template.arg(weights.plain(bias))
    return SiteCall(site, x, _matrix(bound["weight"], weights, template), added, "{0}")


def _matrix(value: object, weights: Weights, template: Template) -> str:
    """The text of a weight without what gives each sample a copy of it, without casts, and of two dimensions."""
    text = template.arg(weights.plain(value))
    if is_single(weights.shape(value)):
        text = f"{text}.squeeze(0)"
    return _transposed(text) if weights.is_turned(value) else text


def _matmul(values: list[object], weights: Weights, template: Template) -> SiteCall | None:
    if len(values) != 2:
        return None
    left, right = values
    site = weights.site(right)
    if site is not None:  # x @ P
        return SiteCall(site, template.arg(left), _transposed(_matrix(right, weights, template)), None, "{0}")
    site = weights.site(left)
    if site is None:
        return None
    flip = ".transpose(-1, -2)"  # P @ x = (x.T @ P.T).T
    return SiteCall(site, template.arg(right) + flip, _matrix(left, weights, template), None, "{0}" + flip)


def _addmm(bound: dict[str, object], weights: Weights, template: Template) -> SiteCall | None:
    names = ("mat1", "mat2") if "mat1" in bound else ("batch1", "batch2")
    call = _matmul([bound.get(name) for name in names], weights, template)
    if call is None or bound.get("beta", 1) != 1 or bound.get("alpha", 1) != 1:
        return None
    added = weights.plain(bound.get("input"))
    if isinstance(added, fx.Node) and added in weights.vectors and call.out == "{0}":
        return replace(call, bias=template.arg(added))
    return replace(call, plus=template.arg(bound.get("input")))


def _einsum(args: list[object], weights: Weights, template: Template) -> SiteCall | None:
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if not isinstance(args[0], str) or args[0].count("->") != 1:
        return None
    which = next((i for i, each in reversed(list(enumerate(operands))) if weights.site(each) is not None), None)
    if which is None or len(operands) < 2:
        return None
    if len(operands) > 2:
        return _einsum_of_several(args[0], operands, which, weights, template)
    inputs, out = args[0].replace(" ", "").split("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        return None
    letters, of_x = terms[which], terms[1 - which]
    if (shape := weights.shape(operands[which])) is not None:
        if weights.is_turned(operands[which]):
            letters = letters[:-2] + letters[:-3:-1]
        return _folded((of_x, letters, out), shape, operands[1 - which], operands[which], weights, template)
    if weights.is_copied(operands[which]):  # a matrix of each sample: without the samples' letter
        letters, lead = letters[1:], letters[:1]
        if lead not in of_x or lead not in out or lead in letters:
            return None
    views = einsum_views(of_x, letters, out)
    if views is None:
        return None
    x_view, flip, out_view = views
    weight, site = _matrix(operands[which], weights, template), weights.site(operands[which])
    x = template.arg(operands[1 - which]) + x_view
    return SiteCall(str(site), x, _transposed(weight) if flip else weight, None, "{0}" + out_view)


def _folded(
    letters: tuple[str, str, str],
    shape: tuple[int, ...],
    x: object,
    weight: object,
    weights: Weights,
    template: Template,
) -> SiteCall | None:
    """An einsum by a Parameter of more dimensions, as a linear."""
    views = folded_views(*letters, shape) if len(letters[1]) == len(shape) else None
    if views is None:
        return None
    text = template.arg(weights.plain(weight)) + views.weight
    return SiteCall(str(weights.site(weight)), template.arg(x) + views.x, text, None, "{0}" + views.out)


def _einsum_of_several(
    equation: str, operands: list[object], which: int, weights: Weights, template: Template
) -> SiteCall | None:
    """An einsum of several operands as a linear: its input is the einsum of all but the matrix."""
    split = split_equation(equation, which)
    if split is None or weights.is_copied(operands[which]):
        return None
    before, after = split
    others = [template.arg(each) for place, each in enumerate(operands) if place != which]
    inputs, _, out = after.partition("->")
    product, _, letters = inputs.partition(",")
    views = einsum_views(product, letters, out)
    if views is None:
        return None
    x_view, flip, out_view = views
    weight, site = _matrix(operands[which], weights, template), weights.site(operands[which])
    x = f"torch.einsum('{before}', {', '.join(others)}){x_view}"
    return SiteCall(str(site), x, _transposed(weight) if flip else weight, None, "{0}" + out_view)


def einsum_views(x: str, p: str, out: str) -> tuple[str, bool, str] | None:
    """An einsum "x,p->out" as a linear: the view of x, True if the Parameter is transposed, the product's view.

    >>> einsum_views("bnd", "nk", "bkd")
    ('.permute(0, 2, 1)', True, '.permute(0, 2, 1)')
    """
    dots = x.startswith("...") and out.startswith("...")
    x_names, out_names = (x[3:], out[3:]) if dots else (x, out)
    if "." in x_names + out_names + p or len(set(p)) != 2 or len(p) != 2:
        return None
    contracted = [name for name in p if name in x_names and name not in out_names]
    kept = [name for name in p if name not in x_names and name in out_names]
    if len(contracted) != 1 or len(kept) != 1 or len(set(x_names)) != len(x_names):
        return None
    rest = [name for name in x_names if name != contracted[0]]
    if sorted([*rest, *kept]) != sorted(out_names):
        return None
    product = [*rest, kept[0]]
    if dots:  # leading dimensions stay; only one of the others may move
        if [name for name in out_names if name != kept[0]] != rest:
            return None
        views = (
            _move(x_names.index(contracted[0]) - len(x_names), True),
            _move(out_names.index(kept[0]) - len(out_names), False),
        )
    else:
        views = (
            _permute([x_names.index(name) for name in [*rest, contracted[0]]]),
            _permute([product.index(name) for name in out_names]),
        )
    return views[0], p[1] == kept[0], views[1]


def _tensordot(bound: dict[str, object], weights: Weights, template: Template) -> SiteCall | None:
    left = weights.site(bound["a"]) is not None
    views = tensordot_views(bound.get("dims", 2), left)
    if views is None or bound.get("out") is not None:
        return None
    x_view, flip, out_view = views
    x, weight = (bound["b"], bound["a"]) if left else (bound["a"], bound["b"])
    text = _matrix(weight, weights, template)
    call = SiteCall(str(weights.site(weight)), template.arg(x), _transposed(text) if flip else text, None, "{0}")
    return replace(call, x=call.x + x_view, out=call.out + out_view)


def tensordot_views(dims: object, left: bool) -> tuple[str, bool, str] | None:
    """A tensordot with a Parameter of two dimensions as a linear, as `einsum_views`; `left`: the Parameter is first.

    >>> tensordot_views(([1], [0]), left=False)
    ('.movedim(1, -1)', True, '')
    """
    over = ((-1,), (0,)) if dims == 1 else dims
    if not isinstance(over, tuple | list) or len(over) != 2:
        return None
    of_a, of_b = ([each] if isinstance(each, int) else each for each in over)
    if not all(isinstance(each, tuple | list) and len(each) == 1 and type(each[0]) is int for each in (of_a, of_b)):
        return None
    (of_x,), (of_weight,) = (of_b, of_a) if left else (of_a, of_b)
    return _move(of_x, True), of_weight in (0, -2), ".movedim(-1, 0)" if left else ""


def _convolution(bound: dict[str, object], weights: Weights, template: Template) -> SiteCall | None:
    """A convolution of size 1: W @ x of each sample, W being (out, in, 1)."""
    site = weights.site(bound.get("weight"))
    wanted = {"stride": (1, (1,), [1]), "padding": (0, (0,), [0], "same", "valid"), "groups": (1,)}
    if site is None or any(name in bound and bound[name] not in known for name, known in wanted.items()):
        return None
    if weights.plain(bound["weight"]) is not bound["weight"]:
        return None
    bias, flip = bound.get("bias"), ".transpose(-1, -2)"
    weight, added = template.arg(bound["weight"]), None if bias is None else template.arg(bias)
    return SiteCall(site, template.arg(bound["input"]) + flip, f"{weight}.flatten(1)", added, "{0}" + flip)


def _permute(order: list[int]) -> str:
    return "" if order == sorted(order) else f".permute({', '.join(map(str, order))})"


def _move(place: int, to_last: bool) -> str:
    if place == -1:
        return ""
    return f".movedim({place}, -1)" if to_last else f".movedim(-1, {place})"


def _transposed(text: str) -> str:
    return text.removesuffix(".t()") if text.endswith(".t()") else text + ".t()"


def _bind(names: tuple[str, ...], args: list[object], kwargs: dict[str, object]) -> dict[str, object]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _renamed(kwargs: dict[str, object]) -> dict[str, object]:
    return {"other" if name in ("mat2", "tensor2") else name: value for name, value in kwargs.items()}


def _flat(values: list[object]) -> list[object]:
    return [x for value in values for x in (_flat(list(value)) if isinstance(value, tuple | list) else [value])]


@dataclass(frozen=True, slots=True)
class FoldedViews:
    """What makes a linear of an einsum: text after x, after the weight for (N, K), and after the product."""

    x: str
    weight: str
    out: str


def folded_views(x: str, weight: str, out: str, shape: Sequence[int]) -> FoldedViews | None:
    """An einsum "x,weight->out" by a weight of this shape as a linear; None where the weight is no single matrix.

    The weight is a view where its rows stand together, and its columns; else a copy.

    >>> folded_views("bfd", "fdr", "br", (4, 8, 2))
    FoldedViews(x='.flatten(-2)', weight='.flatten(0, 1).t()', out='')
    >>> folded_views("bd", "edr", "ber", (3, 8, 2))
    FoldedViews(x='', weight='.permute(0, 2, 1).flatten(0, 1)', out='.unflatten(-1, (3, 2))')
    """
    letters = matrix_letters(x, weight, out, shape)
    if letters is None or not (x + out).isalpha():
        return None
    single = "".join(f".squeeze({place})" for place in reversed(range(len(weight))) if weight[place] in letters.single)
    held = "".join(c for c in weight if c not in letters.single)
    rows, columns, sizes = letters.free, letters.contracted, dict(zip(weight, shape, strict=True))
    rest = "".join(c for c in x if c not in columns)
    flipped = held == columns + rows
    first, second = (columns, rows) if flipped else (rows, columns)
    moved = _permute([held.index(c) for c in first + second])
    matrix = single + moved + _flatten(len(first), len(second)) + (".t()" if flipped else "")
    made = f".unflatten(-1, ({', '.join(str(sizes[c]) for c in rows)}))" if len(rows) > 1 else ""
    folded = f".flatten(-{len(columns)})" if len(columns) > 1 else ""
    return FoldedViews(
        _permute([x.index(c) for c in rest + columns]) + folded,
        matrix,
        made + _permute([(rest + rows).index(c) for c in out]),
    )


def _flatten(first: int, second: int) -> str:
    """A view of a tensor of so many and so many dimensions as a matrix."""
    last = f".flatten({first})" if second > 1 else ""
    return last + (f".flatten(0, {first - 1})" if first > 1 else "")
