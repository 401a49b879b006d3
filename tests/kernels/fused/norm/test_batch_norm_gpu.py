"""BatchNorm's kernels on a Hopper GPU: every width's configuration, against torch's own in float64."""

from __future__ import annotations

import pytest
import torch

from loka.kernels.fused.norm.norm_spec import NormForward
from tests.support.gpu import ON_HOPPER
from tests.support.kernels.batch_norm_cases import case_of, check, specs
from tests.support.kernels.rendered_cases import write_package

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

WIDTHS = (13, 256, 512, 1100, 2048, 4096, 16384)
ALL = 512  # this width is checked with every activation, in bfloat16


def chosen(width):
    """All specs at one width; elsewhere, where only the launch differs, each kernel once with each kind of mask."""
    few = {("relu", True, 0.25), ("leaky_relu(0.2)", False, 0.0)}
    return [spec for spec in specs(width) if width == ALL or (spec.activation, spec.bias, spec.dropout) in few]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    made = [spec for width in WIDTHS for spec in chosen(width)]
    return write_package(tmp_path_factory.mktemp("gpu") / "batch_norm_gpu", made)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", [7, 17, 4093])
def test_every_width_against_float64(package, width, rows):
    for spec in chosen(width):
        for dtype in (torch.bfloat16,) if width == ALL else (torch.bfloat16, torch.float32):
            case = case_of(spec, rows, dtype, "cuda")
            plain = [dtype] if isinstance(spec, NormForward) and not spec.quantize else []
            check(spec, package.run(spec, *case.given(spec), *plain), case, 1e-3)
