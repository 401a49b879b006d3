"""Error of a result against a reference: MERE and SQNR, computed in float64.

MERE, the mean element-wise relative error, is mean(|out - ref| / max(|ref|, floor)). Without a floor the reference's
elements near zero dominate it, so the floor is FLOOR times the reference's root mean square, and the share of elements
below it is reported. SQNR is 10 log10(sum ref^2 / sum (out - ref)^2), in dB.

A result with non-finite elements has MERE = inf and SQNR = -inf, never NaN, so that it fails every error budget. A
non-finite reference is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from loka.errors import InputError

FLOOR = 1e-3  # relative to the reference's root mean square


@dataclass(frozen=True, slots=True)
class Mere:
    """Mean element-wise relative error, and the share of elements that were floored."""

    value: float
    floored: float  # share of elements with |ref| below the floor, 0 to 1


def mere(out: Tensor, ref: Tensor, floor: float = FLOOR) -> Mere:
    """Mean element-wise relative error of out against ref (same shape), |ref| floored at `floor` x RMS(ref).

    For an all-zero reference, the error is 0 if out is all zero too, and infinite if not. Raises InputError on shapes
    that differ, no elements, a reference that is not finite, or a negative floor.
    """
    if not (math.isfinite(floor) and floor >= 0.0):
        raise InputError(f"MERE: the floor must be a finite number, zero or above, not {floor}")
    out, ref = _check("MERE", out, ref)
    magnitude = ref.abs()
    least = floor * float(ref.square().mean().sqrt())
    floored = float((magnitude < least).double().mean())
    if not bool(out.isfinite().all()):
        return Mere(math.inf, floored)
    error = (out - ref).abs()
    if not bool(magnitude.any()):
        return Mere(math.inf if bool(error.any()) else 0.0, 1.0)
    # with floor = 0, an exact zero of ref contributes 0 if out is zero there, and otherwise makes the mean infinite
    ratio = (error / magnitude.clamp(min=least)).nan_to_num(nan=0.0, posinf=math.inf)
    return Mere(float(ratio.mean()), floored)


def sqnr(out: Tensor, ref: Tensor) -> float:
    """Signal to quantization noise ratio of out against ref (same shape), dB; inf where they are equal.

    An all-zero reference with a result that is not zero has -inf. Raises InputError on shapes that differ, no
    elements, or a reference that is not finite.
    """
    out, ref = _check("SQNR", out, ref)
    if not bool(out.isfinite().all()):
        return -math.inf
    noise = float((out - ref).square().sum())
    signal = float(ref.square().sum())
    if noise == 0.0:
        return math.inf
    if signal == 0.0:
        return -math.inf
    return 10.0 * (math.log10(signal) - math.log10(noise))


def _check(metric: str, out: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """Return both as float64 without gradient; raise InputError where they cannot be compared."""
    if out.shape != ref.shape:
        raise InputError(f"{metric}: out has shape {tuple(out.shape)} and ref {tuple(ref.shape)}; they must be equal")
    if ref.numel() == 0:
        raise InputError(f"{metric}: nothing to compare, both tensors are empty (shape {tuple(ref.shape)})")
    out, ref = out.detach().double(), ref.detach().double()
    if not bool(ref.isfinite().all()):
        bad = int((~ref.isfinite()).sum())
        raise InputError(f"{metric}: {bad} of {ref.numel()} elements of ref are not finite; compare with a finite one")
    return out, ref
