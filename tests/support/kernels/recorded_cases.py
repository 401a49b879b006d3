"""Kernels under static scales that record what these do not hold, and plain transpositions: for their tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loka.kernels.fused.matrix_kernels import CastTranspose, Transpose
from loka.kernels.fused.norm.fused_cast_transpose import FusedCastTranspose
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantization import Quantization
from loka.numerics.enums import Format
from tests.support.kernels.quantized_cases import specs

HOWS = [
    Quantization("static", overflow_stats=True),
    Quantization("static", power_of_two=False, overflow_stats=True),
    Quantization("static", Format.E5M2, overflow_stats=True),
]
CAST_TRANSPOSES = [CastTranspose(how) for how in HOWS]
TRANSPOSES = [Transpose(count) for count in (1, 2, 3)]
_LOCAL = [(None, None, True), (None, "relu", True), (None, "hardswish", False), (None, "sigmoid", True)]
_BLOCKS = [
    ("block_norm", "hardswish", False),
    ("block_norm", None, True),
    ("block_norm", "silu", True),
    ("block_norm", "gate_sigmoid", True),
]
Recorded = NormForward | NormBackward | CastTranspose


def recorded(width: int) -> list[NormForward | NormBackward]:
    """Forward and backward kernels of a width, with and without norms and activations."""
    return specs(width, HOWS)


def fused_cast_transposes(width: int) -> list[FusedCastTranspose]:
    """Kernels that a tile is enough for, forward and backward."""
    found = []
    for norm, activation, add in _LOCAL + (_BLOCKS if width % 256 == 0 else []):
        for how in HOWS[:2]:
            parts = (width, norm, False, False, 1e-5, activation, add, True)
            found.append(FusedCastTranspose(NormForward(*parts, False, how=how)))
            found.append(FusedCastTranspose(NormBackward(*parts, how=how)))
    return found


def unrecorded(spec: Recorded) -> Recorded:
    """The same kernel, which returns amax and overflow."""
    return replace(spec, how=replace(spec.how, overflow_stats=False))


def scale_of(spec: Recorded, device: str = "cpu") -> Tensor:
    """A scale that some of a normal distribution's elements are too large for."""
    return torch.full((1, 1), 2.0**-9 if spec.how.power_of_two else 0.0021, device=device) * 448.0 / spec.how.limit


def new_record(device: str = "cpu") -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def largest_of(record: Tensor) -> float:
    return float(record[1:].to(torch.int32).view(torch.float32))
