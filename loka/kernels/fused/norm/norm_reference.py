"""What the generated kernels compute, in torch: their CPU implementation, and what they are checked against.

Everything is float32 inside, whatever the dtypes of the arguments. Sums over rows come as partial sums with one part,
(1, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.errors import InputError
from loka.kernels.fused.norm.activations import activated, gradient_of, gradient_past
from loka.kernels.fused.norm.norms import Normalised, norm_of, normalised_by
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import AMAX_FLOOR, FORMATS, Quantized, quantize, round_up_to_power_of_two
from loka.numerics.quantize import requantize_transpose as requantize_transpose_of


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward's float32 result (M, width) and the statistics of its norm (M,); they are empty where it has none.

    `kept` (M, width) is what the norm took.
    """

    y: Tensor
    mean: Tensor
    rstd: Tensor
    kept: Tensor


@dataclass(frozen=True, slots=True)
class Backward:
    """Gradients in float32: of x (M, width), and of weight, bias and add, summed over all rows (1, width).

    `weight` and `bias` are those of a norm that had them (weight is empty without a norm). `sum` (M, width) is the
    gradient of what the norm took, `multiplier` (M, width) that of the multiplier (empty without one).
    """

    x: Tensor
    weight: Tensor
    bias: Tensor
    add: Tensor
    sum: Tensor
    multiplier: Tensor


def norm_forward(
    x: Tensor,
    *,
    add: Tensor | None = None,
    times: Tensor | None = None,
    residual: Tensor | None = None,
    norm: str | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    block: int = 256,
    multiplier: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Forward:
    """x (M, width) -> [+ add] -> [* times] -> [+ residual] -> [norm] -> [activation] -> [* multiplier] -> [dropout].

    add, weight, bias (width,); times, residual, multiplier, mask (M, width). The norm is over the width. A block_norm
    is an rms_norm of each `block` neighbours in a row; it has no weight, no bias and saves nothing.
    """
    x = x.float()
    if add is not None:
        x = x + add.float()
    if times is not None:
        x = x * times.float()
    if residual is not None:
        x = x + residual.float()
    kept = x
    mean = rstd = x.new_empty(0)
    if norm is not None:
        traits = norm_of(norm)
        normed = traits.forward(x, eps, block)
        mean, rstd = normed.mean, normed.rstd if traits.saved else rstd
        x = _affine(normed.n, weight, bias)
    y = activated(x, activation, kept)
    y = _dropped(y if multiplier is None else y * multiplier.float(), mask, dropout)
    return Forward(y, mean, rstd, kept)


def norm_backward(
    grad: Tensor,
    *,
    residual_grad_in: Tensor | None = None,
    x: Tensor | None = None,
    add: Tensor | None = None,
    times: Tensor | None = None,
    norm: str | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    mean_dn: Tensor | None = None,
    mean_dn_n: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    block: int = 256,
    multiplier: Tensor | None = None,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Backward:
    """The gradient of `norm_forward`: grad (M, width) is its result's; the others as it had or gave them.

    x is its input where `add` is given too, or nothing was done to it before the norm; else what it kept.
    `residual_grad_in` (M, width) is a further gradient of what it kept. A norm that saves no statistics finds them from
    x and eps; one over columns is given the means of columns (width,), if the gradient goes through its statistics.
    Raises InputError where a norm or an activation lacks x, or a norm its statistics.
    """
    grad = _dropped(grad.float(), mask, dropout)
    product_grad, dmultiplier = grad, grad.new_empty(0)
    grad = grad if multiplier is None else grad * multiplier.float()
    dz, dweight = grad, grad.new_empty(0)
    dbias = dz.sum(0, keepdim=True)
    dsum = dz
    if norm is not None or activation is not None:
        if x is None:
            raise InputError("norm_backward: a norm or an activation needs x, the forward's input")
        z = x.float() if add is None else x.float() + add.float()
        if norm is None:
            y, dsum = z, gradient_of(dz, z, activation, z)
            dbias = dsum.sum(0, keepdim=True)
        else:
            normed = _normalised_again(z, norm, mean, rstd, eps, block)
            y = _affine(normed.n, weight, bias)
            dz = gradient_of(dz, y, activation, z)
            dweight, dbias = (dz * normed.n).sum(0, keepdim=True), dz.sum(0, keepdim=True)
            dn = dz if weight is None else dz * weight.float()
            if mean_dn is not None and mean_dn_n is not None:
                dn = dn - mean_dn - normed.n * mean_dn_n
            dsum = norm_of(norm).gradient(dn, normed, eps, block) + gradient_past(grad, y, activation)
        dmultiplier = product_grad * activated(y, activation, z) if multiplier is not None else dmultiplier
    if residual_grad_in is not None:
        dsum = dsum + residual_grad_in.float()
    dx = dsum if times is None else dsum * times.float()
    return Backward(dx, dweight, dbias, dx.sum(0, keepdim=True), dsum, dmultiplier)


def _normalised_again(
    x: Tensor, norm: str, mean: Tensor | None, rstd: Tensor | None, eps: float, block: int
) -> Normalised:
    """What a norm made of x, by the statistics that its forward saved, if it saves any."""
    traits = norm_of(norm)
    if not traits.saved:
        return traits.forward(x, eps, block)
    if rstd is None or ("mean" in traits.saved and mean is None):
        raise InputError(f"norm_backward: {norm} needs the statistics that the forward saved")
    return normalised_by(x, mean, rstd)


def products(
    plain: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor, Tensor | None]], dtype: torch.dtype
) -> Tensor:
    """The sum of matrices (M, width), and of grad * (x + add) for each pair; add (width,) or None."""
    terms = [matrix.float() for matrix in plain]
    for grad, x, add in pairs:
        terms.append(grad.float() * (x.float() if add is None else x.float() + add.float()))
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.to(dtype)


def quantize_rows(y: Tensor, format: str = "e4m3", power_of_two: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Rows (M, width) in FP8, one scale each: values (M, width), scale (M, 1), scale_max (1,).

    `scale_max` is the largest scale, zero without rows.
    """
    rows = quantize(y, format=Format(format), scaling=Scaling.ROWWISE, power_of_two=power_of_two)
    scale_max = rows.scale.amax().view(1) if y.shape[0] else rows.scale.new_zeros(1)
    return rows.values, rows.scale, scale_max


def quantize_blocks(y: Tensor, format: str = "e4m3", power_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """Rows (M, width) in FP8, a scale for each 128 neighbours: values (M, width), scale (M, ceil(width / 128))."""
    blocks = quantize(y, format=Format(format), scaling=Scaling.BLOCKWISE_1X128, power_of_two=power_of_two)
    return blocks.values, blocks.scale


def quantize_static(y: Tensor, scale: Tensor, format: str = "e4m3") -> tuple[Tensor, Tensor, Tensor]:
    """A matrix (M, width) in FP8 under a scale (1, 1), float32, that is given.

    Returns values (M, width); amax (1,), the largest finite magnitude, zero where there is none; overflow (1,), int32,
    how many finite elements were above the format's maximum at this scale: these are that maximum now.
    """
    y = y.float()
    info = FORMATS[Format(format)]
    quotient = y / scale.view(1, 1)
    finite = y.isfinite()
    overflow = (finite & (quotient.abs() > info.max)).sum(dtype=torch.int32).view(1)
    values = torch.where(finite, quotient.clamp(-info.max, info.max), torch.nan).to(info.dtype)
    return values.contiguous(), largest_magnitude(y), overflow


def quantize_static_counted(y: Tensor, scale: Tensor, overflow_stats: Tensor, format: str = "e4m3") -> Tensor:
    """`quantize_static`, which adds amax and overflow to overflow_stats (2,) int64 of the caller: values (M, width).

    overflow_stats[0] counts what was above the format's maximum at this scale, in all calls; overflow_stats[1] has the
    bits of the largest magnitude of them all.
    """
    values, amax, overflow = quantize_static(y, scale, format)
    overflow_stats[0] += overflow[0]
    overflow_stats[1] = torch.maximum(overflow_stats[1], amax.view(torch.int32)[0])
    return values


def quantize_tensor(
    y: Tensor, maxima: Tensor, format: str = "e4m3", power_of_two: bool = True
) -> tuple[Tensor, Tensor]:
    """A matrix (M, width) in FP8 under one scale, that of the largest of `maxima` (Q,): values, scale (1, 1)."""
    info = FORMATS[Format(format)]
    amax = maxima.amax() if maxima.numel() else maxima.new_zeros(())
    scale = amax.clamp(min=AMAX_FLOOR).view(1, 1) / info.max
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    return quantize_static(y, scale, format)[0], scale


def largest_magnitude(y: Tensor) -> Tensor:
    """The largest finite magnitude of a matrix, (1,) float32; zero where there is none."""
    if y.numel() == 0:
        return y.new_zeros(1, dtype=torch.float32)
    return y.float().abs().nan_to_num(0.0, 0.0, 0.0).amax().view(1)


def requantize_transpose(values: Tensor, scale: Tensor, of_the_batch: bool = False) -> tuple[Tensor, Tensor]:
    """`numerics.requantize_transpose`: values (R, C) and scale (R, 1) -> values (C, R) and scale (C, 1).

    Of the batch, the result has zeros behind, up to a multiple of 16 columns.
    """
    transposed = requantize_transpose_of(Quantized(values, scale))
    if not of_the_batch:
        return transposed.values, transposed.scale
    missing = -values.shape[0] % 16
    padded = torch.nn.functional.pad(transposed.values.view(torch.uint8), (0, missing)).view(values.dtype)
    return padded.contiguous(), transposed.scale


def transpose(values: Tensor) -> Tensor:
    """A copy (C, R) of values (R, C) of FP8."""
    return values.t().clone(memory_format=torch.contiguous_format)


def reduce(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums of partial sums: (P, N) float32 -> (N,) of `dtype`."""
    return partial.sum(0).to(dtype)


def _dropped(y: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """y where a mask has no zeros, divided by the share of what stays, as torch's dropout."""
    return y if mask is None else torch.where(mask != 0, y * (1.0 / (1.0 - dropout)), 0.0)


def _affine(n: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    z = n if weight is None else n * weight.float()
    return z if bias is None else z + bias.float()
