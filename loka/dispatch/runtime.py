"""Functions that generated code calls in each step: dtypes under autocast, rows, and what is kept for the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka.dispatch.dispatch_errors import DtypeError
from loka.errors import Code, InputError

Weight = Tensor | tuple[Tensor, Tensor]  # a Parameter; or, frozen, FP8 values and their scales


def output_dtype(x: torch.Tensor, *weights: torch.Tensor) -> torch.dtype:
    """Dtype of F.linear's result for an input `x`: autocast's under torch.autocast, otherwise that of `x`.

    Like autocast itself, it keeps float64. Safe under torch.compile, which guards on the autocast state.

    Raises DtypeError, as torch raises a RuntimeError, if the dtypes of `x` and of `weights` differ without autocast, or
    if `x` is not floating-point; and InputError for tensors that no row kernel reads (`refuse_unusual`).
    """
    refuse_unusual(x, weights)
    device = x.device.type
    dtype = x.dtype
    if dtype != torch.float64 and dtype.is_floating_point and _autocasts(device):
        return torch.get_autocast_dtype(device)
    for weight in weights:
        if weight.dtype != dtype:
            raise DtypeError(
                f"an input and a weight must have the same dtype, but got {dtype} and {weight.dtype}: convert one of "
                "them, or run the model under torch.autocast",
                Code.CALL,
            )
    if not dtype.is_floating_point:
        raise DtypeError(f"a linear layer takes floating-point numbers, not {dtype}: convert its input", Code.CALL)
    return dtype


def joined_dtype(*added: torch.Tensor) -> torch.dtype:
    """Dtype of a norm of the sum or concatenation of these: the promoted dtype.

    Under torch.autocast on a GPU it is float32, as a LayerNorm's there, except for float64. On a CPU autocast leaves
    norms alone.
    """
    dtype, device = added[0].dtype, added[0].device.type
    for other in added[1:]:
        dtype = torch.promote_types(dtype, other.dtype)
    if dtype != torch.float64 and device == "cuda" and _autocasts(device):
        return torch.float32
    return dtype


def _autocasts(device: str) -> bool:
    """True if torch.autocast is on for a device; always False for "meta", for which torch raises."""
    return device != "meta" and torch.is_autocast_enabled(device)


_KEEP = "or send its sites back to the model's own forward with patch.keep(SITE, ...)"


def refuse_unusual(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Raise InputError unless `x` is a plain dense tensor, and the same kind as `weights`; () for frozen weights.

    A few attribute reads in each call: what comes after would raise an error that does not name the cause.
    """
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else f"{x.layout}".removeprefix("torch.")
        raise InputError(
            f"a generated kernel reads dense tensors, and its input is {kind}: give it one tensor of all rows, {_KEEP}",
            Code.CALL,
        )
    for weight in weights:
        if type(weight).__name__ == "DTensor" and type(x).__name__ != "DTensor":  # importing its class takes long
            raise InputError(
                f"a weight of shape {tuple(weight.shape)} is sharded and its input is not: a module that belongs to a "
                "generated forward became an FSDP unit of its own after apply (patch.verify() names it): shard the "
                "module around it instead, or name it under `units` in the policy and generate again",
                Code.CALL,
            )
    if not weights or torch.compiler.is_compiling():
        return
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        raise InputError(
            "generated kernels have no rules for torch.func (vmap, grad, vjp, jvp, jacrev) and forward-mode gradients: "
            f"use torch.autograd, call patch.remove() before, {_KEEP}",
            Code.CALL,
        )


def without_elements(x: torch.Tensor, width: int, out: int, dtype: torch.dtype) -> torch.Tensor:
    """Result (..., out) of linears for an input (..., width) that has no elements.

    Raises InputError if the input ends in another width, as torch raises a RuntimeError.
    """
    _check_width(x, width)
    return x.new_zeros((*x.shape[:-1], out), dtype=dtype)


def _check_width(x: Tensor, width: int) -> None:
    if x.shape[-1:] != (width,):
        raise InputError(
            f"a kernel for rows of {width} elements got an input of shape {tuple(x.shape)}: give it that width, or, if "
            "the model is not the one that the package was generated for, generate it again",
            Code.CALL,
        )


def _rows(x: Tensor, width: int) -> Tensor:
    """x (..., width) as a matrix of a known width.

    Dynamo must know it before an autograd function: of torch 2.11 it fails where a size becomes known inside of one.
    """
    _check_width(x, width)
    return x.reshape(-1, width)


def without_rows(
    k: int, n: int, dtype: torch.dtype, matrices: Sequence[Tensor], parameters: Sequence[Tensor]
) -> Tensor:
    """Result (..., n) of a chain for x (..., k), the first of `matrices`, without elements; all gradients are zeros.

    Raises InputError as `without_elements`.
    """
    y: Tensor = _WithoutRows.apply(without_elements(matrices[0], k, n, dtype), *matrices, *parameters)  # type: ignore[no-untyped-call]
    return y


class _WithoutRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Tensor) -> Tensor:
        y, *inputs = arguments  # a named y might make as many parameters as arguments, and Dynamo leaves out ctx then
        ctx.save_for_backward(*inputs)
        return y.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *map(torch.zeros_like, ctx.saved_tensors)


def linear(function: Any, x: Tensor, weight: Weight, bias: Tensor | None, counter_id: int) -> Tensor:
    """torch.nn.functional.linear by a generated autograd function: x (..., K), weight (N, K), bias (N,) -> (..., N).

    A frozen weight gives no gradients: the function's `product` alone runs. GEMMs count under `counter_id` and the next
    two. Raises DtypeError and InputError as `output_dtype` and `without_elements`.
    """
    if isinstance(weight, tuple):
        n, k = weight[0].shape
        dtype = output_dtype(x)
        if is_empty(x):
            return without_elements(x, k, n, dtype)
        y: Tensor = function.product(_rows(x, k), *weight, dtype, counter_id)
    else:
        if is_empty(x):
            return F.linear(x, weight, bias)
        n, k = weight.shape
        dtype = output_dtype(x, weight)
        y = function.apply(_rows(x, k), weight, dtype, counter_id)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.reshape(*x.shape[:-1], n)


def is_empty(x: torch.Tensor) -> bool:
    """True for a tensor without elements.

    False where a graph is traced and the number of elements comes from data: the kernels and GEMMs take none as well.
    """
    if not torch.compiler.is_compiling():
        return x.numel() == 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # takes half a second, for sympy

    return guard_or_false(x.numel() == 0)


def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """The tensors saved by forward, released by `ctx`, so that backward can free them before it returns.

    With one function for each layer, autograd frees them layer by layer; a chain of layers must do so itself. `ctx`
    keeps them if the graph is retained (retain_graph), and under torch.compile, which frees each after its last use.
    """
    tensors: tuple[Tensor, ...] = ctx.saved_tensors
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
    return tensors


def reduced(
    reduce: Callable[..., list[Tensor]], partials: Sequence[Tensor], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    """Column sums (N,) of partial sums, each (P, N) float32, in their dtypes: a call of `reduce` for each dtype."""
    totals = list(partials)
    for dtype in dict.fromkeys(dtypes):
        places = [place for place, of_one in enumerate(dtypes) if of_one is dtype]
        for place, total in zip(places, reduce([partials[place] for place in places], dtype), strict=True):
            totals[place] = total
    return totals
