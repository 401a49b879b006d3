"""Speed of FP8 GEMMs of libraries on operands that are already quantized, compared with BF16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from loka.bench.cells import Errors, MeasuredStep, cell_of, decibels
from loka.bench.peers import PeerMissingError
from loka.bench.results import Section
from loka.bench.roofline import GemmMath, Peaks, product_us
from loka.bench.timing import SEED, Progress, rotations, size_of, time_call
from loka.kernels.gemm.scaled_mm_operands import first_scale, second_scale
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import quantize

SHAPES = (  # M, N, K
    (2048, 128, 512),
    (2048, 512, 3456),
    (2048, 2048, 2048),
    (8192, 256, 256),
    (8192, 512, 512),
    (8192, 1024, 1024),
    (8192, 2048, 2048),
    (8192, 4096, 4096),
    (32768, 512, 3456),
    (32768, 1024, 1024),
)


@dataclass(frozen=True, slots=True)
class LibraryGemm:
    """A library's GEMM; with `scaling` None it takes BF16 operands."""

    name: str
    precision: GemmMath
    scaling: Scaling | None = None
    fbgemm: bool = False


BASELINE = "bf16"  # ratios are over this one
GEMMS = (
    LibraryGemm(BASELINE, GemmMath.BF16),
    LibraryGemm("scaled-mm-tensorwise", GemmMath.FP8, Scaling.TENSORWISE),
    LibraryGemm("scaled-mm-tensorwise-fast", GemmMath.FP8_FAST, Scaling.TENSORWISE),
    LibraryGemm("scaled-mm-rowwise", GemmMath.FP8, Scaling.ROWWISE),
    LibraryGemm("scaled-mm-rowwise-fast", GemmMath.FP8_FAST, Scaling.ROWWISE),
    LibraryGemm("fbgemm-rowwise-fast", GemmMath.FP8_FAST, Scaling.ROWWISE, fbgemm=True),
)
NAMES = tuple(gemm.name for gemm in GEMMS)
SHOWN = "scaled-mm-rowwise"  # its bound is printed beside the times

_TYPE = {Scaling.TENSORWISE: ScalingType.TensorWise, Scaling.ROWWISE: ScalingType.RowWise}


def run_gemms(names: Sequence[str], peaks: Peaks | None, progress: Progress) -> Section:
    """Measure the GEMMs of these names on the current GPU, with operands that are not in the L2 cache."""
    cells = []
    for m, n, k in SHAPES:
        work = f"{m} x {n} x {k}"
        for gemm in GEMMS:
            if gemm.name in names:
                cells.append(
                    cell_of(
                        work,
                        work,
                        gemm.name,
                        lambda gemm=gemm, m=m, n=n, k=k: _measure(gemm, m, n, k, peaks),  # type: ignore[misc]
                        progress,
                    )
                )
                torch.cuda.empty_cache()
    return Section("GEMMs, operands already quantized (M x N x K)", tuple(cells), BASELINE, SHOWN)


def _measure(gemm: LibraryGemm, m: int, n: int, k: int, peaks: Peaks | None) -> tuple[MeasuredStep, float | None]:
    torch.manual_seed(SEED)
    call = call_of(gemm)
    a, b = operands(m, n, k, "cuda")
    first = arguments_of(gemm, a, b)
    errors = Errors(decibels(call(*first), a.double() @ b.double().t()), None, "")
    sets = [first]
    for _ in range(rotations(size_of(first)) - 1):
        sets.append(arguments_of(gemm, *operands(m, n, k, "cuda")))
    bound = None
    if peaks is not None and gemm.precision in peaks.flops:
        bound = product_us(m, n, k, gemm.precision, peaks)
    return MeasuredStep(time_call(call, sets), None, errors), bound


def operands(m: int, n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    """Operands a (M, K) and b (N, K), BF16, standard normal."""
    a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n))
    return a, b


def arguments_of(gemm: LibraryGemm, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Arguments of the GEMM: a and b, in FP8 each followed by its scales."""
    if gemm.scaling is None:
        return a, b
    first, second = (quantize(x, format=Format.E4M3, scaling=gemm.scaling) for x in (a, b))
    if gemm.fbgemm:
        return first.values, first.scale.reshape(-1), second.values, second.scale.reshape(-1)
    return (
        first.values,
        first_scale(first.scale, gemm.scaling, a.shape[0]),
        second.values,
        second_scale(second.scale, gemm.scaling, b.shape[0]),
    )


def call_of(gemm: LibraryGemm) -> Callable[..., Any]:
    """The function for these arguments: a @ b.T in BF16. Raises PeerMissingError if the library is missing."""
    if gemm.scaling is None:
        return lambda a, b: F.linear(a, b)
    fast = gemm.precision is GemmMath.FP8_FAST
    if gemm.fbgemm:
        rowwise = fbgemm_rowwise()
        return lambda a, scale_a, b, scale_b: rowwise(a, b, scale_a, scale_b, use_fast_accum=fast)
    kind = _TYPE[gemm.scaling]
    return lambda a, scale_a, b, scale_b: F.scaled_mm(
        a, b.t(), scale_a, kind, scale_b, kind, output_dtype=torch.bfloat16, use_fast_accum=fast
    )


def fbgemm_rowwise() -> Callable[..., Tensor]:
    """FBGEMM's rowwise operator. Raises PeerMissingError if the library is missing."""
    try:
        import fbgemm_gpu.experimental.gen_ai  # noqa: F401  (registers its operators)
    except (ImportError, OSError) as error:  # OSError: a native library does not load
        raise PeerMissingError(f"FBGEMM GenAI is not installed ({error}); pip install 'loka[fbgemm]'") from error
    operator: Callable[..., Tensor] = torch.ops.fbgemm.f8f8bf16_rowwise
    return operator
