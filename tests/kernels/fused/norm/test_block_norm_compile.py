"""BlockNorm's kernels compile for sm_90: sums stay inside a warp, nothing spills, FP8 by the GPU's conversion."""

from __future__ import annotations

import pytest

from tests.support.kernels.ptx_registers import unset_halves
from tests.support.kernels.rendered_cases import BLOCK_PARTS, norm_specs, reads_sixteen_bytes, write_package
from tests.support.kernels.sm90 import SHARED, compiled, spilled
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("triton_cache")


SPECS = pairwise(spec for width in (256, 768, 2048, 4096, 8192) for spec in norm_specs(width, BLOCK_PARTS[1:3]))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("compiled") / "blocks_for_sm_90", SPECS)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.function)
def test_it_compiles_for_hopper(package, spec, tmp_path):
    binary = compiled(package, spec)
    ptx = binary.asm["ptx"]
    assert not unset_halves(ptx)
    assert binary.metadata.shared <= SHARED
    assert spilled(binary, tmp_path) == 0
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == spec.quantize
    assert reads_sixteen_bytes(ptx)
    if not spec.quantize and not spec.add and spec.width in (2048, 4096, 8192):
        assert "bar.sync" not in ptx  # a block is within a warp, and nothing else is summed
