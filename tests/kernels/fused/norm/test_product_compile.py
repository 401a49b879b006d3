"""Kernels with products and residuals compile for sm_90 without a GPU: shared memory, spills, vectors."""

from __future__ import annotations

import re
import subprocess

import pytest

from loka.kernels.fused.matrix_kernels import Products
from loka.kernels.fused.norm.norm_values import configuration
from tests.support.kernels.product_cases import every
from tests.support.kernels.ptx_registers import unset_halves
from tests.support.kernels.rendered_cases import reads_sixteen_bytes, write_package
from tests.support.kernels.sm90 import CUOBJDUMP, SHARED, compiled, spilled
from tests.support.pairwise import pairwise

pytestmark = pytest.mark.usefixtures("triton_cache")


SPECS = pairwise(spec for spec in every(3456) if isinstance(spec, Products) or spec.quantize)
SPECS += pairwise(spec for spec in every(2048) if not isinstance(spec, Products) and spec.norm == "block_norm")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("compiled") / "products_for_sm_90", SPECS)


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.function)
def test_it_compiles_for_hopper_without_spills(package, spec, tmp_path):
    binary = compiled(package, spec, odd="m")
    assert binary.metadata.shared <= SHARED
    assert spilled(binary, tmp_path) <= 2
    assert reads_sixteen_bytes(binary.asm["ptx"])  # eight of bfloat16 at a time
    assert not unset_halves(binary.asm["ptx"])
    assert ("cvt.rn.satfinite.e4m3x2.f32" in binary.asm["ptx"]) == ("values" in spec.results)


BARE = [spec for spec in SPECS if not isinstance(spec, Products) and spec.norm is None and spec.activation is None]


@pytest.mark.slow
@pytest.mark.parametrize("spec", BARE, ids=lambda spec: spec.function)
def test_all_programs_fit_on_a_multiprocessor_at_once(package, spec, tmp_path):
    """A program loops over rows, so one that has to wait for another to end would double the time."""
    spilled(compiled(package, spec, odd="m"), tmp_path)  # writes the cubin
    said = subprocess.run(
        [CUOBJDUMP, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    )
    registers = -(-int(re.search(r"REG:(\d+)", said.stdout).group(1)) // 8) * 8
    launched = configuration(spec)
    assert registers * 32 * launched.warps * launched.programs <= 65536
