"""Kernels of wide rows on a Hopper GPU, against float64: odd ends, whole chunks, and the widest known recommender."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from tests.support.gpu import ON_HOPPER
from tests.support.kernels.norm_checks import check_norm, check_replayed
from tests.support.kernels.rendered_cases import PARTS, arguments_of, norm_specs, random_inputs, write_package

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

WIDTHS = (16389, 24576, 123200)
WIDEST = ("layer_norm", True, True, "silu", True)
SPECS = {width: norm_specs(width, [WIDEST, PARTS[0], PARTS[5], PARTS[-1]]) for width in WIDTHS}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    specs = [spec for width in WIDTHS for spec in SPECS[width]]
    return write_package(tmp_path_factory.mktemp("gpu") / "wide_gpu", [*specs, RequantizeTranspose(1), Reduce(2)])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_every_kernel_against_float64(package, width, rows):
    for heavy in (False, True):
        inputs = random_inputs(rows, width, torch.bfloat16, "cuda", heavy)
        for spec in SPECS[width]:
            check_norm(package, spec, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(package, dtype):
    inputs = random_inputs(17, 16389, dtype, "cuda")
    for spec in SPECS[16389]:
        check_norm(package, spec, inputs)


def test_quantized_rows_are_the_reference_bit_for_bit_and_transposed(package):
    spec = next(s for s in SPECS[123200] if isinstance(s, NormForward) and s.norm is None)
    x = random_inputs(300, 123200, torch.bfloat16, "cuda").tensors["x"]
    x[3], x[4, 123199] = 0.0, torch.inf
    got, expected = package.run(spec, x), package.run(spec, x.cpu())
    assert torch.equal(got["scale"].cpu(), expected["scale"])
    assert torch.equal(got["values"].cpu().view(torch.uint8), expected["values"].view(torch.uint8))
    transposed = package.run(RequantizeTranspose(1), got["values"], got["scale"], got["scale_max"])
    cpu = package.run(RequantizeTranspose(1), expected["values"], expected["scale"], expected["scale_max"])
    assert torch.equal(transposed["transposed"].cpu().view(torch.uint8), cpu["transposed"].view(torch.uint8))


def test_without_rows_and_with_few(package):
    for spec in SPECS[24576]:
        inputs = random_inputs(0, 24576, torch.bfloat16, "cuda")
        arguments = arguments_of(spec, inputs)
        for result in package.run(spec, *arguments).values():
            assert result.float().abs().sum() == 0.0


def test_a_step_in_a_graph_and_under_the_compiler(package):
    forward, backward = (s for s in SPECS[123200] if s.norm == "layer_norm" and s.activation and not s.quantize)
    assert isinstance(backward, NormBackward)
    run_forward, run_backward = (getattr(package.fused, spec.function) for spec in (forward, backward))

    def step(x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out, mean, rstd = run_forward(x, add, weight, bias)
        dx, dweight, dbias, _ = run_backward(grad, x, add, weight, bias, mean, rstd)
        return out, dx, *package.fused.reduce([dweight, dbias], torch.bfloat16)

    inputs, other = (random_inputs(64, 123200, torch.bfloat16, "cuda", seed=seed) for seed in (0, 1))
    static = inputs.of_step()
    eager = check_replayed(step, static, other.of_step())
    for ours, expected in zip(torch.compile(step, fullgraph=True)(*static), eager, strict=True):
        assert torch.equal(ours, expected)


def test_shapes_are_those_of_the_fake(package):
    for spec in SPECS[24576]:
        for rows in (1, 300):
            inputs = random_inputs(rows, 24576, torch.bfloat16, "cuda")
            arguments = arguments_of(spec, inputs)
            real = package.run(spec, *arguments)
            with torch._subclasses.FakeTensorMode() as mode:
                fake = package.run(spec, *(mode.from_tensor(argument) for argument in arguments))
            for name, result in real.items():
                assert (fake[name].shape, fake[name].dtype) == (result.shape, result.dtype), (spec, name)
