"""Rendered kernels compile for sm_90 without a GPU: shared memory under the limit, hardly a spill, FP8 conversions."""

from __future__ import annotations

import re

import pytest

from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from tests.support.kernels.aligned_cases import ALIGNED
from tests.support.kernels.ptx_registers import rounding_errors, unset_halves
from tests.support.kernels.rendered_cases import PARTS, norm_specs, write_package
from tests.support.kernels.sm90 import SHARED, compiled, launches, spilled
from tests.support.pairwise import pairwise

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("triton_cache")]


WIDTHS = (13, 479, 1024, 2048, 8192, 8256)
WIDEST = ("layer_norm", True, True, "silu", True)
SPECS = [
    *[spec for width in WIDTHS for spec in norm_specs(width, [WIDEST])[:2]],
    *pairwise(spec for spec in norm_specs(512, PARTS) if spec.quantize and not isinstance(spec, NormBackward)),
    *[
        spec
        for name in ("tanh", "leaky_relu(0.2)")
        for spec in norm_specs(2048, [(None, False, False, name, True)])[:2]
    ],
    *[
        spec
        for width in (1344, 2048)
        for spec in norm_specs(
            width, [(None, False, False, "silu", False), ("layer_norm", True, True, "sigmoid", True)]
        )
        if spec.multiplied
    ],
    *map(RequantizeTranspose, (1, 3)),
    *map(Reduce, (1, 6)),
    *ALIGNED[::2],
]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    return write_package(folder / "rendered_for_sm_90", SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.function)
def test_it_compiles_for_hopper(package, spec, tmp_path):
    binary = compiled(package, spec)
    assert binary.metadata.shared <= SHARED
    converts = "cvt.rn.satfinite.e4m3x2.f32" in binary.asm["ptx"]
    assert not unset_halves(binary.asm["ptx"])
    assert not rounding_errors(binary.asm["ptx"])
    assert converts == ("values" in spec.results or isinstance(spec, RequantizeTranspose))
    if getattr(spec, "width", 0) <= 8192:
        # Wide backwards with an activation fill the registers: see configs.py.
        full = isinstance(spec, NormBackward) and spec.activation is not None and spec.width >= 1024
        assert spilled(binary, tmp_path) <= (16 if full else 2)


@pytest.mark.parametrize("element", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", [NormForward, NormBackward])
def test_other_dtypes_and_odd_addresses(package, kind, element, tmp_path):
    spec = next(s for s in SPECS if isinstance(s, kind) and s.width == 2048 and s.add and s.quantize)
    for aligned in (True, False):
        assert spilled(compiled(package, spec, element, aligned), tmp_path) <= 2


def test_neither_a_sigmoid_nor_finiteness_takes_a_division_or_a_selection(package):
    spec = next(s for s in SPECS if isinstance(s, NormForward) and s.width == 2048 and s.activation == "silu")
    ptx = compiled(package, spec).asm["ptx"]
    held = 2048 // (32 * launches(package, spec)[-1].warps)  # elements of a thread
    assert ptx.count("ex2.approx.ftz.f32") == held
    assert ptx.count("rsqrt.approx.ftz.f32") == held + 1
    assert ptx.count("div.full.f32") <= 2  # of a mean and of a variance
    assert ptx.count("selp") < held


def test_rows_are_read_and_written_in_vectors(package):
    spec = next(s for s in SPECS if isinstance(s, NormForward) and s.width == 2048 and s.quantize)
    ptx = compiled(package, spec).asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert re.search(r"st\.global(\.v[24])?\.b(32|64)", ptx)
    transposed = compiled(package, RequantizeTranspose(1)).asm["ptx"]
    assert "ld.global.v4.b32" in transposed
    assert "st.global.v4.b32" in transposed
