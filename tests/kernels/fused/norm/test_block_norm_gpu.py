"""BlockNorm's kernels on a Hopper GPU: every width's configuration, corners, against float64 and the CPU reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.gpu import ON_HOPPER
from tests.support.kernels.fp8_codes import ordered
from tests.support.kernels.norm_checks import check_norm
from tests.support.kernels.rendered_cases import BLOCK_PARTS, arguments_of, norm_specs, random_inputs, write_package

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

WIDTHS = (256, 512, 768, 1024, 2048, 3584, 4096, 8192, 16384)  # each a configuration of its own, or masked
SPECS = {width: norm_specs(width, BLOCK_PARTS) for width in WIDTHS}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    specs = [spec for width in WIDTHS for spec in SPECS[width]]
    return write_package(tmp_path_factory.mktemp("gpu") / "rendered_blocks_gpu", specs)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_width_against_float64(package, width, dtype):
    for rows in (1, 17, 4093) if dtype is torch.bfloat16 else (17,):
        for heavy in (False, True):
            inputs = random_inputs(rows, width, dtype, "cuda", heavy)
            for spec in SPECS[width]:
                check_norm(package, spec, inputs)


def test_zeros_infinities_and_nan_are_those_of_the_reference(package):
    inputs = random_inputs(17, 2048, torch.bfloat16, "cuda")
    x = inputs.tensors["x"]
    x[0], x[1, :256], x[2, 3], x[3, 300], x[4, 2047] = 0.0, 0.0, torch.inf, torch.nan, -torch.inf
    for spec in SPECS[2048]:
        arguments = arguments_of(spec, inputs)
        got, expected = package.run(spec, *arguments), package.run(spec, *(a.cpu() for a in arguments))
        if spec.quantize:
            assert torch.equal(got["scale"].cpu(), expected["scale"])
            assert steps_apart(got["values"].cpu(), expected["values"]) <= 1
        else:
            name = "out" if "out" in got else "dx"
            torch.testing.assert_close(got[name].cpu(), expected[name], rtol=2e-2, atol=1e-3, equal_nan=True)


def steps_apart(ours: Tensor, theirs: Tensor) -> int:
    """How many e4m3 values lie between; a NaN on one side alone is far off."""
    ours, theirs = (torch.where(v.float().isnan(), 10**6, ordered(v)) for v in (ours, theirs))
    return int((ours - theirs).abs().max())
