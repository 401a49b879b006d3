"""Speed of the rendered kernels by family, against the time to move the bytes that each reads and writes.

Each result is compared with the reference on the same arguments, so that a fast but wrong kernel shows.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from loka.bench import library_gemms, roofline
from loka.bench.cells import Cell, Errors, MeasuredStep, cell_of, decibels
from loka.bench.machine import device_here, environment, require_gpu
from loka.bench.options import did_you_mean, listed
from loka.bench.packages import Workshop
from loka.bench.record.check_numbers import results_of
from loka.bench.results import METHOD, BenchReport, Section, usable_folder, utc_minute
from loka.bench.roofline import Peaks, bytes_us
from loka.bench.timing import SEED, Progress, rotations, size_of, time_call
from loka.errors import InputError
from loka.kernels.fused.matrix_kernels import CastTranspose, Reduce, RequantizeTranspose, Transpose
from loka.kernels.fused.norm.fused_cast_transpose import FusedCastTranspose
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norm_values import configuration
from loka.kernels.fused.quantization import ROWWISE, Quantization
from loka.kernels.fused.rendering import AnySpec

GEMM = "gemm"
FAMILIES = ("norm-forward", "norm-backward", "requantize-transpose", "known", "reduce", GEMM)
SHAPES = ((16384, 512), (8192, 1024), (16384, 2048), (8192, 4096))  # rows, width
WIDTH, EPS = 512, 1e-5  # of the examples of specs
KERNELS = (
    "Inputs rotate: between two launches on one of them more than the L2 cache holds is read. dB: signal to error, of "
    "a rendered kernel's first result against its reference, of a GEMM against float64 on what was quantized."
)
KNOWN = Quantization("static", overflow_stats=True)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel: its spec at some width, whether it takes a weight (width, width) instead of x (rows, width)."""

    family: str
    title: str
    example: AnySpec
    square: bool = False

    def spec(self, width: int) -> AnySpec:
        """Its spec at a width."""
        example = self.example
        if isinstance(example, FusedCastTranspose):
            return FusedCastTranspose(replace(example.spec, width=width))
        return replace(example, width=width) if isinstance(example, NormForward | NormBackward) else example

    def arguments(self, rows: int, width: int) -> tuple[Any, ...]:
        """One set of its arguments on the GPU."""
        return arguments_of(self.spec(width), width if self.square else rows, width)


def _forward(norm: str | None, activation: str | None = None, **options: Any) -> NormForward:
    affine, eps = norm == "layer_norm", EPS if norm else 0.0
    options = {"quantize": True, "save": True, "add": False, **options}
    return NormForward(width=WIDTH, norm=norm, weight=affine, bias=affine, eps=eps, activation=activation, **options)


def _backward(norm: str, activation: str | None = None, **options: Any) -> NormBackward:
    affine = norm == "layer_norm"
    options = {"quantize": True, "add": False, **options}
    return NormBackward(width=WIDTH, norm=norm, weight=affine, bias=affine, eps=EPS, activation=activation, **options)


_BLOCKS = _forward("block_norm", "hardswish", how=KNOWN)
_BLOCKS_BACKWARD = _backward("block_norm", "hardswish", how=KNOWN)

CASES = (
    KernelCase("norm-forward", "quantize -> e4m3", _forward(None)),
    KernelCase("norm-forward", "LayerNorm -> e4m3", _forward("layer_norm")),
    KernelCase("norm-forward", "LayerNorm, SiLU -> e4m3", _forward("layer_norm", "silu")),
    KernelCase("norm-forward", "LayerNorm, SiLU -> BF16", _forward("layer_norm", "silu", quantize=False)),
    KernelCase("norm-forward", "BlockNorm, Hard Swish -> e4m3", _forward("block_norm", "hardswish")),
    KernelCase("norm-backward", "LayerNorm backward -> e4m3", _backward("layer_norm")),
    KernelCase("norm-backward", "SiLU, LayerNorm backward -> e4m3", _backward("layer_norm", "silu")),
    KernelCase("norm-backward", "LayerNorm backward -> BF16", _backward("layer_norm", quantize=False)),
    KernelCase("norm-backward", "Hard Swish, BlockNorm backward -> e4m3", _backward("block_norm", "hardswish")),
    KernelCase("requantize-transpose", "requantize_transpose of x", RequantizeTranspose(1)),
    KernelCase("requantize-transpose", "requantize_transpose of dy, x and a square weight", RequantizeTranspose(3)),
    KernelCase("known", "quantize -> e4m3, static scale", _forward(None, how=KNOWN)),
    KernelCase("known", "LayerNorm, SiLU -> e4m3, static scale", _forward("layer_norm", "silu", how=KNOWN)),
    KernelCase("known", "BlockNorm, Hard Swish -> e4m3, static scale", _BLOCKS),
    KernelCase("known", "SiLU, LayerNorm backward -> e4m3, static scale", _backward("layer_norm", "silu", how=KNOWN)),
    KernelCase("known", "Hard Swish, BlockNorm backward -> e4m3, static scale", _BLOCKS_BACKWARD),
    KernelCase("known", "cast and transpose, static scale", CastTranspose(KNOWN)),
    KernelCase(
        "known",
        "cast and transpose a square weight, maximum found",
        CastTranspose(Quantization("tensorwise")),
        square=True,
    ),
    KernelCase("known", "BlockNorm, Hard Swish -> e4m3, static scale, and transposed", FusedCastTranspose(_BLOCKS)),
    KernelCase(
        "known",
        "Hard Swish, BlockNorm backward -> e4m3, static scale, and transposed",
        FusedCastTranspose(_BLOCKS_BACKWARD),
    ),
    KernelCase("known", "transpose x", Transpose(1)),
    KernelCase("known", "transpose dy and x", Transpose(2)),
    KernelCase("reduce", "reduce partial sums of two", Reduce(2)),
    KernelCase("reduce", "reduce partial sums of four", Reduce(4)),
)


def check(names: Sequence[str], variants: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The families and the library GEMMs to measure. Raises InputError for names that there are not."""
    gemms = listed("--variants", variants, library_gemms.NAMES) or library_gemms.NAMES
    for name in names:
        if name not in FAMILIES:
            hint = did_you_mean(name, FAMILIES)
            raise InputError(f"loka bench kernels: there is no family {name!r}; there are {', '.join(FAMILIES)}{hint}")
    families = tuple(family for family in FAMILIES if family in names) or FAMILIES
    if variants is not None and GEMM not in families:
        raise InputError("loka bench kernels: --variants are those of the family gemm, which is not measured")
    return families, gemms


def run(names: Sequence[str], variants: str | None, out: Path, progress: Progress) -> BenchReport:
    """Check what is asked for and measure it; the folder `out` is created, but the report is not written.

    `names`: families, none for all. Raises InputError for an unknown name, without a GPU, and if `out` is not writable.
    """
    families, gemms = check(names, variants)
    require_gpu()
    usable_folder(out)
    command = shlex.join(["loka", "bench", "kernels", *names, *(["--variants", variants] if variants else [])])
    sections = run_kernels(families, gemms, progress)
    return BenchReport("kernels", command, utc_minute(), environment(), sections, (METHOD, KERNELS))


def run_kernels(chosen: Sequence[str], variants: Sequence[str], progress: Progress) -> tuple[Section, ...]:
    """Measure the kernels of these families on the current GPU; `variants` selects the library GEMMs."""
    peaks = roofline.peaks_of(torch.cuda.get_device_name())
    sections = []
    cases = [case for case in CASES if case.family in chosen]
    if cases:
        with Workshop() as workshop:
            module = workshop.kernels([case.spec(width) for case in cases for _, width in SHAPES])
            cells = [
                cell
                for case in cases
                for rows, width in SHAPES
                for cell in [_cell(case, rows, width, module, peaks, progress)]
            ]
        sections.append(Section("rendered kernels (rows x width)", tuple(cells)))
    if GEMM in chosen:
        sections.append(library_gemms.run_gemms(variants, peaks, progress))
    return tuple(sections)


def _cell(case: KernelCase, rows: int, width: int, module: ModuleType, peaks: Peaks | None, progress: Progress) -> Cell:
    def run() -> tuple[MeasuredStep, float | None]:
        spec = case.spec(width)
        call = getattr(module, spec.function)
        torch.manual_seed(SEED)
        first = case.arguments(rows, width)
        made = results_of(call(*first))
        ours, expected = (first_value(spec.results, results) for results in (made, results_of(call.reference(*first))))
        agreement = Errors(decibels(ours, expected), None, "")
        read = size_of(first)
        sets = [first, *(case.arguments(rows, width) for _ in range(rotations(read) - 1))]
        bound = bytes_us(read + size_of(made), peaks) if peaks is not None else None
        return MeasuredStep(time_call(call, sets), None, agreement), bound

    cell = cell_of(case.title, case.title, f"{rows} x {width}", run, progress)
    torch.cuda.empty_cache()
    return cell


def first_value(names: Sequence[str], results: Sequence[Tensor]) -> Tensor:
    """The first result of a kernel in float32; FP8 values are dequantized if scales follow them."""
    first = results[0].float()
    return first * results[1] if tuple(names[:2]) == ("values", "scale") else first


def norm_arguments(
    spec: NormForward | NormBackward, rows: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """Arguments of a norm's kernel: matrices (rows, width), vectors (width,) in `dtype`, float32 statistics of x."""
    matrices = {name: torch.randn(rows, spec.width, device=device, dtype=dtype) for name in ("grad", "x")}
    x = matrices["x"].float()
    statistics = {"mean": x.mean(1), "rstd": torch.rsqrt(x.var(1, unbiased=False) + EPS)}
    vectors = {name: torch.randn(spec.width, device=device, dtype=dtype) for name in ("add", "weight", "bias")}
    known = {**matrices, **statistics, **vectors}
    return tuple(known[name] for name in spec.parameters)


def arguments_of(spec: AnySpec, rows: int, width: int, device: str = "cuda") -> tuple[Any, ...]:
    """Arguments of a kernel over x (rows, width): tensors, then scale and overflow statistics where it takes them."""
    if isinstance(spec, FusedCastTranspose):
        return arguments_of(spec.spec, rows, width, device)
    if isinstance(spec, Reduce):
        return reduce_arguments(width, spec.count, device)
    if isinstance(spec, RequantizeTranspose):  # of dy, x and a square weight
        sizes = ((rows, width), (rows, width), (width, width))[: spec.count]
        return (list(requantize_arguments(*sizes, device=device)),)
    if isinstance(spec, Transpose):
        return ([requantize_arguments((rows, width), device=device)[0] for _ in range(spec.count)],)
    if isinstance(spec, NormForward | NormBackward):
        plain = norm_arguments(replace(spec, how=ROWWISE), rows, device)
    else:
        plain = (torch.randn(rows, width, device=device, dtype=torch.bfloat16),)
    known = {
        "scale": torch.full((1, 1), 2.0**-4, device=device),  # all values are below 28
        "overflow_stats": torch.zeros(2, dtype=torch.int64, device=device),
        "maxima": torch.full((device_here().multiprocessors,), 5.0, device=device),
    }
    return (*plain, *(known[name] for name in spec.parameters[len(plain) :]))


def requantize_arguments(*sizes: tuple[int, int], device: str = "cuda") -> tuple[Tensor, ...]:
    """Arguments of `requantize_transpose`: e4m3 values, power-of-two scales and their maximum for each operand."""
    found: list[Tensor] = []
    for rows, columns in sizes:
        values = torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        scale = torch.exp2(-torch.randint(0, 4, (rows, 1), device=device).float())
        found += [values, scale, scale.max().reshape(1)]
    return tuple(found)


def reduce_arguments(width: int, count: int, device: str = "cuda") -> tuple[Any, ...]:
    """Arguments of `reduce`: partial sums of LayerNorm backwards and the dtype of their sums."""
    spec = NormBackward(width, "layer_norm", True, True, EPS, "silu", False, True)
    # Each program of a backward writes one row of partial sums.
    here = device_here()
    parts = configuration(spec, here).programs * here.multiprocessors
    return [torch.randn(parts, width, device=device) for _ in range(count)], torch.bfloat16
