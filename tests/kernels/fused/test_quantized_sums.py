"""Modes of quantization with products, residuals, kept sums and carried gradients: text, references, refusals."""

from __future__ import annotations

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantization import Quantization
from tests.support.kernels.drawn_inputs import check_mode, last_arguments
from tests.support.kernels.product_cases import arguments, exact, inputs_of
from tests.support.kernels.quantized_cases import sum_specs
from tests.support.kernels.rendered_cases import write_package


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    every = [spec for width in (13, 512) for spec in sum_specs(width)]
    return write_package(tmp_path_factory.mktemp("sums") / "rendered_mode_sums", every)


@pytest.mark.parametrize("width", [13, 512])
def test_every_mode_against_float64(package, width):
    tensors = inputs_of(33, width, torch.float32)
    for spec in sum_specs(width):
        forward = isinstance(spec, NormForward)
        known = exact(spec, tensors, spec.residual if forward else spec.summed)
        y = known["y" if forward else "dx"]
        last = last_arguments(spec, y)
        dtype = [torch.float32] if forward and spec.takes_dtype else []
        got = package.run(spec, *arguments(spec, tensors, known), *last, *dtype)
        check_mode(got, spec, y, 1e-4 * y.abs().amax(1, keepdim=True), last)
        for name in ("kept", "residual_grad_out"):
            assert (name in got) == (name in spec.results)
            if name in got:
                torch.testing.assert_close(got[name].double(), known[name], rtol=1e-4, atol=1e-3)


def test_a_maximum_alone_keeps_and_carries_nothing():
    how = Quantization("maximum")
    with pytest.raises(InputError, match="keeps no sum"):
        NormForward(512, None, False, False, 0.0, None, True, True, False, keep=True, how=how)
    with pytest.raises(InputError, match="has no residual_grad_out"):
        NormBackward(
            512, "block_norm", False, False, 1e-5, None, True, True, summed=True, residual_grad_out=True, how=how
        )
