"""Every combination of a norm kernel's parts and modes that there is, and why there are no others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from loka.errors import InputError
from loka.kernels.fused.matrix_kernels import CastTranspose
from loka.kernels.fused.norm.activations import ACTIVATIONS
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norms import NORMS
from loka.kernels.fused.quantization import SCALINGS, Quantization
from loka.numerics.enums import Format


def modes() -> list[Quantization]:
    """All that exist."""
    found = [
        Quantization(scaling, format, power)
        for scaling, format, power in itertools.product(SCALINGS[:4], Format, (True, False))
    ]
    return [*found, Quantization("maximum")]


@dataclass(frozen=True)
class Row:
    """One line of the table: a combination, and the refusal's words or None."""

    spec: NormForward | NormBackward | None
    refusal: str | None


def table(width: int) -> Iterator[Row]:
    """Norm x activation x weight and bias x quantized or not x mode x statistics saved, forward and backward."""
    affine = ((False, False), (True, False), (True, True))
    for norm, activation, (weight, bias) in itertools.product((None, *NORMS), (None, *ACTIVATIONS), affine):
        unquantized = ((False, Quantization()), (False, Quantization("static")))
        for quantize, how in (*unquantized, *((True, mode) for mode in modes())):
            parts = (width, norm, weight, bias, 1e-5, activation, False, quantize)
            for save in (False, True):
                yield row(partial(NormForward, *parts, save, how=how))
            yield row(partial(NormBackward, *parts, how=how))


def row(make: Callable[[], NormForward | NormBackward]) -> Row:
    """What comes of a combination."""
    try:
        return Row(make(), None)
    except InputError as error:
        return Row(None, str(error))


CAST_TRANSPOSES = [CastTranspose(how) for how in modes() if how.scaling in ("static", "tensorwise")]

# Parts that stand for all: no norm, each norm with what it can have, an activation that is not zero at zero.
PARTS = [
    (None, False, False, None),
    (None, False, False, "hardswish"),
    ("layer_norm", True, True, "sigmoid"),
    ("rms_norm", True, False, "silu"),
]
BLOCKS = [("block_norm", False, False, "hardswish"), ("block_norm", False, False, "gate_hardsigmoid")]


def specs(width: int, chosen: list[Quantization] | None = None) -> list[NormForward | NormBackward]:
    """Forward and backward of PARTS, and of BLOCKS where they fit, in each mode."""
    made: list[NormForward | NormBackward] = []
    for norm, weight, bias, activation in PARTS + (BLOCKS if width % 256 == 0 else []):
        for how in modes() if chosen is None else chosen:
            save = how.scaling != "maximum"
            made.append(NormForward(width, norm, weight, bias, 1e-5, activation, False, True, save, how=how))
            if norm or activation:
                made.append(NormBackward(width, norm, weight, bias, 1e-5, activation, False, True, how=how))
    return made


def plain(spec: NormForward | NormBackward) -> NormForward | NormBackward:
    """The same kernel without quantization."""
    return replace(spec, quantize=False, how=Quantization())


# norm, weight, bias, activation, add, times, residual
SUM_PARTS = [
    (None, False, False, None, True, True, True),
    ("layer_norm", True, True, "silu", True, False, True),
    ("block_norm", False, False, "hardswish", True, True, True),
]


def sum_specs(width: int) -> list[NormForward | NormBackward]:
    """Each part in each mode, with the sum kept and a gradient carried where the mode writes values."""
    made: list[NormForward | NormBackward] = []
    for how in modes():
        writes = how.scaling != "maximum"
        for norm, weight, bias, activation, add, times, residual in SUM_PARTS:
            if norm == "block_norm" and width % 256:
                continue
            affine = (width, norm, weight, bias, 1e-5, activation, add, True)
            made.append(NormForward(*affine, writes, times=times, residual=residual, keep=writes, how=how))
            sums = {"times": times, "summed": norm is not None, "residual_grad_in": True, "residual_grad_out": writes}
            made.append(NormBackward(*affine, **sums, how=how))
    return made
