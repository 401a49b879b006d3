"""torch's own GEMMs: cuBLASLt's FP8 GEMMs in `loka::scaled_mm`, and the model's native GEMM."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loka.devices.targets import spec_of
from loka.kernels.gemm import scaled_mm, scaled_mm_operands
from loka.kernels.gemm.gemm_kernel import GemmRequest, GemmSizes
from loka.kernels.gemm.library import FP8_CAPABILITY, has_fp8, unsupported_device


@dataclass(frozen=True, slots=True)
class ScaledMM:
    """The operator `loka::scaled_mm`: tensorwise, rowwise and blockwise scales, both accumulations, every dtype."""

    name: str = scaled_mm.KERNEL
    operator: str = "loka::scaled_mm"
    library: None = None

    def unsupported_reason(self, wanted: GemmRequest) -> str | None:
        """The reference takes every recipe and size; a device's kernel is limited by its `ScaledMMLimits`."""
        device = spec_of(wanted.target)
        refusal = wanted.refuse_range()
        if refusal is not None or device.is_reference:
            return refusal
        limits = device.scaled_mm
        multiple, first = limits.multiple(wanted.scalings[0]), wanted.scalings[0]
        multiples = GemmSizes(limits.row_multiple(first), multiple, multiple)
        return scaled_mm_operands.refuse_recipe(
            wanted.scalings, wanted.formats, wanted.accumulation, limits
        ) or wanted.refuse_sizes(multiples)

    def unavailable_reason(self) -> str | None:
        """Without an FP8 GPU no kernel is available, although the operator still runs its slow reference."""
        if any(map(has_fp8, range(torch.cuda.device_count()))):
            return None
        return f"{unsupported_device(FP8_CAPABILITY)}; its reference runs"


@dataclass(frozen=True, slots=True)
class Native:
    """The model's native GEMM, in the model's own precision: BF16, or float32, for which torch may use TF32.

    `torch.backends.cuda.matmul.allow_tf32` and autocast decide which; a plan does not change them.
    """

    name: str = "as-is"
    operator: None = None
    library: None = None

    def unsupported_reason(self, wanted: GemmRequest) -> str | None:
        """The native GEMM can always run."""
        spec_of(wanted.target)
        return None

    def unavailable_reason(self) -> str | None:
        """The native GEMM can always run."""
        return None


SCALED_MM = ScaledMM()
NATIVE = Native()
