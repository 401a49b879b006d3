"""The graph of operations of one forward: what it called, and the operations before and after a GEMM in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from loka.sites.site import GemmKind
from loka.sites.symbolic_inputs import Size

DEPTH = 4  # neighbours recorded on each side

_SAME: dict[str, str] = {
    "concat": "cat",
    "concatenate": "cat",
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "rsub": "sub",
    "radd": "add",
    "rmul": "mul",
    "rdiv": "div",
    "rtruediv": "div",
    "rpow": "pow",
    "iadd": "add",
    "isub": "sub",
    "imul": "mul",
    "idiv": "div",
    "itruediv": "div",
    "rmatmul": "matmul",
}
_VIEWS = frozenset(
    (
        *("view", "view_as", "reshape", "reshape_as", "unsqueeze", "squeeze", "flatten", "unflatten", "ravel"),
        *("transpose", "t", "T", "mT", "H", "mH", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"),
        *("expand", "expand_as", "broadcast_to", "getitem", "narrow", "select", "as_strided", "contiguous"),
        *("chunk", "split", "unbind", "split_with_sizes", "tensor_split", "alias", "data", "detach", "clone"),
        *("to", "type", "type_as", "float", "half", "bfloat16", "double", "requires_grad"),
    )
)


@dataclass(slots=True, eq=False)
class Node:
    """One result of one operation."""

    op: str  # "silu", "cat", "input", "parameter", ...
    parents: tuple[Node, ...] = ()
    constant: bool = False  # depends only on parameters, buffers and constants
    gemm: bool = False
    parameter: str | None = None  # the qualified name, if this is a Parameter or a part of one
    whole: Any = None  # of such: the name and the shape of the Parameter, and the Index of the part
    copies: bool = False  # the matrix of its one parent, perhaps transposed, for each sample
    rows: bool = False  # a view with the rows of its parent, in their order
    folded: bool = False  # a product's rows as several dimensions, by a Parameter of more than two
    buffer: str | None = None
    children: list[Node] = field(default_factory=list)
    layout: Any = None  # a FakeLayout of `loka.sites.fake_outputs`
    owner: str = ""  # qualified name of the module whose forward computes it

    @property
    def view(self) -> bool:
        """True if it has the same values in another shape or dtype."""
        return self.op in _VIEWS


_RESHAPES = frozenset(("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten"))
# Of the second tensor of these, only the sizes or the dtype are read.
LIKE_ANOTHER = frozenset(("expand_as", "view_as", "reshape_as", "type_as"))
# What ends a region in training: statistics of the whole batch, and random numbers.
BOUNDARIES = frozenset(("batch_norm", "dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d"))


def op_name(func: Callable[..., Any]) -> str:
    """The torch function's own name: "add" for Tensor.__add__, __radd__ and add_ alike."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    if "." in name:  # an OpOverload: "mm.default"
        name = name.split(".")[0]
    name = name.strip("_")
    return _SAME.get(name, name)


def is_idle_dropout(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for a dropout of p = 0, which returns its input itself; p is a plain number."""
    if func is not torch.nn.functional.dropout:
        return False
    p = kwargs.get("p", args[1] if len(args) > 1 else None)
    return isinstance(p, int | float) and p == 0


def is_idle(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], out: object) -> bool:
    """True for what returns its input as it is: a dropout of p = 0, a flatten that leaves all dimensions."""
    if is_idle_dropout(func, args, kwargs):
        return True
    same = isinstance(out, Tensor) and bool(args) and isinstance(args[0], Tensor) and out.dim() == args[0].dim()
    return same and op_name(func) == "flatten"


def simpler_name(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: object) -> str:
    """The view that an operation is on the sizes of its operands: "squeeze" for `x.sum(1)` of (B, 1, d); else its name.

    A stack of one tensor is an "unsqueeze", a concatenation of one and an `expand` to the same shape an "alias". Such
    sums keep the rows, too, where they keep the dimension. A sum over the last dimension that keeps it is a "mean", as
    in a norm that divides by the width itself.
    """
    first = args[0] if args else None
    if name in ("stack", "cat") and isinstance(first, tuple | list) and len(first) == 1:
        return "unsqueeze" if name == "stack" else "alias"
    if not isinstance(first, Tensor) or not isinstance(out, Tensor):
        return name
    if name in ("expand", "expand_as", "broadcast_to", "view_as", "reshape_as") and _same_sizes(first, out):
        return "alias"
    given = args[1] if len(args) > 1 else kwargs.get("dim")
    places = given if isinstance(given, tuple | list) else (given,)
    if name in ("sum", "mean") and all(type(place) is int and _is_one(first, place) for place in places):
        return "squeeze"
    return "mean" if name == "sum" and places in ((-1,), (first.dim() - 1,)) and out.dim() == first.dim() else name


def keeps_rows(name: str, args: Sequence[Any], out: object) -> bool:
    """True for a view that has the rows of a tensor in their order, whatever the dimensions before the last."""
    first = args[0] if args else None
    if name not in _RESHAPES or not isinstance(first, Tensor) or not isinstance(out, Tensor):
        return False
    return bool(first.dim() and out.dim()) and _same_size(first.shape[-1], out.shape[-1])


def _is_one(tensor: Tensor, place: int) -> bool:
    return -tensor.dim() <= place < tensor.dim() and type(tensor.shape[place]) is int and tensor.shape[place] == 1


def _same_sizes(one: Tensor, other: Tensor) -> bool:
    return one.dim() == other.dim() and all(map(_same_size, one.shape, other.shape))


def _same_size(one: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """True for equal numbers, or one symbol; a comparison of both would fix the symbol."""
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return type(one) is int and type(other) is int and one == other


CLAMPS = frozenset(("clamp", "clip", "clamp_min"))


def is_clamp_at_zero(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True for `x.clamp(min=0)` and `x.clamp_min(0)`, which are ReLUs; `args` are those after the tensor."""
    if name not in CLAMPS:
        return False
    bounds = dict(zip(("min", "max"), args, strict=False)) | dict(kwargs)
    least = bounds.get("min")
    return type(least) in (int, float) and least == 0 and bounds.get("max") is None


def fed_by(node: Node | None) -> tuple[str, ...]:
    """Operations that produce an input, nearest first; ends at a GEMM, at a fork of activations, or at the inputs."""
    return tuple(each.op for each in _before(node))


def followed_by(node: Node | None) -> tuple[str, ...]:
    """Operations that consume an output, nearest first; ends at a GEMM, or with the names of several consumers."""
    return tuple(each.op for each in _after(node))


def boundaries(source: Node | None, result: Node | None) -> tuple[str, str]:
    """The modules that run the first of BOUNDARIES in `fed_by` and in `followed_by`; "" where there is none."""
    sides = ((each.owner for each in nodes if each.op in BOUNDARIES) for nodes in (_before(source), _after(result)))
    before, after = (next(side, "") for side in sides)
    return before, after


def _before(node: Node | None) -> list[Node]:
    found: list[Node] = []
    while node is not None and not node.constant and node.op != "input" and len(found) < DEPTH:
        if not node.view:
            found.append(node)
        parents = [p for p in dict.fromkeys(node.parents) if not p.constant]
        node = None if node.gemm or len(parents) != 1 else parents[0]
    return found


def _after(node: Node | None) -> list[Node]:
    found: list[Node] = []
    while node is not None and len(found) < DEPTH:
        users = _consumers(node)
        found.extend({user.op: user for user in reversed(users)}[op] for op in dict.fromkeys(u.op for u in users))
        node = users[0] if len(users) == 1 and not users[0].gemm else None
    return found[:DEPTH]


def _consumers(node: Node) -> list[Node]:
    """The readers of a result, looking through views, in the order of the calls."""
    found: dict[Node, None] = {}
    waiting = list(reversed(node.children))
    while waiting:
        child = waiting.pop()
        if child.view:
            waiting.extend(reversed(child.children))
        else:
            found[child] = None
    return list(found)


def history(node: Node) -> str:
    """History of a computed constant: `Parameter 'w' by getitem`."""
    if node.buffer is not None:
        return f"the buffer '{node.buffer}', which is no Parameter"
    ops: list[str] = []
    step = node
    while step.parents:
        ops.append(step.op)
        step = next((p for p in step.parents if p.parameter), step.parents[0])
    if step.parameter:
        return f"the Parameter '{step.parameter}' by {', '.join(reversed(ops[:3]))}"
    return f"the buffer '{step.buffer}'" if step.buffer else f"constants by {node.op}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a GEMM. `module` is set for a plain nn.Linear and for attention: it names the site."""

    kind: GemmKind
    module: str | None
    owner: str
    weight: str | None
    bias: str | None
    m: Size
    k: Size
    n: Size
    terms: tuple[tuple[Size, Size, Size], ...]
    input_grad: bool
    source: Node | None  # node of the input
    result: Node
    file: str
    line: int
    blocked: str | None


TRANSFORMED = "products under torch.vmap or another transform of torch.func"


@dataclass(frozen=True, slots=True)
class Other:
    """A convolution or recurrent layer, which costs FLOPs and is not a site; or products that cannot be seen.

    `terms` are (M, K, N) of its products, () where these are not known.
    """

    op: str
    owner: str
    terms: tuple[tuple[Size, Size, Size], ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A call of a norm or an activation, with its owner and position; torch's own modules have no position."""

    op: str  # one of FUNCTIONS
    owner: str
    file: str
    line: int
    result: Node
