"""MXFP8 as `torch.nn.functional.scaled_mm` takes it on Blackwell and CDNA 4, on which no GPU of ours can run it.

A stand-in has torch's checks (aten/src/ATen/native/cuda/ScaledBlas.cpp) and reads the scales by their definition, one
at a time: cuBLAS documentation, "1D block scaling factors layout", and for AMD row by row. On random scales of (1, 1),
(129, 5), (300, 70) and (4096, 1024) torchao 0.17's `to_blocked` gave the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from loka.bench.record.gemm_parts import SCALED_MM, Gemms
from loka.devices.targets import DEVICES
from loka.errors import InputError
from loka.kernels import call_counters
from loka.kernels.gemm import scaled_mm, scaled_mm_operands
from loka.kernels.measurements.parts import Part, PartKind
from loka.numerics.enums import Accumulation, Format, Scaling
from loka.numerics.quantize import Quantized, quantize, reference_scaled_mm

MXFP8 = Scaling.BLOCKWISE_1X32
TARGETS = [name for name, device in DEVICES.items() if (MXFP8, MXFP8) in device.scaled_mm.pairs]
SIZES = [(1, 1, 1), (3, 17, 33), (130, 40, 479), (257, 129, 64), (128, 512, 4096)]  # rows, columns, contraction


def place(row: int, block: int, blocks: int) -> int:
    """Where the scale of a row's block lies in tiles of 128 x 4, with `blocks` of them a row."""
    tile = row // 128 * (-(-blocks // 4)) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def scales_read(scale: Tensor, rows: int, blocks: int, amd: bool) -> Tensor:
    """float32 scales (rows, blocks) as the hardware finds them."""
    if amd:
        assert scale.numel() == rows * blocks
        return scale.float().view(rows, blocks)
    assert scale.numel() == -(-rows // 128) * 128 * -(-blocks // 4) * 4
    flat = scale.float().view(-1)
    places = [[place(row, block, blocks) for block in range(blocks)] for row in range(rows)]
    return flat[torch.tensor(places)]


class Device:
    """torch's function on such a device: its checks, and the reference's product of what it reads."""

    def __init__(self, target: str) -> None:
        self.amd = DEVICES[target].triton[0] == "hip"
        self.dtypes: list[torch.dtype] = []

    def scaled_mm(self, a, b, scale_a, recipe_a, scale_b, recipe_b, **more) -> Tensor:
        assert recipe_a is recipe_b is ScalingType.BlockWise1x32
        wanted = SwizzleType.NO_SWIZZLE if self.amd else SwizzleType.SWIZZLE_32_4_4
        assert more["swizzle_a"] is more["swizzle_b"] is wanted
        assert not more["use_fast_accum"]
        assert more["bias"] is None
        self.dtypes.append(more["output_dtype"])
        (rows, contraction), columns = a.shape, b.shape[1]
        assert contraction == b.shape[0]
        assert a.stride() == (contraction, 1)
        assert b.stride() == (1, contraction)
        assert contraction % 32 == columns % 16 == 0
        if self.amd:
            assert rows % 32 == columns % 32 == 0
            assert more["output_dtype"] in (torch.bfloat16, torch.float16)
        for scale in (scale_a, scale_b):
            assert scale.dtype is torch.float8_e8m0fnu
            assert scale.is_contiguous()
        blocks = contraction // 32
        first, second = scales_read(scale_a, rows, blocks, self.amd), scales_read(scale_b, columns, blocks, self.amd)
        return reference_scaled_mm(a, first, b.t(), second, more["output_dtype"])


@pytest.fixture(params=TARGETS)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    found = Device(request.param)
    monkeypatch.setattr(F, "scaled_mm", found.scaled_mm)
    monkeypatch.setattr(scaled_mm, "has_fp8", lambda index: True)
    monkeypatch.setattr(scaled_mm_operands, "limits_of", lambda index: DEVICES[request.param].scaled_mm)
    scaled_mm._refusal.cache_clear()
    yield found
    scaled_mm._refusal.cache_clear()


def operands(rows: int, columns: int, contraction: int) -> tuple[Quantized, Quantized]:
    """Two matrices of every magnitude: their scales differ from block to block."""
    generator = torch.Generator().manual_seed(rows)
    made = []
    for size in (rows, columns):
        exponents = torch.randint(-12, 12, (size, contraction), generator=generator).float()
        x = torch.randn(size, contraction, generator=generator) * torch.exp2(exponents)
        made.append(quantize(x, format=Format.E4M3, scaling=MXFP8, power_of_two=True))
    return made[0], made[1]


def product(a: Quantized, b: Quantized, dtype: torch.dtype, numbers: int, bias: Tensor | None = None) -> Tensor:
    return scaled_mm._cuda(a.values, a.scale, b.values, b.scale, MXFP8, MXFP8, dtype, False, numbers, bias)


def test_there_are_such_targets() -> None:
    assert TARGETS == ["b200", "gb200", "mi350x"]


@pytest.mark.parametrize("size", SIZES)
def test_each_scale_is_where_the_device_reads_it(device: Device, size: tuple[int, int, int], numbers: int) -> None:
    a, b = operands(*size)
    found = product(a, b, torch.bfloat16, numbers)
    assert torch.equal(found, reference_scaled_mm(a.values, a.scale, b.values, b.scale, torch.bfloat16))
    assert found.is_contiguous()
    assert call_counters.count(numbers) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_result_that_the_device_does_not_write_is_rounded_to_bfloat16(
    device: Device, dtype: torch.dtype, numbers: int
) -> None:
    a, b = operands(40, 48, 96)
    a, b = Quantized(a.values, a.scale / 2**12), Quantized(b.values, b.scale / 2**12)  # within float16's range
    found = product(a, b, dtype, numbers)
    assert found.dtype is dtype
    written = torch.bfloat16 if device.amd else torch.float32 if dtype is torch.float64 else dtype
    assert device.dtypes == [written]
    assert torch.equal(found, reference_scaled_mm(a.values, a.scale, b.values, b.scale, written).to(dtype))


def test_a_bias_is_added_after_the_product(device: Device, numbers: int) -> None:
    a, b = operands(40, 48, 96)
    bias = torch.randn(48)
    plain = product(a, b, torch.bfloat16, numbers)
    assert torch.equal(product(a, b, torch.bfloat16, numbers, bias), (plain + bias).bfloat16())


def test_what_the_device_does_not_take_is_refused(device: Device, numbers: int) -> None:
    a, b = operands(32, 32, 64)
    with pytest.raises(InputError, match="no fast accumulation"):
        scaled_mm._cuda(a.values, a.scale, b.values, b.scale, MXFP8, MXFP8, torch.bfloat16, True, numbers)
    other = Scaling.BLOCKWISE_1X128
    with pytest.raises(InputError, match="no kernel multiplies blockwise_1x128 x blockwise_1x128"):
        scaled_mm._cuda(a.values, a.scale, b.values, b.scale, other, other, torch.bfloat16, False, numbers)
    assert call_counters.count(numbers) == 0


@pytest.mark.parametrize("target", [name for name in DEVICES if name not in (*TARGETS, "reference")])
def test_no_other_gpu_multiplies_it(target: str) -> None:
    formats = (Format.E4M3, Format.E4M3)
    reason = scaled_mm_operands.refuse_recipe((MXFP8, MXFP8), formats, Accumulation.PRECISE, DEVICES[target].scaled_mm)
    assert reason is not None
    assert "blockwise_1x32" in reason or "e4m3fnuz" in reason


def test_a_recording_multiplies_scales_that_the_device_can_hold() -> None:
    recipe = "e4m3 blockwise_1x32, e4m3 blockwise_1x32, precise"
    prepared = Gemms(device="cpu", target="reference").prepare(
        Part(PartKind.GEMM, SCALED_MM, 40, 48, 96, recipe=recipe)
    )
    _, scale_a, _, scale_b = prepared.arguments
    assert all(torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale) for scale in (scale_a, scale_b))
    assert prepared.check(prepared.call(*prepared.arguments)).wrong == ""
