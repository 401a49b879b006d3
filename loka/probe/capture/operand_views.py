"""Operands of y = x @ weight.T from the call of a torch function, as views of its arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.graph.sites.groups import group_equation
from loka.graph.sites.products.einsum import matrix_letters

IsWeight = Callable[[Any], bool]  # True if an argument is a site's Parameter or its transpose
View = Callable[[Tensor], Tensor]

_STEP = re.compile(r"\.(permute|movedim)\(([-\d, ]+)\)")


@dataclass(frozen=True, slots=True)
class OperandProduct:
    """One call that multiplies a site's Parameter. `weight` is the argument, (N, K) or (K, N)."""

    x: Tensor  # (..., K), a view, or the einsum of several operands: its rows are those of the matrix (M, K)
    weight: Tensor
    transposed: bool  # `weight` is (K, N)
    gradient: View  # of the output, as (..., N) with the rows of x in the same order; it references no tensor
    wide: int | None = None  # N, where the weight has more than two dimensions

    @property
    def k(self) -> int:
        """Columns of x."""
        return self.x.shape[-1]

    @property
    def n(self) -> int:
        """Columns of the output gradient."""
        return self.weight.shape[1 if self.transposed else 0] if self.wide is None else self.wide


def find_product(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: IsWeight
) -> OperandProduct | None:
    """The product of an input and a site's Parameter in a call; None for any other call."""
    parse = _PARSERS.get(function)
    return None if parse is None else parse(args, kwargs, is_weight)


def products_of_groups(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: IsWeight
) -> list[OperandProduct]:
    """The products of a call with a Parameter that holds a site's matrix for each group; [] for any other call.

    They are those of `loka.graph.sites.groups`.
    """
    if kwargs or (function is not torch.einsum and function not in _BATCHED):
        return []
    equation, operands = (args[0], args[1:]) if function is torch.einsum else ("", args)
    if len(operands) == 1 and isinstance(operands[0], tuple | list):
        operands = tuple(operands[0])
    which = [_holds_matrices(each, is_weight) for each in operands]
    if len(which) != 2 or sum(which) != 1 or (which[0] and not equation):
        return []
    first, rank = which[0], operands[which[0]].dim()
    found = group_equation(equation, rank, first) if equation else (max(rank - 3, 0), "")
    if found is None:
        return []
    (dim, one), weight, x = found, operands[not first], operands[first]
    if rank < 2 or (rank > 2 and x.shape[dim] != len(weight)):
        return []
    made = []
    for group, matrix in enumerate(weight.unbind()):
        part = x if rank == 2 else x.select(dim, group)
        pair = (matrix, part) if first else (part, matrix)
        product = _einsum((one, *pair), {}, is_weight) if one else _between(*pair, is_weight)
        if product is not None:
            made.append(replace(product, gradient=partial(_of_group, product.gradient, dim, group)))
    return made


def _holds_matrices(value: Any, is_weight: IsWeight) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and len(value) > 0 and is_weight(value[0])


def _of_group(view: View, dim: int, group: int, grad: Tensor) -> Tensor:
    return view(grad.select(dim, group))


def rows_of(x: Tensor) -> int:
    """Number of rows M of (..., C)."""
    return math.prod(x.shape[:-1])


def take_rows(x: Tensor, index: Tensor | None) -> Tensor:
    """Rows of (..., C) by index, as contiguous float32 (R, C); all rows if `index` is None. `x` is not copied."""
    if index is None:
        return x.reshape(-1, x.shape[-1]).float().contiguous()
    if x.dim() == 2:
        return x.index_select(0, index).float().contiguous()
    places: list[Tensor] = []
    for size in reversed(x.shape[1:-1]):
        places.append(index % size)
        index = index.div(size, rounding_mode="floor")
    rows: Tensor = x[(index, *reversed(places))]
    return rows.float().contiguous()


def column_amax(x: Tensor) -> Tensor:
    """The largest |x| of each column of (..., C), float32 (C,), in one pass; NaN and infinity propagate."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[-1], dtype=torch.float32)
    amax: Tensor = torch.linalg.vector_norm(x, math.inf, dim=tuple(range(x.dim() - 1)))
    return amax.float()


def _same(grad: Tensor) -> Tensor:
    return grad


def _as_row(grad: Tensor) -> Tensor:
    return grad.unsqueeze(0)


def _flipped(grad: Tensor) -> Tensor:
    return grad.transpose(-1, -2)


def _arg(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str) -> Any:
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _between(a: Any, b: Any, is_weight: IsWeight) -> OperandProduct | None:
    """a @ b with torch.matmul's rules for the dimensions; one operand is a Parameter."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or not a.dim() or not b.dim():
        return None
    left, right = is_weight(a), is_weight(b)
    if left == right:
        return None
    if right:
        x, view = (a.unsqueeze(0), _as_row) if a.dim() == 1 else (a, _same)
        return OperandProduct(x, b, True, view)
    x, view = (b.unsqueeze(0), _as_row) if b.dim() == 1 else (b.transpose(-1, -2), _flipped)
    return OperandProduct(x, a, False, view)


def _linear(args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: IsWeight) -> OperandProduct | None:
    x, weight = _arg(args, kwargs, 0, "input"), _arg(args, kwargs, 1, "weight")
    of_x, of_weight = is_weight(x), is_weight(weight)
    if of_x == of_weight or not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        return None
    if of_x:  # F.linear(P, x): (N, M)
        return None if weight.dim() != 2 else OperandProduct(weight, x, False, _flipped)
    return (
        OperandProduct(x.unsqueeze(0), weight, False, _as_row)
        if x.dim() == 1
        else OperandProduct(x, weight, False, _same)
    )


def _matmul(args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: IsWeight) -> OperandProduct | None:
    a = _arg(args, kwargs, 0, "input", "self", "tensor1")
    return _between(a, _arg(args, kwargs, 1, "other", "mat2", "vec", "tensor2"), is_weight)


def _rmatmul(args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: IsWeight) -> OperandProduct | None:
    return _between(args[1], args[0], is_weight)


def _addmm(args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: IsWeight) -> OperandProduct | None:
    a, b = _arg(args, kwargs, 1, "mat1", "mat"), _arg(args, kwargs, 2, "mat2", "vec")
    return _between(a, b, is_weight)


def _einsum(args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: IsWeight) -> OperandProduct | None:
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    which = [is_weight(operand) for operand in operands]
    if len(operands) != 2 or sum(which) != 1 or not isinstance(args[0], str):
        return None
    inputs, arrow, output = args[0].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:
        joined = "".join(terms)
        output = "".join(sorted(name for name in set(joined) if joined.count(name) == 1))
    side = which.index(True)
    if operands[side].dim() > 2:
        return _folded(terms[1 - side], terms[side], output, operands[1 - side], operands[side])
    views = einsum_views(terms[1 - side], terms[side], output)
    if views is None:
        return None
    x_view, transposed, out_view = views
    return OperandProduct(
        _apply(x_view, operands[1 - side]), operands[side], transposed, partial(_apply, _inverse(out_view))
    )


def _folded(of_x: str, of_weight: str, out: str, x: Tensor, weight: Tensor) -> OperandProduct | None:
    """An einsum by a Parameter of more dimensions, all of which is one matrix."""
    letters = matrix_letters(of_x, of_weight, out, weight.shape) if len(of_weight) == weight.dim() else None
    if letters is None or len(of_x) != x.dim():
        return None
    rest = "".join(c for c in of_x if c not in letters.contracted)
    sizes = dict(zip(of_weight, weight.shape, strict=True))
    wide = math.prod(sizes[c] for c in letters.free)
    columns, free = ("".join(c for c in of_weight if c in part) for part in (letters.contracted, letters.free))
    return OperandProduct(_joined(of_x, rest, columns)(x), weight, False, _joined(out, rest, free), wide)


def _joined(letters: str, rest: str, last: str) -> View:
    """The view of a tensor with the last letters as its last dimension."""
    order = [letters.index(c) for c in rest + last]
    return lambda tensor: tensor.permute(order).flatten(-len(last))


def _tensordot(args: tuple[Any, ...], kwargs: dict[str, Any], is_weight: IsWeight) -> OperandProduct | None:
    a, b, dims = args[0], args[1], _arg(args, kwargs, 2, "dims")
    left, right = is_weight(a), is_weight(b)
    views = None if left == right else tensordot_views(dims, left)
    if views is None:
        return None
    x_view, transposed, out_view = views
    x, weight = (b, a) if left else (a, b)
    return OperandProduct(_apply(x_view, x), weight, transposed, partial(_apply, _inverse(out_view)))


def _apply(view: str, tensor: Tensor) -> Tensor:
    """Applies a view from `einsum_views` or `tensordot_views`: none, or one permute or movedim."""
    found = _STEP.fullmatch(view)
    if found is None:
        return tensor
    numbers = [int(number) for number in found[2].split(",")]
    return tensor.permute(numbers) if found[1] == "permute" else tensor.movedim(numbers[0], numbers[1])


def _inverse(view: str) -> str:
    found = _STEP.fullmatch(view)
    if found is None:
        return ""
    numbers = [int(number) for number in found[2].split(",")]
    if found[1] == "movedim":
        return f".movedim({numbers[1]}, {numbers[0]})"
    return f".permute({', '.join(str(numbers.index(place)) for place in range(len(numbers)))})"


_T = torch.Tensor
_aten = torch.ops.aten
_PARSERS: dict[Callable[..., Any], Callable[[tuple[Any, ...], dict[str, Any], IsWeight], OperandProduct | None]] = {
    **dict.fromkeys((F.linear, _aten.linear.default), _linear),
    **dict.fromkeys(
        (torch.matmul, torch.mm, torch.mv, torch.linalg.matmul, _T.matmul, _T.mm, _T.mv, _T.__matmul__), _matmul
    ),
    **dict.fromkeys((_aten.matmul.default, _aten.mm.default, _aten.mv.default), _matmul),
    _T.__rmatmul__: _rmatmul,
    **dict.fromkeys((torch.addmm, torch.addmv, _T.addmm, _T.addmm_, _T.addmv, _aten.addmm.default), _addmm),
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
}


_BATCHED = frozenset(
    (torch.bmm, _T.bmm, torch.matmul, _T.matmul, _T.__matmul__, _aten.bmm.default, _aten.matmul.default)
)


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
