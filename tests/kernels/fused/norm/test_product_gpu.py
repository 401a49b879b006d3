"""Kernels with products, residuals and carried gradients on a Hopper GPU, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from tests.support.gpu import ON_HOPPER
from tests.support.kernels.product_cases import (
    arguments,
    backwards,
    every,
    exact,
    exact_products,
    forwards,
    inputs_of,
    product_inputs,
    products,
)
from tests.support.kernels.rendered_cases import write_package

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

WIDTHS = (13, 512, 1100, 3456)
ROWS = (1, 17, 4093)
NOISE = 1e-4  # of a row's largest element


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    specs = [spec for width in WIDTHS for spec in every(width)]
    return write_package(tmp_path_factory.mktemp("gpu") / "products_gpu", specs)


def near_rows(found: Tensor, exact: Tensor, relative: float, extra: Tensor | float = 0.0) -> bool:
    noise = NOISE * exact.abs().amax(1, keepdim=True)
    return bool(((found.double() - exact).abs() <= relative * exact.abs() + noise + extra).all())


def known_of(spec: NormForward | NormBackward, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The oracle; a backward kernel is given the kept sum in bfloat16, which is taken for exact then."""
    known = exact(spec, tensors, spec.residual if isinstance(spec, NormForward) else spec.summed)
    if isinstance(spec, NormForward) or not spec.summed:
        return known
    # The sum and the product are replaced by an input that bfloat16 holds, and the factor is applied afterwards.
    bare = NormBackward(spec.width, spec.norm, spec.weight, spec.bias, 1e-5, spec.activation, False, True,
                        residual_grad_in=spec.residual_grad_in)  # fmt: skip
    kept = known["kept"].to(tensors["x"].dtype)
    again = exact(bare, {**tensors, "x": kept}, residual=False)
    dsum = again["dx"]
    dx = dsum * tensors["times"].double() if spec.times else dsum
    return {**again, "kept": kept, "residual_grad_out": dsum, "dx": dx, "dadd": dx.sum(0)}


@pytest.mark.parametrize("spec", [s for w in WIDTHS for s in (*forwards(w), *backwards(w))], ids=lambda s: s.function)
def test_against_float64(package, spec):
    for rows in ROWS:
        tensors = inputs_of(rows, spec.width, torch.bfloat16, "cuda")
        known = known_of(spec, tensors)
        plain = [torch.float32] if isinstance(spec, NormForward) and spec.takes_dtype else []
        got = package.run(spec, *arguments(spec, tensors, known), *plain)
        expected = known["y" if isinstance(spec, NormForward) else "dx"]
        if spec.quantize:
            assert near_rows(got["values"].double() * got["scale"], expected, 2.0**-4, 2.0**-9 * got["scale"])
            assert got["scale_max"].max() == got["scale"].max()
        else:
            assert near_rows(got["out" if "out" in got else "dx"], expected, 2.0**-8)
        for name in ("kept", "residual_grad_out"):
            if name in spec.results:
                assert near_rows(got[name], known[name], 2.0**-8)
        for name in ("dweight", "dbias", "dadd"):
            if name in spec.results:
                error = (got[name].double().sum(0) - known[name]).abs()
                assert (error <= 1e-3 * known[name].abs().amax()).all(), name


@pytest.mark.parametrize("spec", [spec for width in WIDTHS for spec in products(width)], ids=lambda s: s.function)
def test_products_against_float64(package, spec):
    for rows in (*ROWS, 0):
        tensors = product_inputs(spec, rows, torch.bfloat16, "cuda")
        got = package.run(spec, *tensors.values(), torch.float32)["out"]
        torch.testing.assert_close(got.double(), exact_products(spec, tensors), rtol=1e-5, atol=1e-4)
        strided = [tensor.repeat_interleave(2, dim=-1)[..., ::2] for tensor in tensors.values()]
        assert torch.equal(package.run(spec, *strided, torch.float32)["out"], got)


def test_a_graph_replays_on_new_data(package):
    spec = next(
        s for s in forwards(3456) if s.quantize and s.keep and s.norm is None and s.times and s.activation is None
    )
    tensors = inputs_of(256, 3456, torch.bfloat16, "cuda")
    given = [tensors[name] for name in spec.parameters]
    package.run(spec, *given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = package.run(spec, *given)
    given[0].neg_()
    graph.replay()
    again = package.run(spec, *given)
    assert torch.equal(got["kept"], again["kept"])
    assert torch.equal(got["values"].view(torch.uint8), again["values"].view(torch.uint8))
