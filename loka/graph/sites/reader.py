"""Reads the operations of a forward from the graphs that torch made of it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from loka.graph.sites.captured_forward import CapturedForward, Place, called
from loka.graph.sites.op_names import (
    FUNCTIONS,
    LIKE_ANOTHER,
    is_clamp_at_zero,
    is_idle,
    keeps_rows,
    op_name,
    simpler_name,
    writes_in_place,
)
from loka.graph.sites.operations import TRANSFORMED, Call, FunctionCall, Operation, Operations, OtherProduct, reached
from loka.graph.sites.products.catalogue import PRODUCTS
from loka.graph.sites.products.einsum import is_elementwise
from loka.graph.sites.products.layers import other_terms
from loka.graph.sites.products.matrix_product import MatrixProduct, TensorOrigin, unpatchable
from loka.graph.sites.site import GemmKind
from loka.graph.sites.sizes import Size, Sizes, Symbols, sizes_at
from loka.graph.sites.weights import copies_matrix, matrix_name, swaps_columns, taken_index

_TRANSPOSES = frozenset(("t", "T", "mT"))
_SWAPS = frozenset(("transpose", "permute", "swapaxes"))


Leaf = Callable[[str, Sequence[Operation | None]], tuple[Operation | None, ...]]


class Reader:
    """Goes through the graphs of a model's forward, in the order of the calls. `runs` are those that sizes are of."""

    def __init__(self, modules: Mapping[str, nn.Module], runs: int) -> None:
        self.made: dict[int, Operation] = {}  # by the id of a value in a graph: the last operation that wrote it
        self._kept: list[Any] = []  # whose ids are names
        self._runs, self._sizes = runs, dict[Any, Sizes]()
        self._symbols: Symbols = {}
        self._module, self._caller = "", ""
        self._leaf: Leaf | None = None
        self.parameters: dict[str, Operation] = {}
        self.calls: list[Call] = []
        self.others: list[OtherProduct] = []
        self.functions: list[FunctionCall] = []
        self._written: list[Operation] = []  # in place, so that whatever reads the same memory reads them
        self.has_gaps = False  # a part is not read, so that it is not known what becomes of its operations
        self._bodies = 0  # around what is read at the moment
        self.called: set[str] = set()
        model = modules[""]
        names = {id(module): name for name, module in modules.items()}
        self._canonical = {name: names[id(module)] for name, module in model.named_modules(remove_duplicate=False)}
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self._parameter_of = first
        self._buffer_of = {id(buffer): name for name, buffer in model.named_buffers()}
        linears = {name: m for name, m in modules.items() if isinstance(m, nn.Linear) and is_plain_linear(m)}
        self._plain = {name: (linear, first[id(linear.weight)]) for name, linear in linears.items()}
        self._of_torch = {name for name, m in modules.items() if type(m).__module__.startswith("torch.nn.modules.")}

    def operations(self, outputs: Sequence[Operation]) -> Operations:
        """All that was read, of a model with these results; products that reach none of them get no gradient."""
        calls = self.calls
        if not self.has_gaps:
            found = _with_gradients([each.result for each in calls], {*outputs, *self._written})
            without = (replace(each, input_grad=False, weight_grad=False) for each in calls)
            calls = [each if each.result in found else other for each, other in zip(calls, without, strict=True)]
        return Operations(
            tuple(calls),
            tuple(self.others),
            tuple(self.functions),
            tuple(outputs),
            self.parameters,
            frozenset(self.called),
        )

    def read(
        self,
        forward: CapturedForward,
        symbols: Symbols,
        name: str,
        caller: str,
        given: Callable[[fx.Node], Operation | None],
        leaf: Leaf | None = None,
    ) -> tuple[Operation | None, ...]:
        """Adds the operations of a module's forward; those that made its outputs.

        `symbols` are those of its sizes, `caller` is the module whose forward calls it, `given` what placeholders are.
        `leaf` reads a child that is a leaf, from the operations that made its arguments to those that it returns.
        """
        around = self.made, self._symbols, self._sizes, self._module, self._caller, self._leaf
        self._kept.append(forward)
        self.made, self._symbols, self._sizes = {}, symbols, {}
        self._module, self._caller, self._leaf = name, caller, leaf
        for node in forward.read.graph.find_nodes(op="placeholder"):
            value, held = node.meta.get("example_value"), given(node)
            if held is not None and isinstance(value, Tensor):
                self.made[id(value)] = held
        self._read_graph(forward.read.graph)
        self.called.update(map(self._named, forward.called))
        outputs = tuple(self.made.get(id(value)) for value in forward.outputs)
        self.made, self._symbols, self._sizes, self._module, self._caller, self._leaf = around
        self.has_gaps |= None in outputs
        return outputs

    def held(self, tensor: object) -> Operation | None:
        """A Parameter or a buffer of the model, by the first of its names; None for anything else."""
        if (parameter := self._parameter_of.get(id(tensor))) is not None:
            made = Operation("parameter", constant=True, parameter=parameter)
            return self.parameters.setdefault(parameter, made)
        buffer = self._buffer_of.get(id(tensor))
        return None if buffer is None else Operation("buffer", constant=True, buffer=buffer)

    def _named(self, inside: str) -> str:
        """The qualified name of a module by that in the captured one."""
        name = ".".join(filter(None, (self._module, inside)))
        return self._canonical.get(name, name)

    def _read_graph(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            value = node.meta.get("example_value")
            if node.op == "get_attr" and isinstance(value, Tensor):
                self.made[id(value)] = Operation("constant", constant=True)
            elif node.op.startswith("call"):
                self._read(node, value)

    def _read(self, node: fx.Node, value: Any) -> None:
        first = node.args[0] if node.args else None
        if node.op == "call_module" and self._leaf is not None:
            given = [self.made.get(id(tensor)) for tensor in _tensors(_values((node.args, node.kwargs)))]
            outputs, tensors = self._leaf(str(node.target), given), list(_tensors(value))
            if len(outputs) != len(tensors):
                outputs = (None,) * len(tensors)
            for tensor, made in zip(tensors, outputs, strict=True):
                self.made[id(tensor)] = made or Operation("forward")
        elif isinstance(first, fx.Node) and "body" in first.meta:
            self._look_into(node, first.meta["body"])
        elif node.target is operator.getitem and isinstance(first, fx.Node) and not _is_tensor(first):
            self._take(first, node.args[1], value)
        elif node.target is operator.setitem and isinstance(first, fx.Node):
            self._call(node, first.meta["example_value"])
        elif isinstance(value, Tensor | tuple | list):
            self._call(node, value)

    def _look_into(self, node: fx.Node, body: fx.Graph) -> None:
        """Reads the body of a checkpoint or of an autograd function, which is an argument of its call."""
        given = [each for each in node.args if not (isinstance(each, fx.Node) and "body" in each.meta)]
        for inner, outer in zip(body.find_nodes(op="placeholder"), given, strict=False):
            made = self.made.get(id(_values(outer)))
            if made is not None:
                self.made[id(inner.meta.get("example_value"))] = made
        self._bodies += 1  # of an autograd function, inside of which nothing needs a gradient
        self._read_graph(body)
        self._bodies -= 1
        made_inside = next(iter(body.find_nodes(op="output"))).args[0]
        if made_inside and isinstance(made_inside[0], tuple | list):  # of an autograd function, before what it saves
            made_inside = made_inside[0]
        value = node.meta.get("example_value")
        for outer, inner in zip(value if isinstance(value, tuple | list) else (value,), made_inside, strict=False):
            made = self.made.get(id(_values(inner)))
            if made is not None:
                self.made[id(outer)] = made

    def _take(self, of: fx.Node, place: Any, value: Any) -> None:
        """A tensor of several that an operation returns: its result, too; or a matrix in a Parameter."""
        together = of.meta.get("example_value")
        operation = self.made.get(id(together))
        if operation is None and isinstance(together, tuple | list) and type(place) is int:
            operation = self.made.get(id(together[place]))  # of a body
        if operation is None:
            return
        parent = operation.parents[0] if len(operation.parents) == 1 else None
        if operation.op == "unbind" and parent is not None and parent.parameter is not None and value.dim():
            leading = _values((*of.args[1:], *of.kwargs.values())) in ((), (0,))
            operation = Operation("unbind", (parent,), True)
            parent.children.append(operation)
            operation.parameter = matrix_name(parent.parameter, (place,)) if leading else None
        self.made[id(value)] = operation

    def _call(self, node: fx.Node, value: Any) -> None:
        func, args, kwargs = called(node)
        values, named = _values(args), _values(kwargs)
        if node.meta.get("transformed"):  # a tensor stands for many there
            if func in PRODUCTS:
                self.others.append(OtherProduct(TRANSFORMED, self._owners(node)[1], ()))
            return
        self._add(node, func, values, named, value)

    def _add(self, node: fx.Node, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        """Adds an operation, and what it is: a product, a norm, a matrix of a Parameter."""
        first = self.made.get(id(args[0])) if args else None
        if first is not None and value is args[0] and first.parameter is not None:
            return  # a cast that changes nothing, of a matrix in a Parameter
        describe = PRODUCTS.get(func)
        product = describe(args, kwargs, self._origin) if describe else None
        own_name = op_name(func)
        name = "mul" if is_elementwise(func, args) else own_name
        name = simpler_name("alias" if is_idle(func, args, kwargs, value) else name, args, kwargs, value)
        name = "relu" if is_clamp_at_zero(name, args[1:], kwargs) else name
        read = _tensors(args[:1] if own_name in LIKE_ANOTHER else (args, kwargs))
        parents = tuple(each for tensor in read if (each := self.made.get(id(tensor))) is not None)
        constant = all(parent.constant for parent in parents)
        result = Operation(name, parents, constant, product is not None, owner=self._owners(node)[1])
        result.differentiable = self._bodies > 0 or any(tensor.requires_grad for tensor in _tensors(value))
        if writes_in_place(func, kwargs):
            self._written.append(result)
        for parent in parents:
            parent.children.append(result)
        self.made[id(value)] = result
        self.made.update((id(tensor), result) for tensor in (() if isinstance(value, Tensor) else _tensors(value)))
        result.rows = keeps_rows(name, args, value)
        if constant and parents:
            if first is not None and first.parameter is not None:
                index = taken_index(name, args[1:], kwargs, args[0].shape)
                is_part = index is not None and len(index) < args[0].dim()
                result.parameter = matrix_name(first.parameter, index) if index is not None and is_part else None
            if not kwargs and isinstance(args[0], Tensor):
                swapped = parents[0].copies and swaps_columns(name, args[1:])
                result.copies = swapped or copies_matrix(name, args[1:], args[0].shape)
        place = node.meta.get("place", Place())
        if name in FUNCTIONS:
            file, line = ("", 0) if result.owner in self._of_torch else (place.file, place.line)
            self.functions.append(FunctionCall(name, result.owner, file, line, result))
        if product is not None:
            result.folded = product.folded
            others = [each for each in _tensors((args, kwargs)) if each is not product.x and each is not product.bias]
            weight_grad = place.opaque is not None or any(each.requires_grad for each in others)
            self._add_product(product, result, place, self._owners(node)[0], weight_grad)
        elif terms := other_terms(name, args, kwargs, value):
            self.others.append(OtherProduct(name, result.owner, self._flops(terms)))

    def _add_product(
        self, product: MatrixProduct, result: Operation, place: Place, caller: str, weight_grad: bool
    ) -> None:
        """Adds a call of a GEMM: of a module where one stands for it, otherwise of a function at its line."""
        bias = None if product.bias is None else self._origin(product.bias).parameter
        source = None if product.x is None else self.made.get(id(product.x))
        owner, module, kind, weight = result.owner, None, product.kind, product.weight
        blocked = product.blocked or place.opaque
        linear, own_weight = self._plain.get(owner, (None, None))
        if linear is not None and weight is not None and weight == own_weight:
            kind, module = GemmKind.LINEAR, owner
            weight, bias = _weight_name(owner), None if linear.bias is None else f"{owner}.bias".lstrip(".")
            owner = caller  # the call of the module is its caller's
        elif _is_of_module(product, result.op, owner):
            module = owner
        elif linear is None and product.bias is not None and bias is None and kind is GemmKind.FUNCTIONAL_LINEAR:
            blocked = blocked or "its bias is computed, not a Parameter"
        of_torch = module is not None and kind is GemmKind.LINEAR
        of_torch |= module is None and kind is GemmKind.CONVOLUTION and weight == _weight_name(owner)
        self.calls.append(
            Call(
                kind=kind,
                module=module,
                owner=owner,
                weight=weight,
                bias=bias,
                m=self._at(product.m),
                k=self._at(product.k),
                n=self._at(product.n),
                flops=self._flops(product.terms),
                input_grad=product.x is not None and product.x.requires_grad,
                weight_grad=weight_grad,
                source=source,
                result=result,
                file="" if of_torch else place.file,
                line=0 if of_torch else place.line,
                blocked=blocked,
            )
        )

    def _owners(self, node: fx.Node) -> tuple[str, str]:
        """The module whose forward calls the one that a node is in, and that one."""
        stack = [self._caller, self._caller, *map(self._named, node.meta["stack"])]
        return stack[-2], stack[-1]

    def _at(self, size: Size) -> Sizes:
        if isinstance(size, int):
            return (size,) * self._runs
        key = size.node.expr
        if key not in self._sizes:
            self._sizes[key] = sizes_at(size, self._symbols, self._runs)
        return self._sizes[key]

    def _flops(self, terms: Sequence[tuple[Size, Size, Size]]) -> Sizes:
        """FLOPs of products (M, K, N) in each run."""
        each = [tuple(map(self._at, mkn)) for mkn in terms]
        return tuple(sum(2 * m[run] * k[run] * n[run] for m, k, n in each) for run in range(self._runs))

    def _origin(self, tensor: Tensor) -> TensorOrigin:
        """Origin of an operand of a product."""
        operation = self.made.get(id(tensor))
        if operation is None:
            return TensorOrigin(None, "a tensor that is neither Parameter nor input")
        step, dimensions = operation, tensor.dim()
        while step.copies or step.op in _TRANSPOSES or (step.op in _SWAPS and dimensions == 2):
            dimensions = 2 if step.copies else dimensions
            step = step.parents[0]
        if step.parameter is not None:
            return TensorOrigin(step.parameter, copied=operation.copies)
        return TensorOrigin(None, _history(operation) if operation.constant else "")


def _with_gradients(results: Sequence[Operation], read: Collection[Operation]) -> set[Operation]:
    """Those of the results of products to which gradients come, by what is `read` of a forward."""
    around = reached(results, lambda each: each.children)
    needed = {each for each in around if each.differentiable}
    return reached(needed.intersection(read), lambda each: needed.intersection(each.parents))


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


def _is_of_module(product: MatrixProduct, op: str, owner: str) -> bool:
    """True for the product of an nn.MultiheadAttention or an nn.Conv2d, which are called as one."""
    attends = product.kind is GemmKind.ATTENTION and "multi_head" in op
    convolves = product.kind is GemmKind.CONVOLUTION and product.blocked is not None
    return attends or (convolves and product.weight == _weight_name(owner))


def _weight_name(module: str) -> str:
    return f"{module}.weight".lstrip(".")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _values(value: Any) -> Any:
    """Arguments with values for nodes."""
    return fx.node.map_arg(value, lambda node: node.meta.get("example_value"))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


def _history(constant: Operation) -> str:
    """History of a computed constant: `the Parameter 'w' by getitem`."""
    if constant.buffer is not None:
        return f"the buffer '{constant.buffer}', which is no Parameter"
    ops: list[str] = []
    step = constant
    while step.parents:
        ops.append(step.op)
        step = next((p for p in step.parents if p.parameter), step.parents[0])
    if step.parameter:
        return f"the Parameter '{step.parameter}' by {', '.join(reversed(ops[:3]))}"
    return f"the buffer '{step.buffer}'" if step.buffer else f"constants by {constant.op}"
