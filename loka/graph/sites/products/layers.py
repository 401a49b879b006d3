"""Layers that multiply matrices inside one call of torch: attention, convolutions, recurrent layers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from loka.graph.sites.products.matrix_product import Args, Kwargs, MatrixProduct, TensorOrigins, argument, product_of
from loka.graph.sites.site import GemmKind
from loka.graph.sites.sizes import Size, size_of

_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_CELLS = frozenset(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"))


def describe_attention(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    """F.scaled_dot_product_attention: K is the sum of both head widths, so that 2 M K N counts both products."""
    q, k, v = (argument(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
    m, length = size_of(q.shape[:-1]), k.shape[-2]
    width, width_v = q.shape[-1], v.shape[-1]
    terms = ((m, width, length), (m, length, width_v))
    reason = "scaled_dot_product_attention multiplies activations: no Parameter takes part"
    return MatrixProduct(GemmKind.ATTENTION, q, None, None, m, width + width_v, length, terms, reason)


def describe_multi_head(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    """F.multi_head_attention_forward, of (length, batch, width) or (length, width): projections and scores together."""
    q, k, v = (argument(args, kwargs, i, name) for i, name in enumerate(("query", "key", "value")))
    width = q.shape[-1]
    m, rows_k, rows_v, length = size_of(q.shape[:-1]), size_of(k.shape[:-1]), size_of(v.shape[:-1]), k.shape[0]
    projections = ((m, width, width), (rows_k, k.shape[-1], width), (rows_v, v.shape[-1], width), (m, width, width))
    terms = (*projections, (m, width, length), (m, length, width))
    n = 4 * width + 2 * length  # exact for self-attention
    reason = "nn.MultiheadAttention computes its projections and scores in one opaque call"
    return MatrixProduct(GemmKind.ATTENTION, q, None, None, m, width, n, terms, reason)


def describe_convolution(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    """A convolution of kernel size 1 with neither groups, stride nor padding: x @ weight.T over the channels.

    Other convolutions are None here: `other_terms` counts them.
    """
    x, weight = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
    spatial = weight.dim() - 2
    plain = {"stride": 1, "padding": 0, "groups": 1}
    given = (argument(args, kwargs, place, name) for place, name in ((3, "stride"), (4, "padding"), (6, "groups")))
    usual = all(_is_all(value, wanted) for value, wanted in zip(given, plain.values(), strict=True))
    if spatial < 1 or not usual or any(size != 1 for size in weight.shape[2:]):
        return None
    channels = x.dim() - spatial - 1
    rows = size_of(size for dim, size in enumerate(x.shape) if dim != channels)
    mkn = (rows, weight.shape[1], weight.shape[0])
    if spatial == 1 and x.dim() == 3 and origins(weight).parameter is not None:  # W @ x of each sample
        bias = argument(args, kwargs, 2, "bias")
        return product_of(GemmKind.CONVOLUTION, x, weight.squeeze(-1), origins(weight), mkn, bias)
    reason = "a convolution of kernel size 1, which LoKA does not replace: write it as nn.Linear over the channels"
    return MatrixProduct(GemmKind.CONVOLUTION, x, origins(weight).parameter, None, *mkn, (mkn,), reason)


def _is_all(value: Any, wanted: int) -> bool:
    """True if an argument is not given, or a number or numbers equal to `wanted`."""
    if value is None or isinstance(value, str):
        return value in (None, "valid", "same")
    return all(each == wanted for each in value) if isinstance(value, tuple | list) else bool(value == wanted)


def other_terms(name: str, args: Args, kwargs: Kwargs, out: Any) -> tuple[tuple[Size, Size, Size], ...]:
    """(M, K, N) of products that are no sites: convolutions, recurrent layers and others. () for other calls."""
    if name.startswith("conv") and len(args) > 1 and isinstance(out, Tensor):
        weight = args[1]
        if "transpose" in name:
            return ((size_of(args[0].shape), math.prod(weight.shape[1:]), 1),)
        return ((size_of(out.shape), math.prod(weight.shape[1:]), 1),)
    if name in _RECURRENT and isinstance(out, tuple):  # gates x (K + H) x H for each step, layer and direction
        steps = size_of(out[0].shape[:-1])
        weights = next((a for a in args if isinstance(a, list) and a and all(isinstance(w, Tensor) for w in a)), [])
        return tuple((steps, w.shape[1], w.shape[0]) for w in weights if w.dim() == 2)
    if name in _CELLS:
        return tuple((size_of(args[0].shape[:-1]), w.shape[1], w.shape[0]) for w in args[2:4])
    if name in ("grouped_mm", "scaled_mm", "scaled_grouped_mm"):
        return ((size_of(args[0].shape[:-1]), args[0].shape[-1], args[1].shape[-1]),)
    if name in ("chain_matmul", "linalg_multi_dot") and isinstance(out, Tensor):  # from the left
        parts = args[0] if isinstance(args[0], list | tuple) else args
        return tuple((parts[0].shape[0], part.shape[0], size_of(part.shape[1:])) for part in parts[1:])
    if name == "inner":
        a, b = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "other")
        return ((size_of(a.shape[:-1]), a.shape[-1], size_of(b.shape[:-1])),)
    if name == "bilinear":
        (n, k1, k2), rows = argument(args, kwargs, 2, "weight").shape, size_of(out.shape[:-1])
        return ((rows, k1, n * k2), (rows, k2, n))
    if name == "flex_attention":
        q, k, v = args[:3]
        m = size_of(q.shape[:-1])
        return ((m, q.shape[-1], k.shape[-2]), (m, k.shape[-2], v.shape[-1]))
    return ()
