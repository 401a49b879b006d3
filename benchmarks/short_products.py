"""Products of short layers, K and N of 256 and 512: `python -m benchmarks.short_products [-o FILE]`, on a GPU.

For each layer (M rows, K inputs, N outputs) and each of its GEMMs it times the product in BF16, in FP8 with the scaling
that LoKA's recipe has there, and three ways in which FP8 might win at such sizes: operands swapped (the transposed
result), the sum in four parts (wgrad: more tiles than its few results give), and a result that is written in FP8. The
bound is the time of the FP8 product's bytes at the speed of a copy, or of its FLOPs, whichever is longer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.study import run_study, tell
from loka.bench.machine import device_here, environment, require_gpu
from loka.bench.record.check_numbers import Check
from loka.bench.record.clock import GraphClock, Timer
from loka.bench.record.gemm_parts import NATIVE, SCALED_MM, Gemms, PreparedCall
from loka.errors import LokaError
from loka.kernels.measurements.part_bounds import START_US, bound_us
from loka.kernels.measurements.parts import Part, PartKind
from loka.numerics.enums import Gemm
from loka.paths import write_file

ROWS, WIDTHS = (4096, 16384, 65536), (256, 512)
PARTS = 4  # of a split sum
ROWWISE, TENSORWISE = "e4m3 rowwise, e4m3 rowwise, precise", "e4m3 tensorwise, e4m3 tensorwise, precise"
WAYS = ("bf16", "fp8", "fp8 swapped", f"fp8 in {PARTS} parts", "fp8 to fp8")
LEAST_DB = 24.0  # of a result that e4m3 holds


@dataclass(frozen=True, slots=True)
class ShortProduct:
    """A GEMM of a layer of `m` rows, K inputs and N outputs."""

    gemm: Gemm
    m: int
    k: int
    n: int

    @property
    def recipe(self) -> str:
        """The scaling of LoKA's recipe: over the batch's rows one scale, otherwise one a row."""
        return TENSORWISE if self.gemm is Gemm.WGRAD else ROWWISE

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and contraction."""
        return {
            Gemm.FPROP: (self.m, self.n, self.k),
            Gemm.DGRAD: (self.m, self.k, self.n),
            Gemm.WGRAD: (self.n, self.k, self.m),
        }[self.gemm]

    def part(self, kernel: str = SCALED_MM, recipe: str | None = None, swapped: bool = False) -> Part:
        """The product as a part, by default on torch's kernel in the recipe's scaling."""
        rows, columns, contraction = self.sizes
        rows, columns = (columns, rows) if swapped else (rows, columns)
        return Part(PartKind.GEMM, kernel, rows, columns, contraction, recipe=self.recipe if recipe is None else recipe)


def products() -> tuple[ShortProduct, ...]:
    """All products of the study."""
    return tuple(ShortProduct(gemm, *sizes) for sizes in product(ROWS, WIDTHS, WIDTHS) for gemm in Gemm)


def ways(short: ShortProduct, gemms: Gemms) -> Iterator[tuple[str, PreparedCall]]:
    """The ways of computing a product that there are, prepared."""
    yield "bf16", gemms.prepare(short.part(NATIVE, ""))
    yield "fp8", gemms.prepare(short.part())
    yield "fp8 swapped", gemms.prepare(short.part(swapped=True))
    one_scale = gemms.prepare(short.part(recipe=TENSORWISE))
    if short.gemm is Gemm.WGRAD:
        yield f"fp8 in {PARTS} parts", PreparedCall(in_parts, one_scale.arguments, one_scale.check)
    if short.gemm is Gemm.FPROP:
        yield "fp8 to fp8", _to_fp8(one_scale)


def in_parts(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """a (R, K) @ b (C, K).T, K cut into PARTS, each part's product added in float32; (R, C) in bfloat16."""
    cut = zip(a.chunk(PARTS, 1), b.chunk(PARTS, 1), strict=True)
    made = [torch._scaled_mm(x, y.t(), scale_a, scale_b, out_dtype=torch.float32) for x, y in cut]
    return torch.stack(made).sum(0).to(torch.bfloat16)


def _to_fp8(one_scale: PreparedCall) -> PreparedCall:
    """The product with a result (R, C) in e4m3 under a scale that is known.

    The scale is part of `scale_a`: torch 2.10 and later drop `scale_result` on CUDA (pytorch/pytorch#190449).
    """
    a, scale_a, b, scale_b = one_scale.arguments
    largest = one_scale.call(*one_scale.arguments).abs().max().float()
    scale = largest / torch.finfo(a.dtype).max

    def call(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=a.dtype)

    def check(found: Tensor) -> Check:
        made = one_scale.check(found.float() * scale)
        wrong = "" if made.sqnr_db is not None and made.sqnr_db >= LEAST_DB else made.wrong
        return replace(made, wrong=wrong)

    return PreparedCall(call, (a, scale_a / scale, b, scale_b), check)


def measured(timer: Timer, wanted: Sequence[ShortProduct], gemms: Gemms) -> dict[ShortProduct, dict[str, float]]:
    """Microseconds of each way of each product. Raises LokaError for a wrong result."""
    found: dict[ShortProduct, dict[str, float]] = {}
    for short in wanted:
        times = found[short] = {}
        for way, prepared in ways(short, gemms):
            if wrong := prepared.check(prepared.call(*prepared.arguments)).wrong:
                raise LokaError(f"{short}, {way}: {wrong}")
            times[way] = timer(prepared.call, prepared.arguments).us
        tell(f"{short.gemm} {short.m} x {short.k} x {short.n}: {times}")
    return found


def table(found: dict[ShortProduct, dict[str, float]], bound: Callable[[Part], float]) -> str:
    """A line for each product; the last columns are the fastest way and the bound's share of its time."""
    head = ["GEMM", "M", "K", "N", "bound us", *(f"{way} us" for way in WAYS), "fastest", "of the bound"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for short, times in found.items():
        least = bound(short.part())
        best = min(times, key=times.__getitem__)
        figures = [f"{times[way]:.1f}" if way in times else "-" for way in WAYS]
        sizes = (short.gemm.value, short.m, short.k, short.n, f"{least:.1f}")
        lines.append("| " + " | ".join(map(str, (*sizes, *figures, best, f"{100 * least / times[best]:.0f} %"))) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.short_products", description="Products of short layers."
    )
    parser.add_argument("-o", "--output", type=Path, help="file for the table, in Markdown")
    options = parser.parse_args(arguments)

    def study() -> str:
        require_gpu()
        device, here = device_here(), environment()
        found = measured(GraphClock().time, products(), Gemms(target=device.name))
        text = table(found, lambda part: bound_us(part, device) - START_US)
        text = f"{here.device}, torch {here.torch}, CUDA {here.cuda}\n\n{text}\n"
        if options.output is not None:
            write_file(options.output, text)
        return text

    return run_study(study)


if __name__ == "__main__":
    sys.exit(main())
