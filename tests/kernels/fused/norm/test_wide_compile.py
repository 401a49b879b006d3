"""Kernels of wide rows compile for sm_90 without a GPU: chunks in shared memory, 16 bytes at a time, hardly a spill."""

from __future__ import annotations

import pytest

from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from tests.support.kernels.ptx_registers import unset_halves
from tests.support.kernels.rendered_cases import PARTS, norm_specs, reads_sixteen_bytes, write_package
from tests.support.kernels.sm90 import SHARED, launches, spilled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("triton_cache")]


WIDTH = 123200
ALL = ("layer_norm", True, True, "silu", True)
SPECS = [
    *norm_specs(WIDTH, PARTS[-1:])[:1],
    NormForward(WIDTH, *ALL[:3], 1e-5, "silu", True, True, True, times=True, residual=True, keep=True),
    NormBackward(
        WIDTH,
        *ALL[:3],
        1e-5,
        "silu",
        True,
        True,
        times=True,
        summed=True,
        residual_grad_in=True,
        residual_grad_out=True,
    ),
    *norm_specs(32768, [("block_norm", False, False, "hardswish", True)])[:2],
]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("compiled") / "wide_for_sm_90", SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.function)
def test_it_compiles_for_hopper(package, spec, tmp_path):
    found = launches(package, spec)
    sums = isinstance(spec, NormBackward) and spec.norm == "layer_norm"
    maxima = isinstance(spec, NormBackward) and spec.quantize
    assert len(found) == 1 + sums + maxima
    for launch in found:
        name, binary = launch.kernel.__name__, launch.compiled(odd="parts" if "parts" in launch.given else "m")
        assert binary.metadata.shared <= SHARED
        assert spilled(binary, tmp_path) <= 8, name
        assert reads_sixteen_bytes(binary.asm["ptx"]), name
        writes = "values" in spec.results and launch is found[-1]
        assert ("cvt.rn.satfinite.e4m3x2.f32" in binary.asm["ptx"]) == writes
        assert not unset_halves(binary.asm["ptx"])


@pytest.mark.parametrize("spec", SPECS[1:3], ids=lambda spec: spec.function)
def test_float32_fits_too(package, spec):
    for launch in launches(package, spec, "fp32"):
        assert launch.compiled().metadata.shared <= SHARED
