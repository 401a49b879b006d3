"""The weights of sites in a trace, and the changes of form between a Parameter and the product that it is in."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx, nn

from loka.graph.capture.captured import place_in
from loka.graph.sites.weights import (
    PIECES,
    Index,
    SiteWeight,
    copies_matrix,
    part_at,
    pieces_of,
    shape_at,
    swaps_columns,
    taken_index,
)
from loka.graph.trace.merging import Op

_TRANSPOSES = ((0, 1), (1, 0), (-1, -2), (-2, -1))


@dataclass(frozen=True, slots=True)
class Form:
    """A weight or a vector in another form, which a GEMM of our own needs not."""

    plain: fx.Node  # the Parameter, a part of it, or a transpose of either
    turned: bool  # the matrix is transposed
    copied: bool  # one of each sample


@dataclass(frozen=True, slots=True)
class Weights:
    """The fx nodes that are weights of sites; `views` are plain transposes of such nodes."""

    sites: Mapping[fx.Node, str]  # a Parameter (get_attr), or a matrix in one -> site, relative to the owner
    views: Mapping[fx.Node, fx.Node]  # W.t() -> W
    names: frozenset[str]  # all sites
    matrices: Mapping[fx.Node, tuple[fx.Node, Index]] = field(default_factory=dict)  # W[2] -> W, (2,)
    vectors: frozenset[fx.Node] = frozenset()  # Parameters of one dimension, and rows of others
    forms: Mapping[fx.Node, Form] = field(default_factory=dict)  # W.to(x.dtype), W.unsqueeze(0).expand(batch, -1, -1)
    inline: Mapping[fx.Node, Op] = field(default_factory=dict)  # printed where they are read: forms, and x.dtype in one
    shapes: Mapping[fx.Node, tuple[int, ...]] = field(
        default_factory=dict
    )  # of the weights of more than two dimensions

    def site(self, value: object) -> str | None:
        """The site whose weight, in whatever form, a value is; None otherwise."""
        node = self.plain(value)
        return self.sites.get(self.views.get(node, node)) if isinstance(node, fx.Node) else None

    def plain(self, value: object) -> object:
        """What a form is of: a Parameter, a part of it, or a transpose; any other value itself."""
        return self.forms[value].plain if isinstance(value, fx.Node) and value in self.forms else value

    def is_turned(self, value: object) -> bool:
        """True for a form whose matrix is transposed."""
        return isinstance(value, fx.Node) and value in self.forms and self.forms[value].turned

    def is_copied(self, value: object) -> bool:
        """True for a form with a matrix for each sample."""
        return isinstance(value, fx.Node) and value in self.forms and self.forms[value].copied

    def shape(self, value: object) -> tuple[int, ...] | None:
        """The shape of a weight of more than two dimensions; None for other values."""
        plain = self.plain(value)
        return self.shapes.get(plain) if isinstance(plain, fx.Node) else None

    def sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """What the text of a node reads: the Parameter that it is a transpose of or a part of; the node for others."""
        if node in self.inline:
            for inner in self.inline[node].node.all_input_nodes:
                yield from self.sources(inner)
            return
        node = self.views.get(node, node)
        yield self.matrices[node][0] if node in self.matrices else node


def find_weights(owner: nn.Module, ops: tuple[Op, ...], sites: Mapping[str, SiteWeight]) -> Weights:
    """The weights of `sites` (name -> weight) among the traced operations, and their changes of form."""
    finder = _Finder(owner, ops, sites)
    for op in ops:
        finder.see(op)
    return finder.weights()


class _Finder:
    """Follows Parameters through the operations of a trace."""

    def __init__(self, owner: nn.Module, ops: tuple[Op, ...], sites: Mapping[str, SiteWeight]) -> None:
        self._owner = owner
        self._sites = frozenset(sites)
        self._names = {(id(weight.parameter), weight.index): site for site, weight in reversed(list(sites.items()))}
        self._by_node = {op.node: op for op in ops}
        self._nodes: dict[fx.Node, str] = {}
        self._views: dict[fx.Node, fx.Node] = {}
        self._parts: dict[fx.Node, tuple[fx.Node, Index, nn.Parameter]] = {}
        self._whole: dict[fx.Node, fx.Node] = {}  # stands for all parts of a Parameter: W.unbind(), a loop over W
        self._pieces: dict[fx.Node, list[Index | None]] = {}  # of such
        self._vectors: set[fx.Node] = set()
        self._columns: set[fx.Node] = set()  # (d, 1), parts of Parameters
        self._forms: dict[fx.Node, Form] = {}
        self._shapes: dict[fx.Node, tuple[int, ...]] = {}

    def see(self, op: Op) -> None:
        """Take the next operation."""
        if op.node.op == "get_attr":
            self._parameter(op)
            return
        source = op.args[0] if op.args and isinstance(op.args[0], fx.Node) else None
        if source is None:
            return
        if source in self._nodes and source not in self._shapes and _is_transpose(op):
            self._views[op.node] = source
        elif source in self._parts and _name(op) in PIECES:
            self._take_pieces(op, source)
        elif source in self._parts or source in self._pieces:
            self._part(op, source)
        if op.node not in self._views and len(op.node.users) == 1 and (form := self._form(op, source)) is not None:
            self._forms[op.node] = form

    def weights(self) -> Weights:
        """What was found."""
        kept = {*self._nodes, *self._vectors, *self._columns}
        matrices = {node: self._parts[node][:2] for node in kept if node in self._parts and node.op != "get_attr"}
        lone = {node for node, shape in self._shapes.items() if is_single(shape) and self._is_copied(node)}
        matrices |= {node: (node, (0,)) for node in lone}
        shapes = {node: shape for node, shape in self._shapes.items() if node not in lone}
        inline = {node: self._by_node[node] for node in self._forms}
        for op in reversed(list(self._by_node.values())):  # sizes and dtypes that forms alone read
            if _is_read(op) and op.node.users and all(user in inline for user in op.node.users):
                inline[op.node] = op
        vectors = frozenset(self._vectors)
        return Weights(self._nodes, self._views, self._sites, matrices, vectors, self._forms, inline, shapes)

    def _is_copied(self, node: fx.Node) -> bool:
        """True where every reader of a Parameter makes one of each sample of it."""
        return node.op == "get_attr" and all(user in self._forms and self._forms[user].copied for user in node.users)

    def _parameter(self, op: Op) -> None:
        value = _attribute(self._owner, str(op.node.target))
        if (id(value), ()) in self._names:
            self._site(op.node, self._names[id(value), ()], value)
            if op.node not in self._shapes:
                return
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            self._vectors.add(op.node)
        if isinstance(value, nn.Parameter):
            self._parts[op.node] = (op.node, (), value)

    def _site(self, node: fx.Node, site: str, weight: object) -> None:
        self._nodes[node] = site
        if isinstance(weight, torch.Tensor) and weight.dim() > 2:
            self._shapes[node] = tuple(weight.shape)

    def _part(self, op: Op, source: fx.Node) -> None:
        """W[2] or W[:, 0:32], where that is the matrix of a site, or a vector that one operation reads."""
        if source in self._pieces:
            place = op.args[1] if op.node.target is operator.getitem else None
            pieces = self._pieces[source]
            index = pieces[place] if type(place) is int and -len(pieces) <= place < len(pieces) else None
            base, parameter = self._parts[self._whole[source]][::2]
        else:
            base, before, parameter = self._parts[source]
            index = taken_index(_name(op), op.args[1:], op.kwargs, parameter.shape, before)
        if index is None:
            return
        shape = shape_at(parameter.shape, index)
        self._parts[op.node] = (base, index, parameter)
        if (site := self._names.get((id(parameter), index))) is not None:
            self._site(op.node, site, part_at(parameter, index))
        elif len(shape) == 1 and len(op.node.users) == 1:
            self._vectors.add(op.node)
        elif shape[1:] == (1,) and len(op.node.users) == 1:
            self._columns.add(op.node)

    def _take_pieces(self, op: Op, source: fx.Node) -> None:
        """W.chunk(2), W.unbind()."""
        _, before, parameter = self._parts[source]
        name, kwargs = _name(op), {key: value for key, value in op.kwargs.items() if key != "input"}
        part = torch.empty(shape_at(parameter.shape, before), device="meta")
        args = op.args[1:]
        if any(isinstance(each, fx.Node) for each in op.node.all_input_nodes[1:]):
            return
        made = getattr(torch, name)(part, *args, **kwargs)
        self._whole[op.node] = source
        self._pieces[op.node] = pieces_of(name, args, kwargs, made, parameter.shape, before)

    def _form(self, op: Op, source: fx.Node) -> Form | None:
        """The form that an operation gives a weight, or a vector; None for another operation."""
        base = self._views.get(source, source)
        known = self._forms.get(source)
        is_matrix = base in self._nodes
        if known is None and not is_matrix and source not in self._vectors:
            return None
        form = known or Form(source, turned=False, copied=False)
        if _is_cast(op):
            return form
        name, rest = _name(op), () if op.node.target is getattr else op.args[1:]
        single = is_single(self._shapes.get(form.plain))
        if op.kwargs or source in self._vectors or (form.plain in self._shapes and not single):
            return None
        if (form.copied or single) and swaps_columns(name, rest):
            return Form(form.plain, not form.turned, form.copied)
        if not (form.copied or single) and known is not None and base not in self._nodes and _is_transpose(op):
            return Form(form.plain, not form.turned, copied=False)
        shape = self._shape(form)
        return Form(form.plain, form.turned, copied=True) if copies_matrix(name, rest, shape) else None

    def _shape(self, form: Form) -> tuple[int, ...]:
        plain = self._views.get(form.plain, form.plain)
        if plain in self._parts:
            shape = shape_at(self._parts[plain][2].shape, self._parts[plain][1])[-2:]
        else:
            shape = tuple(getattr(_attribute(self._owner, str(plain.target)), "shape", ()))[-2:]
        shape = shape[::-1] if (plain is not form.plain) != form.turned else shape
        return (1, *shape) if form.copied or plain in self._shapes else shape


def is_single(shape: tuple[int, ...] | None) -> bool:
    """True for one matrix of three dimensions, (1, K, N)."""
    return shape is not None and len(shape) == 3 and shape[0] == 1 and shape[2] != 1


def unused_reason(site: str, weights: Weights, ops: Sequence[Op]) -> str:
    """Why a site is in no GEMM of a trace: what its weight goes into instead, with the place, or that nothing does."""
    own = {node for node, name in weights.sites.items() if name == site}
    own |= {view for view, node in weights.views.items() if node in own}
    own |= {node for node in weights.forms if weights.site(node) == site}
    for op in ops:
        if own.intersection(op.node.all_input_nodes) and op.node not in own and op.node.op != "output":
            where = f" {place_in(*op.line)}" if op.line is not None else ""
            return f"'{site}' goes into '{_name(op)}' before any GEMM, and only transposes are followed{where}"
    whole = next((name for name in sorted(weights.names) if site.startswith(f"{name}.")), None)
    if whole is not None:
        return (
            f"'{site}' is a part of '{whole}', which the forward multiplies by as a whole, too: only that is followed"
        )
    return f"'{site}' takes part in no GEMM of the forward"


def _name(op: Op) -> str:
    """The own name of an operation: "getitem", "unsqueeze"."""
    target = op.node.target
    if target is getattr and len(op.args) == 2:
        return str(op.args[1])
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _is_cast(op: Op) -> bool:
    """True for a cast to the dtype of another tensor: `W.to(x.dtype)`, `W.type_as(x)`."""
    given = (*op.args[1:], *op.kwargs.values())
    if len(given) != 1 or not isinstance(given[0], fx.Node) or set(op.kwargs) - {"dtype"}:
        return False
    if op.node.target == "type_as":
        return True
    return op.node.target == "to" and given[0].target is getattr and given[0].args[1:] == ("dtype",)


def _is_read(op: Op) -> bool:
    """True for what only reads a tensor's dtype or sizes."""
    if op.node.target is getattr:
        return op.args[1:] in (("dtype",), ("shape",))
    if op.node.target is operator.getitem and isinstance(op.args[0], fx.Node):
        of = op.args[0]
        return of.target == "size" or (of.target is getattr and of.args[1:] == ("shape",))
    return op.node.target == "size"


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
