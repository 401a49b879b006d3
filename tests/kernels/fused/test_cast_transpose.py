"""CastTranspose without a GPU: text, refusals, the reference, and compilation for sm_90."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused.matrix_kernels import CastTranspose
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.quantization import Quantization
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import quantize
from tests.support.kernels.ptx_registers import unset_halves
from tests.support.kernels.quantized_cases import CAST_TRANSPOSES, modes
from tests.support.kernels.rendered_cases import write_package
from tests.support.pairwise import fields_of, pairwise

COMPILED = pairwise(
    itertools.product(CAST_TRANSPOSES, ("bf16", "fp32")), lambda case: {**fields_of(case[0].how), "element": case[1]}
)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("transposed") / "rendered_cast_transpose", CAST_TRANSPOSES)


@pytest.mark.parametrize("how", [how for how in modes() if how.scaling not in ("static", "tensorwise")], ids=str)
def test_only_one_scale_serves_both_copies(how):
    with pytest.raises(InputError, match="one scale for both copies"):
        CastTranspose(how)


@pytest.mark.parametrize("shape", [(1, 13), (13, 1), (17, 479), (256, 128), (0, 24)])
def test_both_copies_are_the_quantizers(package, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100.0
    if x.numel() > 100:
        x[3, 5], x[4, 6], x[7] = torch.nan, -torch.inf, 0.0
    maxima = torch.cat([torch.zeros(2), norm_reference.largest_magnitude(x)])
    for spec in CAST_TRANSPOSES:
        how = spec.how
        if how.scaling == "tensorwise":
            got = package.run(spec, x, maxima)
            whole = quantize(x, format=how.format, scaling=Scaling.TENSORWISE, power_of_two=how.power_of_two)
            assert torch.equal(got["scale"], whole.scale)
            expected = whole.values
        else:
            scale = torch.full((1, 1), 0.25 if how.power_of_two else 0.3)
            got = package.run(spec, x, scale)
            expected, amax, overflow = norm_reference.quantize_static(x, scale, how.format.value)
            assert (got["amax"], got["overflow"]) == (amax, overflow)
            if x.numel() > 100:
                assert (overflow.item() > 0) == (how.format is Format.E4M3)
        assert torch.equal(got["values"].view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(got["transposed"].view(torch.uint8), expected.view(torch.uint8).t())
        assert got["transposed"].is_contiguous()
        assert got["transposed"].data_ptr() != got["values"].data_ptr() or not x.numel()


def test_no_matrix_is_refused(package):
    spec = CastTranspose(Quantization("static"))
    with pytest.raises(InputError, match="floating matrix"):
        package.run(spec, torch.ones(2, 3, 4), torch.ones(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "element"), COMPILED, ids=str)
@pytest.mark.usefixtures("triton_cache")
def test_it_compiles_for_hopper(package, spec, element, tmp_path):
    from tests.support.kernels.sm90 import SHARED, compiled, spilled

    binary = compiled(package, spec, element)
    ptx = binary.asm["ptx"]
    assert not unset_halves(ptx)
    assert binary.metadata.shared <= SHARED
    assert spilled(binary, tmp_path) == 0
    assert f"cvt.rn.satfinite.{spec.how.format.value}x2.f32" in ptx
    assert "ld.global.v4.b32" in ptx
    assert len(re.findall(r"st\.global\.v4\.b32", ptx)) >= 2  # both copies in whole vectors
