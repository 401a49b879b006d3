"""What norm kernels give on a GPU, held against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from loka.kernels.fused.norm.norm_spec import NormForward
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import Quantized, dequantize, quantize
from tests.support.kernels.rendered_cases import (
    arguments_of,
    exact_forward,
    exact_gradients,
    exact_statistics,
    gradient_size,
)

NOISE = 1e-4  # of what a row's elements are the difference of: float32 sums and the GPU's approximate functions


def row_size(exact: Tensor) -> Tensor:
    return exact.abs().amax(1, keepdim=True)


def check_quantized(got: dict[str, Tensor], exact: Tensor, noise: Tensor) -> None:
    """Half a step of e4m3 (2**-4 of a value, 2**-10 of its scale) and `noise` (M, 1), under the quantizer's scale.

    Where the noise may carry the maximum over a power of two, the scale can be the next one.
    """
    scale, size = got["scale"].double(), row_size(exact)
    usual = quantize(exact, format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True).scale.double()
    low, high = ((size + sign * noise) / usual / 448.0 for sign in (-1.0, 1.0))
    assert (scale[(low > 0.5) & (high < 1.0)] == usual[(low > 0.5) & (high < 1.0)]).all()
    assert ((scale / usual).log2().abs() <= 1.0)[noise < 0.1 * size].all()
    value = dequantize(Quantized(got["values"], got["scale"])).double()
    assert ((value - exact).abs() <= 2.0**-4 * exact.abs() + 2.0**-10 * scale + noise).all()
    assert got["scale_max"].max() == got["scale"].max()
    assert got["scale_max"].min() >= 0.0


def check_norm(package, spec, inputs) -> None:
    """A forward's or a backward's results."""
    (_check_forward if isinstance(spec, NormForward) else _check_backward)(package, spec, inputs)


def _check_forward(package, spec, inputs) -> None:
    plain = [] if spec.quantize else [torch.float32]
    got = package.run(spec, *(inputs.tensors[name] for name in spec.parameters), *plain)
    exact = exact_forward(spec, {name: tensor.double() for name, tensor in inputs.tensors.items()})
    if spec.quantize:
        check_quantized(got, exact, NOISE * row_size(exact))
    else:
        assert ((got["out"] - exact).abs() <= NOISE * row_size(exact)).all()
    size = inputs.tensors["x"].double().abs().amax(1) + inputs.tensors["add"].double().abs().amax()
    for name, statistic in exact_statistics(spec, inputs.tensors).items():
        assert ((got[name] - statistic).abs() <= 1e-5 * statistic.abs() + 1e-6 * size).all()


def _check_backward(package, spec, inputs) -> None:
    got = package.run(spec, *arguments_of(spec, inputs))
    exact = exact_gradients(spec, inputs)
    noise = NOISE * gradient_size(spec, inputs)
    if spec.quantize:
        check_quantized(got, exact["dx"], noise)
    else:
        allowed = torch.finfo(inputs.grad.dtype).eps * exact["dx"].abs() + noise
        assert ((got["dx"].double() - exact["dx"]).abs() <= allowed).all()
    for name in spec.results:
        if name in ("dweight", "dbias", "dadd"):
            total, error = got[name].double().sum(0), (got[name].double().sum(0) - exact[name]).abs()
            assert total.isfinite().all()
            assert (error <= 1e-4 * exact[name].abs() + NOISE * exact[name].abs().max()).all()


def check_replayed(step, static, fresh) -> tuple[Tensor, ...]:
    """Capture a step on `static` tensors, without synchronising, and replay it on `fresh` ones; what eager gives."""
    step(*static)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*static)
    for place, values in zip(static, fresh, strict=True):
        place.copy_(values)
    graph.replay()
    eager = step(*static)
    for replayed, expected in zip(results, eager, strict=True):
        assert torch.equal(replayed, expected)
    return eager
