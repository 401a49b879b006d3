"""BlockNorm's kernels without a GPU: the reference against float64 autograd and torch's own form, corners, sm_90."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.mods.norms import BlockNorm
from loka.numerics.quantize import Quantized, dequantize
from tests.support.kernels.rendered_cases import (
    BLOCK_PARTS,
    arguments_of,
    exact_forward,
    exact_gradients,
    norm_specs,
    random_inputs,
)
from tests.support.kernels.rendered_cases import write_package as write

WIDTHS = (256, 768, 2048)
SPECS = {width: norm_specs(width, BLOCK_PARTS) for width in WIDTHS}
SMALL_BLOCK = NormForward(192, "block_norm", False, False, 1e-6, None, False, False, False, block=64)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    specs = [*(spec for width in WIDTHS for spec in SPECS[width]), SMALL_BLOCK]
    return write(tmp_path_factory.mktemp("blocks") / "rendered_blocks", specs)


def near(found: Tensor, exact: Tensor) -> bool:
    size = exact.abs().amax(-1, keepdim=True) if exact.numel() else 0.0
    return found.shape == exact.shape and bool(((found.double() - exact).abs() <= 1e-5 * size + 1e-12).all())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heavy", [False, True])
def test_against_float64(package, width, heavy):
    inputs = random_inputs(17, width, torch.float32, heavy=heavy)
    exact = {name: tensor.double() for name, tensor in inputs.tensors.items()}
    for spec in SPECS[width]:
        if isinstance(spec, NormForward):
            dtype = [] if spec.quantize else [torch.float32]
            got = package.run(spec, *(inputs.tensors[name] for name in spec.parameters), *dtype)
            expected = exact_forward(spec, exact)
        else:
            gradients = exact_gradients(spec, inputs)
            got, expected = package.run(spec, *arguments_of(spec, inputs)), gradients["dx"]
            if spec.add:
                error = (got["dadd"][0] - gradients["dadd"]).abs()
                assert (error <= 1e-5 * gradients["dadd"].abs().sum()).all()
        if spec.quantize:
            value = dequantize(Quantized(got["values"], got["scale"])).double()
            allowed = 2.0**-4 * expected.abs() + 2.0**-10 * got["scale"].double()
            assert ((value - expected).abs() <= allowed + 1e-5 * expected.abs().amax()).all()
        else:
            assert near(got.get("out", got.get("dx")), expected)


def test_a_block_of_another_size_is_torchs_own(package):
    x = torch.randn(5, 192)
    assert near(package.run(SMALL_BLOCK, x)["out"], BlockNorm(64)(x.double()))


def test_zeros_infinities_and_nan_are_those_of_torch():
    x = torch.randn(6, 512)
    x[0], x[1, :256], x[2, 3], x[3, 300], x[4, 511] = 0.0, 0.0, torch.inf, torch.nan, -torch.inf
    grad = torch.randn(6, 512)
    leaf = x.clone().requires_grad_()
    expected = F.hardswish(BlockNorm()(leaf))
    expected.backward(grad)
    got = norm_reference.norm_forward(x, norm="block_norm", eps=1e-6, activation="hardswish").y
    back = norm_reference.norm_backward(grad, x=x, norm="block_norm", eps=1e-6, activation="hardswish").x
    assert torch.allclose(got, expected.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
    # torch's own gradient of a block with an infinite element is NaN all over or in places; both poison the block.
    finite = x.unflatten(1, (2, 256)).isfinite().all(2).repeat_interleave(256, dim=1)
    assert torch.allclose(back[finite], leaf.grad[finite], rtol=1e-4, atol=1e-3)
    for row, block in ((2, slice(0, 256)), (3, slice(256, 512)), (4, slice(256, 512))):
        assert leaf.grad[row, block].isnan().any()
        assert back[row, block].isnan().any()


def test_nothing_is_saved_for_the_backward():
    forward = NormForward(2048, "block_norm", False, False, 1e-6, "hardswish", False, True, save=True)
    backward = NormBackward(2048, "block_norm", False, False, 1e-6, "hardswish", False, True)
    assert forward.results == ("values", "scale", "scale_max")
    assert backward.parameters == ("grad", "x")
    assert backward.function == "block_norm_hardswish_backward_e4m3_eps_1e_06"
