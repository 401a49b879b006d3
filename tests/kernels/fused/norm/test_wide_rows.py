"""Rows that no program holds whole: how they are launched, and what is refused."""

from __future__ import annotations

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused import operators
from loka.kernels.fused.kernel_values import LARGEST_HELD, LARGEST_WIDTH
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norm_values import configuration
from loka.kernels.fused.quantization import Quantization
from loka.kernels.fused.rendering import render

LAYER_NORM = ("layer_norm", True, True, 1e-5, None, False)


def test_wide_and_held_rows_meet():
    held, wide = (render(NormForward(width, *LAYER_NORM, True, True)) for width in (16384, 16385))
    assert (held.operator.kernel, held.operator.launches[16384].chunk) == ("norm_forward", 0)
    assert (wide.operator.kernel, wide.operator.launches[16385].chunk) == ("wide_forward", 4096)


def test_chunks_hold_whole_blocks():
    for block in (2, 256, 2048, 16384):
        for spec in (
            NormForward(32768, "block_norm", False, False, 1e-5, None, False, True, True, block=block),
            NormBackward(32768, "block_norm", False, False, 1e-5, None, False, True, block=block),
        ):
            launched = configuration(spec)
            assert launched.chunk % block == 0
            assert launched.rows * launched.chunk <= 32 * 32 * launched.warps  # 32 elements a thread


def test_parts_of_rows_fill_the_device_and_no_more(monkeypatch):
    monkeypatch.setattr(operators, "multiprocessors", lambda device: 132)
    parts = {}
    for rows in (0, 1, 16, 17, 2048):
        x = torch.empty(rows, 24576, device="meta")
        on_gpu = type("OnGpu", (), {"shape": x.shape, "device": torch.device("cuda", 0)})()
        parts[rows] = operators.row_parts(on_gpu, rows=16, across=24, per_multiprocessor=3)
    assert parts == {0: 1, 1: 1, 16: 1, 17: 2, 2048: 16}
    assert operators.row_parts(torch.empty(2048, 24576), rows=16, across=24, per_multiprocessor=3) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NormForward(LARGEST_WIDTH + 1, *LAYER_NORM, True, True), f"rows have 1 to {LARGEST_WIDTH}"),
        (
            lambda: NormForward(LARGEST_HELD + 1, *LAYER_NORM, True, True, how=Quantization("blockwise")),
            "rowwise or static or maximum, not blockwise",
        ),
        (
            lambda: NormBackward(LARGEST_HELD + 1, *LAYER_NORM, True, how=Quantization("tensorwise")),
            "rowwise or static or maximum, not tensorwise",
        ),
        (
            lambda: NormForward(2**15, "block_norm", False, False, 1e-5, None, False, True, True, block=2**15),
            f"2 to {LARGEST_HELD}, not 32768",
        ),
    ],
)
def test_what_no_kernel_does_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
