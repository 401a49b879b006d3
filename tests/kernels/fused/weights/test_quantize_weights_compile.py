"""The kernels of several weights compile for sm_90 without a GPU: no spill, FP8 conversions, vectors."""

from __future__ import annotations

import re

import pytest

from loka.kernels.fused.quantize_weights import QuantizeWeights
from tests.support.kernels.ptx_registers import unset_halves
from tests.support.kernels.rendered_cases import Package, write_package
from tests.support.kernels.sm90 import SHARED, compiled, spilled
from tests.support.kernels.weight_cases import WEIGHTS, WIDE, weights_of, widths_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("triton_cache")]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return write_package(tmp_path_factory.mktemp("compiled") / "weights_for_sm_90", [*WEIGHTS, *WIDE])


@pytest.mark.parametrize("spec", [*WEIGHTS, *WIDE], ids=widths_of)
def test_it_compiles_for_hopper(package: Package, spec: QuantizeWeights, tmp_path) -> None:
    binary = compiled(package, spec, "fp32" if spec in WEIGHTS[::2] else "bf16")
    assert binary.metadata.shared <= SHARED
    assert "cvt.rn.satfinite.e4m3x2.f32" in binary.asm["ptx"]
    assert not unset_halves(binary.asm["ptx"])
    assert spilled(binary, tmp_path) <= 2


def test_rows_at_odd_addresses(package: Package, tmp_path) -> None:
    assert spilled(compiled(package, WEIGHTS[3], aligned=False), tmp_path) <= 2


@pytest.mark.parametrize("spec", [weights_of(1024, 1024), weights_of(512, 2048, 48, 3456)], ids=widths_of)
def test_rows_are_read_and_written_in_vectors(package: Package, spec: QuantizeWeights) -> None:
    ptx = compiled(package, spec).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert re.search(r"st\.global(\.v[24])?\.b(32|64)", ptx)
    assert not re.search(r"ld\.global\.b(8|16) ", ptx)
