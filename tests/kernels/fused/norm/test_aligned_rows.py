"""Quantized rows with zeros behind them, up to a size that the GEMM takes: one pass over what is not aligned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from loka.codegen.chains.chain_shapes import quantizer
from loka.errors import InputError
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.quantization import Quantization
from tests.support.kernels.aligned_cases import ALIGNED, ROWS
from tests.support.kernels.rendered_cases import Package, write_package


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_package(tmp_path_factory.mktemp("aligned") / "aligned_rows", ALIGNED)


@pytest.mark.parametrize("spec", ALIGNED, ids=lambda spec: spec.function)
def test_the_reference_is_the_quantizer_of_padded_rows(package: Package, spec) -> None:
    for rows in (0, *ROWS):
        x = torch.randn(rows, spec.width, dtype=torch.bfloat16)
        got = package.run(spec, x)
        values, scale, _ = norm_reference.quantize_rows(F.pad(x.float(), (0, spec.aligned - spec.width)))
        assert torch.equal(got["values"].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(got["scale"], scale)
        assert not got["values"][:, spec.width :].view(torch.uint8).any()


@pytest.mark.parametrize(
    ("spec", "change"),
    [
        (quantizer(480, 479), {"aligned": 479}),
        (quantizer(480, 479), {"aligned": 2**15}),
        (quantizer(480, 479), {"add": True}),
        (quantizer(480, 479), {"activation": "silu"}),
        (quantizer(480, 479), {"how": Quantization("blockwise")}),
        (quantizer(480, 479), {"quantize": False, "activation": "silu"}),
    ],
)
def test_what_no_kernel_does_is_refused(spec, change: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"columns of zeros behind them|cannot be made"):
        replace(spec, **change)
