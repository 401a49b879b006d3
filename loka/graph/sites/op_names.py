"""The operations of a forward by name: "add" for `x + y`, `torch.add` and `x.add_(y)` alike, and what views are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_WRITING = frozenset(
    (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow)
)
FUNCTIONS = frozenset(("silu", "sigmoid", "layer_norm", "rms_norm"))  # functions that mods may replace
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
    "get_data_attr": "data",
}
VIEWS = frozenset(
    (
        *("view", "view_as", "reshape", "reshape_as", "unsqueeze", "squeeze", "flatten", "unflatten", "ravel"),
        *("transpose", "t", "T", "mT", "H", "mH", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"),
        *("expand", "expand_as", "broadcast_to", "getitem", "narrow", "select", "as_strided", "contiguous"),
        *("chunk", "split", "unbind", "split_with_sizes", "tensor_split", "alias", "data", "detach", "clone"),
        *("to", "type", "type_as", "float", "half", "bfloat16", "double", "requires_grad"),
    )
)


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


def writes_in_place(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """True for what writes into a tensor that is there: `add_`, `x[0] = y`, `x += y`, `out=`."""
    name = getattr(func, "__name__", "")
    method = name.endswith("_") and not name.endswith("__")
    return method or func is operator.setitem or func in _WRITING or kwargs.get("out") is not None


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
