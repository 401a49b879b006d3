"""The operands of a measured matrix product, in copies that exceed the L2 cache, and the peers that multiply them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.kernels import call_counters
from loka.kernels.fused.triton_gemm import gemm_reference
from loka.kernels.fused.triton_gemm.gemm_spec import SplitGemm, TiledGemm
from loka.kernels.gemm.scaled_mm import scaled_mm
from loka.numerics.enums import Format, Scaling
from loka.numerics.metrics import sqnr
from loka.numerics.quantize import quantize

WORKING_SET = 160 << 20  # bytes of all copies together, at least: three L2 caches
MOST_COPIES = 40

Shape = tuple[int, int, int]  # M, N, K


@dataclass(frozen=True, slots=True)
class GemmWork:
    """Copies of a call's arguments, and the result that it should have, in float32."""

    sets: tuple[tuple[Tensor, ...], ...]
    expected: Tensor


def make_work(kind: str, spec: TiledGemm | SplitGemm, shape: Shape) -> GemmWork:
    """Operands of N(0, 1) for a rendered product: gemm, norm or split (whose scales are tensorwise)."""
    m, n, k = shape
    split, quantised = kind == "split", spec.operands == "e4m3"
    sides = ((n, m), (k, m)) if split else ((m, k), (n, k))
    matrices = [torch.randn(side, device="cuda", dtype=torch.bfloat16) for side in sides]
    if quantised:
        scaling = Scaling.TENSORWISE if split else Scaling.ROWWISE
        made = [quantize(x, format=Format.E4M3, scaling=scaling, power_of_two=True) for x in matrices]
        operands = [tensor for q in made for tensor in (q.values, q.scale)]
        product = gemm_reference.product(operands[0], operands[2], operands[1], operands[3])
    else:
        product = gemm_reference.product(*matrices)
        operands = [x.t().contiguous() for x in matrices] if split else matrices
    vectors: list[Tensor] = []
    if kind == "norm" and isinstance(spec, TiledGemm):
        vectors = [torch.randn(n, device="cuda") for _ in range(3)]
        add, weight, bias = vectors
        e = spec.epilogue
        product = gemm_reference.epilogue(
            product, add=add, norm=e.norm, weight=weight, bias=bias, eps=e.eps, activation=e.activation
        ).y
    return GemmWork(copies_of((*operands, *vectors)), product)


def copies_of(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], ...]:
    """As many copies as exceed the cache together."""
    size = sum(tensor.nbytes for tensor in tensors)
    count = min(max(-(-WORKING_SET // size), 2), MOST_COPIES)
    return tuple(tuple(tensor.clone() for tensor in tensors) for _ in range(count))


def sqnr_of(call: Callable[..., object], work: GemmWork) -> float:
    """Of the first copy's result, dB."""
    result = call(*work.sets[0])
    first = result[0] if isinstance(result, tuple | list) else result
    if not isinstance(first, Tensor):
        raise TypeError(f"a product is a tensor, not {type(first)}")
    return sqnr(first, work.expected)


def peers(kind: str, quantised: GemmWork, plain: GemmWork) -> Iterator[tuple[str, Callable[..., object], GemmWork]]:
    """`loka::scaled_mm` with both accumulations and torch's bfloat16 product, each with its operands."""
    scaling = Scaling.TENSORWISE if kind == "split" else Scaling.ROWWISE
    for fast in (False, True):
        name = f"loka::scaled_mm {'fast' if fast else 'precise'}"
        yield name, multiplier(scaling, fast), quantised
    yield "torch.mm bfloat16", (transposed_mm if kind == "split" else plain_mm), plain


def multiplier(scaling: Scaling, fast: bool) -> Callable[..., Tensor]:
    """A call of `loka::scaled_mm`."""
    counter_id = call_counters.new_counters(1)

    def call(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, *vectors: Tensor) -> Tensor:
        return scaled_mm(a, scale_a, b, scale_b, scaling.value, scaling.value, torch.bfloat16, fast, counter_id)

    return call


def plain_mm(a: Tensor, b: Tensor, *vectors: Tensor) -> Tensor:
    """a (M, K) @ b (N, K).T."""
    return torch.mm(a, b.t())


def transposed_mm(a: Tensor, b: Tensor) -> Tensor:
    """a (M, N).T @ b (M, K)."""
    return torch.mm(a.t(), b)
