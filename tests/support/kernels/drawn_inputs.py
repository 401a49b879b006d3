"""Operands of three kinds for kernels that quantize: normal, heavy-tailed, and drawn from what Probe has learned."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.numerics.enums import Gemm, Operand
from loka.numerics.quantize import FORMATS, expand_scale
from loka.probe.samplers import CopulaSampler
from loka.probe.stats.site_stats import SiteStats
from tests.support.kernels.rendered_cases import Inputs, exact_forward, exact_gradients, gradient_size, random_inputs
from tests.support.learned_stats import operand_of, weight_of

KINDS = ("normal", "student", "learned")
NOISE = 1e-4  # of what a row's elements are the difference of


def student(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Student's t with three degrees of freedom."""
    chi = torch.randn(3, rows, width, generator=generator).square().sum(0)
    return torch.randn(rows, width, generator=generator) / (chi / 3.0).sqrt()


def learned(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Rows from Probe's copula sampler, after it saw rows of uneven size whose columns hang together and are skewed."""
    shared = torch.randn(512, 4, generator=generator) @ torch.randn(4, width, generator=generator)
    seen = (shared + student(512, width, generator)).relu() - 0.3
    seen *= torch.rand(512, 1, generator=generator).clamp(min=1e-3).rsqrt()
    stats = SiteStats("site", width, 1, operand_of(Operand.INPUT, seen), None, None, weight_of(torch.ones(1, width)))
    drawn = CopulaSampler(stats, max(rows, 16)).draw(Gemm.FPROP, generator).a
    return drawn.repeat(-(-rows // drawn.shape[0]), 1)[:rows]


def drawn_inputs(kind: str, rows: int, width: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Inputs:
    """Arguments of a kernel, x and the output's gradient of the kind; the seed is another in each run of a draw."""
    inputs = random_inputs(rows, width, dtype, device, seed=seed)
    if kind == "normal":
        return inputs
    generator = torch.Generator().manual_seed(seed + rows + width)
    draw = student if kind == "student" else learned
    x, grad = (draw(rows, width, generator).to(device, dtype) for _ in range(2))
    return replace(inputs, tensors={**inputs.tensors, "x": x}, grad=grad)


def exact_result(spec: NormForward | NormBackward, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """What a spec quantizes, in float64, and the noise that float32 makes in a row of it (M, 1)."""
    if isinstance(spec, NormForward):
        y = exact_forward(spec, {name: tensor.double() for name, tensor in inputs.tensors.items()})
        return y, NOISE * y.abs().amax(1, keepdim=True)
    return exact_gradients(spec, inputs)["dx"], NOISE * gradient_size(spec, inputs)


def last_arguments(spec: NormForward | NormBackward, y: Tensor) -> list[Tensor]:
    """The static scale, under which some elements overflow, or the maxima of another launch."""
    largest = y.abs().max().float()
    scale = 2.0 ** (largest / spec.how.limit).log2().floor()
    known = (scale if spec.how.power_of_two else scale * 0.7).view(1, 1)
    maxima = torch.stack([largest * 0.5, largest, largest * 0.0])
    return [{"scale": known, "maxima": maxima}[name] for name in spec.how.parameters]


def check_mode(got: dict[str, Tensor], spec: NormForward | NormBackward, y: Tensor, noise: Tensor, last: list[Tensor]):
    """Results of a mode against the float64 result `y` (M, width), up to half a step of the format and `noise`."""
    how, info = spec.how, FORMATS[spec.how.format]
    largest = y.abs().max()
    if "amax" in got:
        assert (got["amax"].double().max() - largest).abs() <= noise.max()
        assert got["amax"].min() >= 0.0
    if how.scaling == "maximum":
        return
    scale = (last[0] if how.scaling == "static" else got["scale"]).double()
    assert got["values"].dtype == info.dtype
    assert (scale > 0.0).all()
    spread = expand_scale(scale, *y.shape).expand(y.shape)
    if how.found:
        # No element is cut, and no scale is larger than its block needs; noise may carry a maximum over a power of two.
        assert (y.abs() <= info.max * spread + noise).all()
    if how.scaling == "static":
        sure, perhaps = ((y.abs() > info.max * scale + sign * noise).sum() for sign in (1.0, -1.0))
        assert sure <= got["overflow"].sum() <= perhaps
    half = torch.finfo(info.dtype).eps / 2
    allowed = half * y.abs() + 0.5 * info.smallest_subnormal * spread + noise
    cut = torch.maximum(torch.minimum(y, info.max * spread), -info.max * spread)
    assert ((got["values"].double() * spread - cut).abs() <= allowed).all()


def corners(rows: int, width: int) -> Tensor:
    """Rows of zeros, NaN, infinities, tiny and huge values among others, on the GPU; at least 12 x 10."""
    x = random_inputs(rows, width, torch.bfloat16, "cuda", heavy=True).tensors["x"]
    x[3], x[4, 5], x[6, 7], x[8, 9] = 0.0, torch.nan, torch.inf, -torch.inf
    x[10], x[11] = 448.0 * 2.0**-20, torch.finfo(torch.bfloat16).max
    return x
