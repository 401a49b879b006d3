"""Recognises a traced operation on a site's weight as y = linear(x, weight, bias) between two changes of view."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from loka.graph.ir import SiteCall
from loka.graph.loop_guards import checked_length
from loka.graph.refused import CannotTraceError
from loka.graph.trace.fx_recording import Op
from loka.graph.trace.lint import place_in
from loka.graph.trace.printer import Template
from loka.sites.weights import SiteWeight, leading_index

_MATMULS = {operator.matmul, torch.matmul, torch.mm}
_GEMM_METHODS = {"matmul", "mm", "__matmul__", "addmm", "bmm", "baddbmm"}
_GEMMS = {
    *(*_MATMULS, torch.addmm, torch.bmm, torch.baddbmm),
    *(torch.einsum, torch.tensordot, torch.nn.functional.linear),
}
_TRANSPOSES = ((0, 1), (1, 0), (-1, -2), (-2, -1))


@dataclass(frozen=True, slots=True)
class Weights:
    """The fx nodes that are weights of sites; `views` are plain transposes of such nodes."""

    sites: Mapping[fx.Node, str]  # a Parameter (get_attr), or a matrix in one -> site, relative to the owner
    views: Mapping[fx.Node, fx.Node]  # W.t() -> W
    names: frozenset[str]  # all sites
    matrices: Mapping[fx.Node, tuple[fx.Node, tuple[int, ...]]] = field(default_factory=dict)  # W[2] -> W, (2,)

    def site(self, value: object) -> str | None:
        """The site whose weight, or its transpose, a value is; None otherwise."""
        if not isinstance(value, fx.Node):
            return None
        return self.sites.get(self.views.get(value, value))

    def source(self, node: fx.Node) -> fx.Node:
        """The Parameter that a node is a transpose of or a matrix in; the node itself for others."""
        node = self.views.get(node, node)
        return self.matrices[node][0] if node in self.matrices else node


def find_weights(owner: nn.Module, ops: tuple[Op, ...], sites: Mapping[str, SiteWeight]) -> Weights:
    """The weights of `sites` (name -> weight) among the traced operations, and their transposes."""
    names = {(id(weight.parameter), weight.index): site for site, weight in reversed(list(sites.items()))}
    indexed = {id(weight.parameter) for weight in sites.values() if weight.index}
    nodes: dict[fx.Node, str] = {}
    views: dict[fx.Node, fx.Node] = {}
    parts: dict[fx.Node, tuple[fx.Node, tuple[int, ...], nn.Parameter]] = {}
    whole: dict[fx.Node, fx.Node] = {}  # what stands for all matrices of a Parameter: W.unbind(), a loop over W
    for op in ops:
        if op.node.op == "get_attr":
            value = _attribute(owner, str(op.node.target))
            op.node.meta["ndim"] = getattr(value, "ndim", None)
            if (id(value), ()) in names:
                nodes[op.node] = names[id(value), ()]
            elif id(value) in indexed and isinstance(value, nn.Parameter):
                parts[op.node] = (op.node, (), value)
            continue
        source = op.args[0] if op.args and isinstance(op.args[0], fx.Node) else None
        if source in nodes and _is_transpose(op):
            views[op.node] = source
        elif source in parts and _is_all_matrices(op):
            whole[op.node] = source
        elif source in whole and op.node.target is checked_length:  # a loop over W.unbind()
            whole[op.node] = whole[source]
        elif source in parts or source in whole:
            base, before, parameter = parts[whole.get(source, source)]
            index = leading_index(_taking(op), op.args[1:], op.kwargs, parameter.shape[len(before) :])
            if index:
                parts[op.node] = (base, before + index, parameter)
                if (site := names.get((id(parameter), before + index))) is not None:
                    nodes[op.node] = site
    matrices = {node: parts[node][:2] for node in nodes if node in parts}
    return Weights(nodes, views, frozenset(sites), matrices)


def unused_reason(site: str, weights: Weights, ops: Sequence[Op]) -> str:
    """Why a site is in no GEMM of a trace: what its weight goes into instead, with the place, or that nothing does."""
    own = {node for node, name in weights.sites.items() if name == site}
    own |= {view for view, node in weights.views.items() if node in own}
    for op in ops:
        if own.intersection(op.node.all_input_nodes) and op.node not in own and op.node.op != "output":
            name = op.node.target if isinstance(op.node.target, str) else getattr(op.node.target, "__name__", "")
            where = f" {place_in(*op.line)}" if op.line is not None else ""
            return f"'{site}' goes into '{name}' before any GEMM, and only transposes are followed{where}"
    return f"'{site}' takes part in no GEMM of the forward"


def _taking(op: Op) -> str:
    """The name by which `leading_index` knows an operation; "" for others."""
    if op.node.target is operator.getitem:
        return "getitem"
    return "select" if op.node.target in ("select", torch.select) else ""


def _is_all_matrices(op: Op) -> bool:
    """True for an operation whose items are the matrices of its operand, in order."""
    if op.node.target is checked_length:
        return True
    rest = (*op.args[1:], *op.kwargs.values())
    return op.node.target in ("unbind", torch.unbind) and rest in ((), (0,))


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
    call = None
    if target is torch.nn.functional.linear:
        call = _linear(_bind(("input", "weight", "bias"), args, kwargs), weights, template)
    elif target in _MATMULS or target in ("matmul", "mm", "__matmul__"):
        call = _matmul(list(_bind(("input", "other"), args, _renamed(kwargs)).values()), weights, template)
    elif target in (torch.addmm, "addmm"):
        call = _addmm(_bind(("input", "mat1", "mat2", "beta", "alpha"), args, kwargs), weights, template)
    elif target is torch.einsum:
        call = _einsum(args, weights, template)
    elif target is torch.tensordot:
        call = _tensordot(_bind(("a", "b", "dims"), args, kwargs), weights, template)
    if call is None:
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        raise CannotTraceError(f"'{used[0]}' goes into '{name}' in a form that is not y = x @ weight.T")
    return call


def _linear(bound: dict[str, object], weights: Weights, template: Template) -> SiteCall | None:
    site = weights.site(bound.get("weight"))
    if site is None or set(bound) - {"input", "weight", "bias"}:
        return None
    x, weight = template.arg(bound["input"]), template.arg(bound["weight"])
    bias = bound.get("bias")
    return SiteCall(site, x, weight, None if bias is None else template.arg(bias), "{0}")


def _matmul(values: list[object], weights: Weights, template: Template) -> SiteCall | None:
    if len(values) != 2:
        return None
    left, right = values
    site = weights.site(right)
    if site is not None:  # x @ P
        return SiteCall(site, template.arg(left), _transposed(template.arg(right)), None, "{0}")
    site = weights.site(left)
    if site is None:
        return None
    flip = ".transpose(-1, -2)"  # P @ x = (x.T @ P.T).T
    return SiteCall(site, template.arg(right) + flip, template.arg(left), None, "{0}" + flip)


def _addmm(bound: dict[str, object], weights: Weights, template: Template) -> SiteCall | None:
    site = weights.site(bound.get("mat2"))
    bias = bound.get("input")
    one_row = isinstance(bias, fx.Node) and bias.op == "get_attr" and bias.meta.get("ndim") == 1
    if site is None or not one_row or bound.get("beta", 1) != 1 or bound.get("alpha", 1) != 1:
        return None
    weight = _transposed(template.arg(bound["mat2"]))
    return SiteCall(site, template.arg(bound["mat1"]), weight, template.arg(bias), "{0}")


def _einsum(args: list[object], weights: Weights, template: Template) -> SiteCall | None:
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
    if len(operands) != 2 or not isinstance(args[0], str) or args[0].count("->") != 1:
        return None
    inputs, out = args[0].replace(" ", "").split("->")
    terms = inputs.split(",")
    which = next((i for i in (1, 0) if weights.site(operands[i]) is not None), None)
    if which is None or len(terms) != 2:
        return None
    views = einsum_views(terms[1 - which], terms[which], out)
    if views is None:
        return None
    x_view, flip, out_view = views
    weight, site = template.arg(operands[which]), weights.site(operands[which])
    x = template.arg(operands[1 - which]) + x_view
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
    text = template.arg(weight)
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


def _is_transpose(op: Op) -> bool:
    target, rest = op.node.target, op.args[1:]
    if target is getattr:
        return rest in (("T",), ("mT",))
    if target in ("t", torch.t):
        return rest == () and not op.kwargs
    if target in ("transpose", torch.transpose, "permute", torch.permute, "swapaxes"):
        order = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | list) else rest
        allowed = ((1, 0),) if target in ("permute", torch.permute) else _TRANSPOSES
        return tuple(order) in allowed and not op.kwargs
    return False


def _attribute(owner: nn.Module, path: str) -> object:
    value: object = owner
    for name in path.split("."):
        value = getattr(value, name)
    return value
