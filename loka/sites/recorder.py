"""Records one forward: every call that multiplies matrices, with its owner, its line and its neighbours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.sites.callables import place_in_model
from loka.sites.fake_outputs import VIEWS, FakeLayout, FakeOutputs, joins_two, keeps_layout
from loka.sites.neighbours import (
    LIKE_ANOTHER,
    TRANSFORMED,
    Call,
    Function,
    Node,
    Other,
    history,
    is_clamp_at_zero,
    is_idle,
    keeps_rows,
    op_name,
    simpler_name,
)
from loka.sites.products.catalogue import PRODUCTS
from loka.sites.products.einsum import is_elementwise, with_one_matrix
from loka.sites.products.layers import other_terms
from loka.sites.products.matrix_product import MatrixProduct, TensorOrigin, unpatchable
from loka.sites.site import GemmKind
from loka.sites.weights import (
    PIECES,
    Index,
    copies_matrix,
    matrix_name,
    pieces_of,
    shape_at,
    swaps_columns,
    taken_index,
)

_TRANSPOSES = frozenset(("t", "T", "mT"))
_SWAPS = frozenset(("transpose", "permute", "swapaxes"))
_TAKES_MATRICES = frozenset(("getitem", "select", "narrow")) | PIECES


FUNCTIONS = frozenset(("silu", "sigmoid", "layer_norm", "rms_norm"))  # functions that mods may replace


class Recorder(TorchFunctionMode):
    """Records one forward of a copied model.

    `names` has the qualified name of each Parameter of the copy by id, `buffers` that of each buffer. With
    `fake_outputs`, linear layers and pointwise functions are not run; their outputs are made from their shapes.
    """

    def __init__(
        self,
        names: dict[int, str],
        buffers: dict[int, str],
        fake_outputs: FakeOutputs | None,
        stop: CodeType,
    ) -> None:
        super().__init__()
        self.names = names
        self.fake_outputs = fake_outputs
        self.calls: list[Call] = []
        self.others: list[Other] = []
        self.functions: list[Function] = []
        self.called: set[str] = set()
        self.stack: list[str] = []
        self._of_torch: set[str] = set()  # modules whose class is torch's own
        self._stop = stop
        self._plain: dict[str, nn.Linear] = {}
        self._nodes: dict[int, Node] = {key: Node("parameter", (), True, parameter=n) for key, n in names.items()}
        self._nodes.update({key: Node("buffer", (), True, buffer=n) for key, n in buffers.items()})
        self._fixed = frozenset(self._nodes)
        self._kept: list[Tensor] = []  # keeps the tensors alive, so that the ids in _nodes stay valid

    def add_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Record the forward's inputs."""
        for tensor in tensors:
            self._set(tensor, Node("input"))

    def watch(self, name: str, module: nn.Module) -> None:
        """Wrap a module's forward, so that its calls are recorded."""
        original = module.forward
        if type(module).__module__.startswith("torch.nn.modules."):
            self._of_torch.add(name)
        if isinstance(module, nn.Linear) and is_plain_linear(module):
            self._plain[name] = module
            run = self._linear_forward(name, module, original)
        else:
            run = self._named_forward(name, original)
        run.__wrapped__ = original  # type: ignore[attr-defined]  # what inspect.signature follows
        module.__dict__["forward"] = run

    def node_of(self, tensor: Tensor) -> Node | None:
        """The node that made a tensor; None where it was not recorded."""
        return self._nodes.get(id(tensor))

    def _named_forward(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            self.called.add(name)
            self.stack.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                self.stack.pop()

        return forward

    def _linear_forward(self, name: str, linear: nn.Linear, original: Callable[..., Any]) -> Callable[..., Any]:
        run = self._named_forward(name, original)
        weight, bias = linear.weight, linear.bias
        names = _linear_names(name, linear)
        tensors = (weight,) if bias is None else (weight, bias)

        def forward(input: Tensor) -> Tensor:
            if torch._C._are_functorch_transforms_active():
                self.others.append(Other(TRANSFORMED, name, ()))
                return run(input)  # type: ignore[no-any-return]
            with torch._C.DisableTorchFunction():
                out = self._fake_linear(input, weight, tensors) if linear.weight is weight else None
                if out is None:
                    made = None
                else:
                    layout, made = out
                    self.called.add(name)
                    mkn = (layout.rows, weight.shape[1], weight.shape[0])
                    product = MatrixProduct(GemmKind.LINEAR, input, names[0], None, *mkn, (mkn,))
                    result = self._result("linear", (input,), made, gemm=True)
                    if result is not None:
                        result.layout = (
                            self.fake_outputs.widened(layout, weight.shape[0]) if self.fake_outputs else None
                        )
                        self._add(product, result, name, names[1], ("", 0), None)
            return made if made is not None else run(input)

        return forward

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function (or make its output), and record it."""
        named = dict(kwargs or {})
        if torch._C._are_functorch_transforms_active():  # a tensor stands for many there
            if func in PRODUCTS:
                self.others.append(Other(TRANSFORMED, self._owner(), ()))
            return func(*args, **named)
        if (parts := with_one_matrix(func, args, self.origin)) is not None:
            before, (equation, matrix) = parts
            x = self.__torch_function__(func, types, before)
            return self.__torch_function__(func, types, (equation, x, matrix))
        describe = PRODUCTS.get(func)
        product = describe(args, named, self.origin) if describe else None
        out, layout = self._fake_output_of(func, args, named, product)
        if out is None:
            out = func(*args, **named)
        if isinstance(out, Tensor | tuple | list) or (out is None and args and isinstance(args[0], Tensor)):
            name = op_name(func) if not is_idle(func, args, named, out) else "alias"
            name = "mul" if is_elementwise(func, args) else name
            name = simpler_name(name, args, named, out)
            name = "relu" if is_clamp_at_zero(name, args[1:], named) else name
            operands = args[:1] if op_name(func) in LIKE_ANOTHER else (*args, *named.values())
            result = self._result(name, operands, out, gemm=product is not None)
            if result is not None:
                result.rows = keeps_rows(name, args, out)
                result.layout = layout
                if result.constant and name in _TAKES_MATRICES:
                    self._name_matrices(name, args, named, out, result)
                if result.constant and not named and isinstance(args[0], Tensor):
                    swapped = result.parents[0].copies and swaps_columns(name, args[1:])
                    result.copies = swapped or copies_matrix(name, args[1:], args[0].shape)
                if name in FUNCTIONS:
                    self._add_function(name, result)
                if product is not None:
                    result.folded = product.folded
                    self._add_called(product, result)
                elif terms := other_terms(name, args, out):
                    self.others.append(Other(name, self._owner(), terms))
        return out

    def origin(self, tensor: Tensor) -> TensorOrigin:
        """Origin of an operand of a product."""
        node = self._nodes.get(id(tensor))
        if node is None:
            return TensorOrigin(None, "a tensor that is neither Parameter nor input")
        step, dimensions = node, tensor.dim()
        while step.copies or step.op in _TRANSPOSES or (step.op in _SWAPS and dimensions == 2):
            dimensions = 2 if step.copies else dimensions
            step = step.parents[0]
        if step.parameter is not None:
            return TensorOrigin(step.parameter, copied=node.copies)
        if not node.constant:
            return TensorOrigin(None)
        return TensorOrigin(None, history(node))

    def _fake_output_of(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], product: MatrixProduct | None
    ) -> tuple[Tensor | None, FakeLayout | None]:
        if self.fake_outputs is None:
            return None, None
        if func is F.linear and product is not None and product.kind is GemmKind.FUNCTIONAL_LINEAR and len(args) > 1:
            x, weight = args[0], args[1]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            odd_bias = bias is not None and tuple(bias.shape) != tuple(weight.shape[:1])
            if product.x is not x or product.blocked or odd_bias:
                return None, None
            made = self._fake_linear(args[0], weight, (weight,) if bias is None else (weight, bias))
            return (None, None) if made is None else (made[1], self.fake_outputs.widened(made[0], weight.shape[0]))
        if func in VIEWS and not kwargs and isinstance(args[0], Tensor):
            before = self._layout(args[0])
            after = None if before is None else self.fake_outputs.viewed(func, args, before)
            return (None, None) if after is None else (self.fake_outputs.make(after, (args[0],)), after)
        sources = keeps_layout(func, args, kwargs)
        layout = self._layout(sources[0]) if sources else None
        if joins_two(func, args, kwargs):
            layout, other = (self._known_layout(each) for each in args)
            sources, layout = args, layout if layout is other else None
        if layout is None or torch.is_autocast_enabled(layout.device.type):
            return None, None
        return self.fake_outputs.make(layout, sources), layout

    def _fake_linear(self, x: Tensor, weight: Tensor, tensors: tuple[Tensor, ...]) -> tuple[FakeLayout, Tensor] | None:
        """The input's layout and the output of a linear layer; None if torch must compute it (or reject it)."""
        if self.fake_outputs is None:
            return None
        layout = self._layout(x)
        if layout is None or layout.last != weight.shape[1] or any(t.dtype != layout.dtype for t in tensors):
            return None
        if torch.is_autocast_enabled(layout.device.type):
            return None
        return layout, self.fake_outputs.make(self.fake_outputs.widened(layout, weight.shape[0]), (x, *tensors))

    def _layout(self, tensor: Tensor) -> FakeLayout | None:
        node = self._nodes.get(id(tensor))
        if node is None or self.fake_outputs is None:
            return None
        if node.layout is None:
            node.layout = self.fake_outputs.layout_of(tensor) or False
        return node.layout or None

    def _known_layout(self, tensor: Tensor) -> FakeLayout | None:
        """The layout that a tensor was found to have before, so that two tensors of one layout share it."""
        node = self._nodes.get(id(tensor))
        return (node.layout or None) if node is not None else None

    def _result(self, op: str, operands: tuple[Any, ...], out: Any, gemm: bool) -> Node | None:
        """Record the result of an operation. None if it returned a Parameter, or no tensor."""
        parents = tuple(self._parents(operands))
        constant = all(parent.constant for parent in parents)
        node = Node(op, parents, constant, gemm, owner=self._owner())
        if out is None:  # x[...] = y
            out = operands[0]
        results = [out] if isinstance(out, Tensor) else [t for t in _flat(out) if isinstance(t, Tensor)]
        if not results or (len(results) == 1 and id(results[0]) in self._fixed):
            return None
        same = self._nodes.get(id(results[0])) if operands and results[0] is operands[0] else None
        if same is not None and same.parameter is not None:
            return None  # a cast that changes nothing, of a matrix in a Parameter
        for parent in parents:
            parent.children.append(node)
        for tensor in results:
            self._set(tensor, node)
        return node

    def _name_matrices(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, result: Node) -> None:
        """Name what is taken from a Parameter: `W[2]` is "w.2", `W[0:32]` is "w.0:32"."""
        source = args[0] if args and isinstance(args[0], Tensor) else None
        held = None if source is None else self._nodes.get(id(source))
        if source is None or held is None or held.parameter is None:
            return
        if held.whole is None:
            held.whole = held.parameter, tuple(source.shape), ()
        parameter, shape, before = held.whole
        if op not in PIECES:
            self._name(result, parameter, shape, taken_index(op, args[1:], kwargs, shape, before))
            return
        for piece, index in zip(out, pieces_of(op, args[1:], kwargs, out, shape, before), strict=True):
            self._nodes[id(piece)] = node = Node(op, (held,), True)
            self._name(node, parameter, shape, index)
            held.children.append(node)

    def _name(self, node: Node, parameter: str, shape: tuple[int, ...], index: Index | None) -> None:
        """Name a vector or matrix in a Parameter of this shape."""
        if index is not None and shape_at(shape, index):
            node.parameter, node.whole = matrix_name(parameter, index), (parameter, shape, index)

    def _parents(self, operands: tuple[Any, ...]) -> Iterable[Node]:
        for operand in operands:
            if isinstance(operand, Tensor):
                if (node := self._nodes.get(id(operand))) is not None:
                    yield node
            elif isinstance(operand, tuple | list):
                yield from self._parents(tuple(operand))

    def _set(self, tensor: Tensor, node: Node) -> None:
        if id(tensor) not in self._fixed:
            self._nodes[id(tensor)] = node
            self._kept.append(tensor)

    def _owner(self) -> str:
        return self.stack[-1] if self.stack else ""

    def _add_called(self, product: MatrixProduct, result: Node) -> None:
        """Record a product that went through a torch function, with its owner and line."""
        owner, module = self._owner(), None
        bias = None if product.bias is None else self.origin(product.bias).parameter
        file, line, opaque = place_in_model(sys._getframe(2), self._stop)
        blocked = product.blocked or opaque
        linear = self._plain.get(owner)
        kind = product.kind
        if linear is not None and product.weight is not None and product.weight == self.names.get(id(linear.weight)):
            kind, module, file, line = GemmKind.LINEAR, owner, "", 0
        elif _is_of_module(product, result.op, owner, bool(self.stack)):
            module = owner
        elif kind is GemmKind.CONVOLUTION and product.weight == _weight_name(owner):
            file, line = "", 0  # of torch's own forward: one site, wherever the model calls it
        elif linear is None and product.bias is not None and bias is None and kind is GemmKind.FUNCTIONAL_LINEAR:
            blocked = blocked or "its bias is computed, not a Parameter"
        weight = product.weight
        if linear is not None and kind is GemmKind.LINEAR:
            weight, bias = _linear_names(owner, linear)
        seen = MatrixProduct(kind, product.x, weight, None, product.m, product.k, product.n, product.terms)
        if module is not None and kind is GemmKind.LINEAR:
            self.stack.pop()  # the call of the module is its parent's
            self._add(seen, result, module, bias, (file, line), blocked)
            self.stack.append(module)
        else:
            self._add(seen, result, module, bias, (file, line), blocked)

    def _add_function(self, op: str, result: Node) -> None:
        owner = self._owner()
        file, line = ("", 0) if owner in self._of_torch else place_in_model(sys._getframe(2), self._stop)[:2]
        self.functions.append(Function(op, owner, file, line, result))

    def _add(
        self,
        product: MatrixProduct,
        result: Node,
        module: str | None,
        bias: str | None,
        place: tuple[str, int],
        blocked: str | None,
    ) -> None:
        x = product.x
        source = None if x is None else self._nodes.get(id(x))
        self.calls.append(
            Call(
                kind=product.kind,
                module=module,
                owner=self._owner(),
                weight=product.weight,
                bias=bias,
                m=product.m,
                k=product.k,
                n=product.n,
                terms=product.terms,
                input_grad=x is not None and x.requires_grad,
                source=source,
                result=result,
                file=place[0],
                line=place[1],
                blocked=blocked,
            )
        )


def is_plain_linear(module: nn.Module) -> bool:
    """True if a module is exactly an nn.Linear whose weight is a Parameter that it holds itself."""
    weight = module._parameters.get("weight")
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and weight is not None
        and unpatchable(weight) is None
        and (module._parameters.get("bias") is not None or module.__dict__.get("bias", None) is None)
    )


def _linear_names(name: str, linear: nn.Linear) -> tuple[str, str | None]:
    """Names of its weight and bias by its own name, even if another module holds them too."""
    return _weight_name(name), None if linear.bias is None else f"{name}.bias".lstrip(".")


def _is_of_module(product: MatrixProduct, op: str, owner: str, inside: bool) -> bool:
    """True for the product of an nn.MultiheadAttention or an nn.Conv2d, which are called as one."""
    attends = product.kind is GemmKind.ATTENTION and "multi_head" in op and inside
    convolves = product.kind is GemmKind.CONVOLUTION and product.blocked is not None
    return attends or (convolves and product.weight == _weight_name(owner))


def _weight_name(module: str) -> str:
    return f"{module}.weight".lstrip(".")


def _flat(value: Any) -> Iterable[Any]:
    for part in value:
        if isinstance(part, tuple | list):
            yield from _flat(part)
        else:
            yield part
