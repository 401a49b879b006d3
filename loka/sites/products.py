"""All torch functions that multiply matrices, as y = x @ weight.T with x of M x K and weight of N x K."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.sites.site import GemmKind
from loka.sites.symbolic_inputs import Size


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """Origin of an operand of a product."""

    parameter: str | None  # qualified name, if the operand is a Parameter or its transpose
    computed_from: str = ""  # "Parameter 'w' by getitem", "buffer 'mask'", or "" for an activation


class TensorOrigins(Protocol):
    """Function that gives the origin of a tensor."""

    def __call__(self, tensor: Tensor) -> TensorOrigin:
        """The origin of `tensor`."""


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """One call that multiplies matrices. `terms` are its (M, K, N), whose multiply-adds sum up to the call's."""

    kind: GemmKind
    x: Tensor | None
    weight: str | None
    bias: Tensor | None
    m: Size
    k: Size
    n: Size
    terms: tuple[tuple[Size, Size, Size], ...]
    blocked: str | None = None


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Describe = Callable[[Args, Kwargs, TensorOrigins], MatrixProduct | None]


def _arg(args: Args, kwargs: Kwargs, position: int, *names: str) -> Any:
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def size_of(shape: Any) -> Size:
    """The product of some dimensions."""
    total: Size = 1
    for dimension in shape:
        total = total * dimension
    return total


def unpatchable(weight: Tensor) -> str | None:
    """Reason why a Parameter cannot be an FP8 weight by itself; None where it can."""
    if weight.dim() != 2:
        return f"its weight has {weight.dim()} dimensions, not two"
    if not weight.dtype.is_floating_point:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return None if weight.layout == torch.strided else "its weight is sparse"


def _product(
    kind: GemmKind, x: Tensor, weight: Tensor, origin: TensorOrigin, mkn: tuple[Size, Size, Size], bias: Any = None
) -> MatrixProduct:
    """A product with a known weight operand."""
    blocked = unpatchable(weight)
    if blocked is None and not x.dtype.is_floating_point:
        blocked = f"its input is {str(x.dtype).removeprefix('torch.')}"
    return MatrixProduct(kind, x, origin.parameter, bias, *mkn, (mkn,), blocked)


def _between(kind: GemmKind, a: Tensor, b: Tensor, origins: TensorOrigins, bias: Any = None) -> MatrixProduct | None:
    """The product a @ b, with torch.matmul's rules for the dimensions."""
    if a.dim() == 0 or b.dim() == 0:
        return None
    k = a.shape[-1]
    rows = size_of(a.shape[:-1])
    columns: Size = b.shape[-1] if b.dim() > 1 else 1
    of_a, of_b = origins(a), origins(b)
    if of_b.parameter and not of_a.parameter and b.dim() == 2:
        return _product(kind, a, b, of_b, (rows, k, columns), bias)
    if of_a.parameter and not of_b.parameter and a.dim() == 2:
        batch = size_of(b.shape[:-2])
        return _product(kind, b, a, of_a, (batch * columns, k, a.shape[0]))
    batch = size_of(_broadcast(a.shape[:-2], b.shape[:-2]))
    mkn = (batch * (a.shape[-2] if a.dim() > 1 else 1), k, columns)
    return MatrixProduct(GemmKind.BMM, a, None, None, *mkn, (mkn,), _no_weight(of_a, of_b))


def _broadcast(a: Any, b: Any) -> list[Size]:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    lead = len(longer) - len(shorter)
    # A size of one is broadcast; symbolic sizes are never one here, so that no guard is installed.
    pairs = zip(longer[lead:], shorter, strict=True)
    return [*longer[:lead], *(q if _is_one(p) else p for p, q in pairs)]


def _is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def _no_weight(of_a: TensorOrigin, of_b: TensorOrigin) -> str:
    if of_a.parameter and of_b.parameter:
        return f"both operands are Parameters ('{of_a.parameter}', '{of_b.parameter}'): no input takes part"
    one = of_b if of_b.parameter or of_b.computed_from else of_a
    if one.parameter:
        return f"its weight '{one.parameter}' does not have two dimensions"
    if one.computed_from:
        return f"its weight is computed from {one.computed_from}"
    return "both operands are computed: no Parameter takes part"


def _linear(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    x, weight = _arg(args, kwargs, 0, "input"), _arg(args, kwargs, 1, "weight")
    bias = _arg(args, kwargs, 2, "bias")
    of_x, of_w = origins(x), origins(weight)
    if weight.dim() != 2:
        weight = weight.unsqueeze(0)
    mkn = (size_of(x.shape[:-1]), weight.shape[1], weight.shape[0])
    if of_w.parameter and not of_x.parameter:
        return _product(GemmKind.FUNCTIONAL_LINEAR, x, weight, of_w, mkn, bias)
    if of_x.parameter and x.dim() == 2 and not of_w.parameter and bias is None:
        return _product(GemmKind.FUNCTIONAL_LINEAR, weight, x, of_x, (mkn[2], mkn[1], mkn[0]))
    return MatrixProduct(GemmKind.BMM, x, None, None, *mkn, (mkn,), _no_weight(of_x, of_w))


def _matmul(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    b = _arg(args, kwargs, 1, "other", "mat2", "vec", "tensor2", "input2")
    return _between(GemmKind.MATMUL, _arg(args, kwargs, 0, "input", "self", "tensor1"), b, origins)


def _rmatmul(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    return _between(GemmKind.MATMUL, args[1], args[0], origins)


def _inner(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    a, b = _arg(args, kwargs, 0, "input"), _arg(args, kwargs, 1, "other")
    if b.dim() < 1 or a.dim() < 1:
        return None
    mkn = (size_of(a.shape[:-1]), a.shape[-1], size_of(b.shape[:-1]))
    return MatrixProduct(GemmKind.MATMUL, a, None, None, *mkn, (mkn,), "torch.inner is not rewritten: write F.linear")


def _addmm(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    bias = _arg(args, kwargs, 0, "input")
    a, b = _arg(args, kwargs, 1, "mat1", "batch1", "mat"), _arg(args, kwargs, 2, "mat2", "batch2", "vec")
    found = _between(GemmKind.ADDMM, a, b, origins)
    if found is None or found.kind is GemmKind.BMM:
        return found
    scaled = [name for name in ("beta", "alpha") if kwargs.get(name, 1) != 1]
    takes_bias = found.x is a and bias.dim() == 1 and origins(bias).parameter is not None
    blocked = found.blocked or (f"addmm with {scaled[0]}={kwargs[scaled[0]]}" if scaled else None)
    mkn = (found.m, found.k, found.n)
    return MatrixProduct(
        GemmKind.ADDMM, found.x, found.weight, bias if takes_bias else None, *mkn, found.terms, blocked
    )


def _einsum(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    if not args or not isinstance(args[0], str):
        return None
    operands = list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])
    equation = args[0].replace(" ", "")
    if len(operands) < 2:
        return None
    inputs, arrow, output = equation.partition("->")
    terms = _expand_ellipsis(inputs.split(","), operands)
    letters: dict[str, Size] = {}
    for term, operand in zip(terms, operands, strict=True):
        for c, s in zip(term, operand.shape, strict=True):
            if c not in letters or _is_one(letters[c]):  # a size of one is broadcast
                letters[c] = s
    if arrow:
        dots = "".join(sorted({c for term in terms for c in term if c.isdigit()}))
        output = output.replace("...", dots)
    else:
        joined = "".join(terms)
        output = "".join(c for c in sorted(set(joined)) if joined.count(c) == 1 or c.isdigit())
    return _einsum_product(terms, output, letters, operands, origins)


def _expand_ellipsis(terms: list[str], operands: list[Tensor]) -> list[str]:
    """Replace "..." by digits as letters for its dimensions, counted from the right as einsum aligns them."""
    widths = [o.dim() - len(t.replace("...", "")) if "..." in t else 0 for t, o in zip(terms, operands, strict=True)]
    return [t.replace("...", "0123456789"[max(widths) - w : max(widths)]) for t, w in zip(terms, widths, strict=True)]


def _einsum_product(
    terms: list[str], output: str, letters: dict[str, Size], operands: list[Tensor], origins: TensorOrigins
) -> MatrixProduct:
    found = [origins(operand) for operand in operands]
    side = next((i for i, o in enumerate(found) if o.parameter), len(found) - 1)
    weight, rest = terms[side], "".join(t for i, t in enumerate(terms) if i != side)
    k = size_of(letters[c] for c in weight if c not in output)
    n = size_of(letters[c] for c in weight if c in output and c not in rest)
    m = size_of(letters[c] for c in dict.fromkeys(rest) if c in output)
    # Treated as one product over all letters; with more than two operands that is an upper bound.
    kept, summed = ([s for c, s in letters.items() if (c in output) is inside] for inside in (True, False))
    total = (size_of(kept), size_of(summed), 1)
    x = operands[1 - side] if len(operands) == 2 else operands[0 if side else 1]
    blocked = _einsum_blocked(terms, output, side, found)
    kind = GemmKind.EINSUM if found[side].parameter else GemmKind.BMM
    mkn = (m, k, n) if found[side].parameter else total
    if blocked is None and (reason := unpatchable(operands[side])):
        blocked = reason
    return MatrixProduct(kind, x, found[side].parameter, None, *mkn, (total,), blocked)


def _einsum_blocked(terms: list[str], output: str, side: int, found: list[TensorOrigin]) -> str | None:
    """Reason why an einsum is not a matrix product with one weight; None where it is."""
    text = f"einsum '{','.join(terms)}->{output}'"
    if len(terms) != 2:
        return f"{text} has {len(terms)} operands"
    weight, x = terms[side], terms[1 - side]
    if not found[side].parameter:
        return _no_weight(*found)
    if found[1 - side].parameter:
        return _no_weight(*found)
    if len(weight) != 2:
        return f"its weight has {len(weight)} dimensions, not two"
    contracted = [c for c in weight if c not in output]
    free = [c for c in weight if c in output]
    fits = len(contracted) == 1 and len(free) == 1 and contracted[0] in x and free[0] not in x
    fits = fits and all(c in output for c in x if c != contracted[0]) and len(set(x)) == len(x)
    return None if fits else f"{text} is not a matrix product with one weight"


def _tensordot(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    a, b, dims = args[0], args[1], _arg(args, kwargs, 2, "dims")
    if isinstance(dims, Tensor):
        return None
    over_a, over_b = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims or (range(-2, 0), range(2))
    in_a = {d % a.dim() for d in ([over_a] if isinstance(over_a, int) else over_a)}
    in_b = {d % b.dim() for d in ([over_b] if isinstance(over_b, int) else over_b)}
    k = size_of(a.shape[d] for d in in_a)
    free_a = size_of(s for d, s in enumerate(a.shape) if d not in in_a)
    free_b = size_of(s for d, s in enumerate(b.shape) if d not in in_b)
    of_a, of_b = origins(a), origins(b)
    x, weight, mkn = (b, of_a, (free_b, k, free_a)) if of_a.parameter else (a, of_b, (free_a, k, free_b))
    reason = _no_weight(of_a, of_b)
    if weight.parameter:
        reason = "torch.tensordot is not rewritten: write F.linear, @ or einsum"
    return MatrixProduct(
        GemmKind.MATMUL if weight.parameter else GemmKind.BMM, x, weight.parameter, None, *mkn, (mkn,), reason
    )


def _chain(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    """chain_matmul and multi_dot; the library chooses the order of multiplication, here it is from the left."""
    parts = list(args[0]) if isinstance(args[0], list | tuple) else list(args)
    if len(parts) < 2 or any(p.dim() != 2 for p in parts):
        return None
    terms = tuple((parts[0].shape[0], p.shape[0], p.shape[1]) for p in parts[1:])
    return MatrixProduct(
        GemmKind.BMM, parts[0], None, None, *terms[-1], terms, "a chain of matrix products in one call"
    )


def _bilinear(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    x1, _, weight = args[:3]
    rows = size_of(x1.shape[:-1])
    n, k1, k2 = weight.shape
    terms = ((rows, k1, n * k2), (rows, k2, n))
    return MatrixProduct(GemmKind.BMM, x1, None, None, rows, k1 * k2, n, terms, "its weight has 3 dimensions, not two")


def _attention(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    """F.scaled_dot_product_attention: K is the sum of both head widths, so that 2 M K N counts both products."""
    q, k, v = (_arg(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
    m, length = size_of(q.shape[:-1]), k.shape[-2]
    width, width_v = q.shape[-1], v.shape[-1]
    terms = ((m, width, length), (m, length, width_v))
    reason = "scaled_dot_product_attention multiplies activations: no Parameter takes part"
    return MatrixProduct(GemmKind.ATTENTION, q, None, None, m, width + width_v, length, terms, reason)


def _multi_head(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    """F.multi_head_attention_forward, of (length, batch, width) or (length, width): projections and scores together."""
    q, k, v = (_arg(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
    width = q.shape[-1]
    m, rows_k, rows_v, length = size_of(q.shape[:-1]), size_of(k.shape[:-1]), size_of(v.shape[:-1]), k.shape[0]
    projections = ((m, width, width), (rows_k, k.shape[-1], width), (rows_v, v.shape[-1], width), (m, width, width))
    terms = (*projections, (m, width, length), (m, length, width))
    n = 4 * width + 2 * length  # exact for self-attention
    reason = "nn.MultiheadAttention computes its projections and scores in one opaque call"
    return MatrixProduct(GemmKind.ATTENTION, q, None, None, m, width, n, terms, reason)


def _aten(*names: str) -> list[Callable[..., Any]]:
    return [getattr(torch.ops.aten, name).default for name in names]


_T = torch.Tensor
_FAMILIES: tuple[tuple[Describe, tuple[Callable[..., Any], ...]], ...] = (
    (_linear, (F.linear, *_aten("linear"))),
    (
        _matmul,
        (
            *(torch.matmul, torch.mm, torch.mv, torch.bmm, torch.linalg.matmul, _T.matmul, _T.mm, _T.mv, _T.bmm),
            *(_T.__matmul__, *_aten("matmul", "mm", "mv", "bmm")),
        ),
    ),
    (_rmatmul, (_T.__rmatmul__,)),
    (_inner, (torch.inner, _T.inner)),
    (
        _addmm,
        (
            *(torch.addmm, torch.addmv, torch.baddbmm, torch.addbmm, _T.addmm, _T.addmm_, _T.addmv, _T.baddbmm),
            *(_T.baddbmm_, _T.addbmm, *_aten("addmm", "baddbmm")),
        ),
    ),
    (_einsum, (torch.einsum,)),
    (_tensordot, (torch.tensordot,)),
    (_chain, (torch.chain_matmul, torch.linalg.multi_dot)),
    (_bilinear, (F.bilinear, torch.bilinear)),
    (_attention, (F.scaled_dot_product_attention,)),
    (_multi_head, (F.multi_head_attention_forward,)),
)
PRODUCTS: dict[Callable[..., Any], Describe] = {f: describe for describe, functions in _FAMILIES for f in functions}


def other_terms(name: str, args: Args, out: Any) -> tuple[tuple[Size, Size, Size], ...]:
    """(M, K, N) of convolutions and recurrent layers, which are notes and not sites. () for other calls."""
    if name.startswith("conv") and len(args) > 1 and isinstance(out, Tensor):
        weight = args[1]
        if "transpose" in name:
            return ((size_of(args[0].shape), math.prod(weight.shape[1:]), 1),)
        return ((size_of(out.shape), math.prod(weight.shape[1:]), 1),)
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and isinstance(out, tuple):
        steps = size_of(out[0].shape[:-1])
        weights = next((a for a in args if isinstance(a, list) and a and all(isinstance(w, Tensor) for w in a)), [])
        return tuple((steps, w.shape[1], w.shape[0]) for w in weights if w.dim() == 2)
    return ()
