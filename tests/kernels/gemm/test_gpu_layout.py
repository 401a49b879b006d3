"""Sizes and strides that the GPU's kernel wants, as far as they can be seen without a GPU."""

from __future__ import annotations

import pytest
import torch

from loka.devices.targets import DEFAULT
from loka.kernels.gemm import scaled_mm_operands
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import dequantize, expand_scale, quantize, scale_shape

LIMITS = DEFAULT.scaled_mm

SIZES = [(1, 13), (3, 128), (17, 479), (128, 384), (24, 640), (300, 512)]


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize("size", SIZES)
def test_padding_adds_zeros_at_the_end(size: tuple[int, int], format: Format) -> None:
    x = quantize(torch.randn(size), format=format, scaling=Scaling.ROWWISE).values
    padded = scaled_mm_operands.pad_operand(x, 16, 16)
    rows, columns = padded.shape
    assert rows % 16 == 0
    assert columns % 16 == 0
    assert rows - size[0] < 16
    assert columns - size[1] < 16
    assert padded.dtype is x.dtype
    assert padded.stride() == (columns, 1)
    values = padded.float()
    assert torch.equal(values[: size[0], : size[1]], x.float())
    values[: size[0], : size[1]] = 0
    assert (values == 0).all()


def test_what_fits_is_not_copied() -> None:
    x = torch.zeros(32, 48, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert scaled_mm_operands.pad_operand(x, 1, 16).data_ptr() == x.data_ptr()


def test_a_single_row_gets_the_stride_that_the_kernel_reads() -> None:
    x = torch.zeros(32, 1, dtype=torch.uint8).view(torch.float8_e4m3fn).t()
    assert x.is_contiguous()
    assert x.stride() == (1, 1)
    assert scaled_mm_operands.pad_operand(x, 1, 16).stride() == (32, 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scaling", sorted({Scaling(name) for pair in LIMITS.pairs for name in pair}))
def test_scales_keep_their_meaning_in_the_shape_and_strides_of_the_kernel(
    size: tuple[int, int], scaling: Scaling
) -> None:
    quantized = quantize(torch.randn(size), format=Format.E4M3, scaling=scaling)
    multiple = LIMITS.multiple(scaling)
    values = scaled_mm_operands.pad_operand(quantized.values, multiple, multiple)
    rows, columns = values.shape
    blocks = -(-columns // 128)
    first = scaled_mm_operands.first_scale(quantized.scale, scaling, rows)
    second = scaled_mm_operands.second_scale(quantized.scale, scaling, rows)
    back = first
    if scaling is Scaling.TENSORWISE:
        assert first.shape == second.shape == (1, 1)
    elif scaling is Scaling.ROWWISE:
        assert (first.shape, first.stride()) == ((rows, 1), (1, 1))
        assert (second.shape, second.stride()) == ((1, rows), (rows, 1))
        assert torch.equal(first, second.t())
    elif scaling is Scaling.BLOCKWISE_1X128:
        assert (first.shape, first.stride()) == ((rows, blocks), (1, rows))
    else:
        aligned = scaled_mm_operands.round_up(blocks, 4)
        assert (first.shape, first.stride()) == ((aligned, -(-rows // 128)), (1, aligned))
        back = first[:blocks].t()
    if scaling in LIMITS.precise_e4m3:
        assert (second.shape, second.stride()) == (first.shape, first.stride())
        assert torch.equal(second, first)
    assert back.shape == scale_shape(rows, columns, scaling)
    product = values.float() * expand_scale(back, rows, columns)
    assert torch.equal(product[: size[0], : size[1]], dequantize(quantized))
    assert (product[size[0] :] == 0).all()
