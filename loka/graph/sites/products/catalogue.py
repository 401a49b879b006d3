"""All torch functions that multiply matrices, each with the function that describes a call of it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.graph.sites.op_names import FUNCTIONS, op_name
from loka.graph.sites.products.einsum import describe_einsum
from loka.graph.sites.products.layers import describe_attention, describe_convolution, describe_multi_head
from loka.graph.sites.products.matrix_product import (
    Args,
    Describe,
    Kwargs,
    MatrixProduct,
    TensorOrigins,
    argument,
    is_single,
    no_weight,
    product_of,
)
from loka.graph.sites.site import GemmKind
from loka.graph.sites.sizes import Size, is_one, size_of


def _between(kind: GemmKind, a: Tensor, b: Tensor, origins: TensorOrigins, bias: Any = None) -> MatrixProduct | None:
    """The product a @ b, with torch.matmul's rules for the dimensions."""
    if a.dim() == 0 or b.dim() == 0:
        return None
    k = a.shape[-1]
    rows = size_of(a.shape[:-1])
    columns: Size = b.shape[-1] if b.dim() > 1 else 1
    of_a, of_b = origins(a), origins(b)
    if of_b.parameter and not of_a.parameter and (b.dim() == 2 or ((of_b.copied or is_single(b)) and a.dim() == 3)):
        return product_of(kind, a, b, of_b, (rows, k, columns), bias)
    if of_a.parameter and not of_b.parameter and (a.dim() == 2 or (of_a.copied and b.dim() == 3)):
        batch = size_of(b.shape[:-2])
        return product_of(kind, b, a, of_a, (batch * columns, k, a.shape[-2]))
    fixed = of_a.fixed or of_b.fixed
    if not fixed and is_one(k):
        return None  # an outer product, which sums nothing
    batch = size_of(_broadcast(a.shape[:-2], b.shape[:-2]))
    above: Size = a.shape[-2] if a.dim() > 1 else 1
    if of_a.fixed and not of_b.fixed:  # W @ x: the rows of x.mT
        x, mkn = b, (batch * columns, k, above)
    else:
        x, mkn = a, (batch * above, k, columns)
    return MatrixProduct(GemmKind.BMM, x, None, None, *mkn, (mkn,), no_weight(a, b, origins))


def _broadcast(a: Any, b: Any) -> list[Size]:
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    lead = len(longer) - len(shorter)
    # A size of one is broadcast; symbolic sizes are never one here, so that no guard is installed.
    pairs = zip(longer[lead:], shorter, strict=True)
    return [*longer[:lead], *(q if is_one(p) else p for p, q in pairs)]


def _linear(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
    bias = argument(args, kwargs, 2, "bias")
    of_x, of_w = origins(x), origins(weight)
    if weight.dim() != 2:
        weight = weight.unsqueeze(0)
    mkn = (size_of(x.shape[:-1]), weight.shape[1], weight.shape[0])
    if of_w.parameter and not of_x.parameter:
        return product_of(GemmKind.FUNCTIONAL_LINEAR, x, weight, of_w, mkn, bias)
    if of_x.parameter and x.dim() == 2 and not of_w.parameter and bias is None:
        return product_of(GemmKind.FUNCTIONAL_LINEAR, weight, x, of_x, (mkn[2], mkn[1], mkn[0]))
    return MatrixProduct(GemmKind.BMM, x, None, None, *mkn, (mkn,), no_weight(x, weight, origins))


def _matmul(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    b = argument(args, kwargs, 1, "other", "mat2", "vec", "tensor2", "input2")
    return _between(GemmKind.MATMUL, argument(args, kwargs, 0, "input", "self", "tensor1"), b, origins)


def _addmm(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    bias = argument(args, kwargs, 0, "input")
    a, b = argument(args, kwargs, 1, "mat1", "batch1", "mat"), argument(args, kwargs, 2, "mat2", "batch2", "vec")
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


def _tensordot(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    a, b, dims = args[0], args[1], argument(args, kwargs, 2, "dims")
    if isinstance(dims, Tensor):
        return None
    over_a, over_b = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims or (range(-2, 0), range(2))
    in_a = {d % a.dim() for d in ([over_a] if isinstance(over_a, int) else over_a)}
    in_b = {d % b.dim() for d in ([over_b] if isinstance(over_b, int) else over_b)}
    k = size_of(a.shape[d] for d in in_a)
    free_a = size_of(s for d, s in enumerate(a.shape) if d not in in_a)
    free_b = size_of(s for d, s in enumerate(b.shape) if d not in in_b)
    of_a, of_b = origins(a), origins(b)
    if is_one(k) and not (of_a.fixed or of_b.fixed):
        return None  # an outer product
    x, weight, origin, mkn = (a, b, of_b, (free_a, k, free_b))
    if of_a.fixed and not of_b.fixed:
        x, weight, origin, mkn = (b, a, of_a, (free_b, k, free_a))
    if origin.parameter and not (of_a.parameter and of_b.parameter) and len(in_a) == len(in_b) == 1:
        return product_of(GemmKind.MATMUL, x, weight, origin, mkn)
    reason = no_weight(a, b, origins)
    if origin.parameter and not (of_a.parameter and of_b.parameter):
        reason = "torch.tensordot over several dimensions is not rewritten: write F.linear, @ or einsum"
    return MatrixProduct(GemmKind.BMM, x, None, None, *mkn, (mkn,), reason)


def _aten(*names: str) -> list[Callable[..., Any]]:
    return [getattr(torch.ops.aten, name).default for name in names]


_T = torch.Tensor
_FAMILIES: tuple[tuple[Describe, tuple[Callable[..., Any], ...]], ...] = (
    (_linear, (F.linear, *_aten("linear"))),
    (
        _matmul,
        (
            *(torch.matmul, torch.mm, torch.mv, torch.bmm, torch.linalg.matmul, _T.matmul, _T.mm, _T.mv, _T.bmm),
            *(operator.matmul, _T.__matmul__, *_aten("matmul", "mm", "mv", "bmm")),
        ),
    ),
    (
        _addmm,
        (
            *(torch.addmm, torch.addmv, torch.baddbmm, torch.addbmm, _T.addmm, _T.addmm_, _T.addmv, _T.baddbmm),
            *(_T.baddbmm_, _T.addbmm, *_aten("addmm", "baddbmm")),
        ),
    ),
    (describe_einsum, (torch.einsum,)),
    (_tensordot, (torch.tensordot,)),
    (describe_attention, (F.scaled_dot_product_attention,)),
    (describe_multi_head, (F.multi_head_attention_forward,)),
    (describe_convolution, (F.conv1d, F.conv2d, F.conv3d)),
)
PRODUCTS: dict[Callable[..., Any], Describe] = {f: describe for describe, functions in _FAMILIES for f in functions}


def has_place(func: Any) -> bool:
    """True for what is told with the line that calls it: products, and functions that mods may replace."""
    return func in PRODUCTS or (callable(func) and op_name(func) in FUNCTIONS)
