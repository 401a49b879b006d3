"""Quantizers of odd widths on a Hopper GPU: what the reference writes."""

from __future__ import annotations

import pytest
import torch

from tests.support.gpu import ON_GPU
from tests.support.kernels.aligned_cases import ALIGNED
from tests.support.kernels.rendered_cases import Package, write_package

pytestmark = ON_GPU


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_package(tmp_path_factory.mktemp("aligned") / "aligned_rows", ALIGNED)


@pytest.mark.parametrize("spec", ALIGNED, ids=lambda spec: spec.function)
def test_on_a_gpu_it_is_the_reference(package: Package, spec) -> None:
    for rows in (1, 17, 4093):
        x = torch.randn(rows, spec.width, device="cuda", dtype=torch.bfloat16)
        got, expected = package.run(spec, x), package.run(spec, x.cpu())
        assert torch.equal(got["values"].cpu().view(torch.uint8), expected["values"].view(torch.uint8))
        assert torch.equal(got["scale"].cpu(), expected["scale"])
