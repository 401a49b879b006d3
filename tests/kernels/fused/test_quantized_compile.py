"""Modes of quantization compile for sm_90 without a GPU: FP8 by the GPU's own conversion, nothing spilled."""

from __future__ import annotations

import itertools

import pytest

from loka.kernels.fused.norm.norm_spec import NormForward
from loka.numerics.enums import Format
from tests.support.kernels.ptx_registers import unset_halves
from tests.support.kernels.quantized_cases import modes, specs
from tests.support.kernels.rendered_cases import reads_sixteen_bytes, write_package
from tests.support.kernels.sm90 import SHARED, compiled, spilled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("triton_cache")]


ONE_FORMAT = [how for how in modes() if how.format is Format.E4M3 or how.scaling == "static"]
CASES = list(itertools.product((13, 479, 2048), ONE_FORMAT))


def kinds(width, how):
    """What is compiled in a mode: forwards, and backwards that are not full of sums."""
    return [spec for spec in specs(width, [how]) if spec.norm in (None, "block_norm") or isinstance(spec, NormForward)]


# Each mode and width once, with one kind after the other; under static scales a quantizer alone, too.
SPECS = [kinds(*case)[index % len(kinds(*case))] for index, case in enumerate(CASES)]
SPECS = list(dict.fromkeys([*SPECS, *(kinds(2048, how)[0] for how in ONE_FORMAT if how.scaling == "static")]))


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("compiled") / "modes_for_sm_90", SPECS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.function)
def test_it_compiles_for_hopper(package, spec, tmp_path):
    binary = compiled(package, spec)
    ptx = binary.asm["ptx"]
    assert not unset_halves(ptx)
    assert binary.metadata.shared <= SHARED
    assert spilled(binary, tmp_path) == 0
    assert (f"cvt.rn.satfinite.{spec.how.format.value}x2.f32" in ptx) == ("values" in spec.results)
    if spec.width == 2048:
        assert reads_sixteen_bytes(ptx)
    if spec.how.scaling == "static" and spec.width == 2048 and spec.norm is None:
        # Maximum and count stay in the threads: what crosses warps comes after the last row.
        loop = ptx[: ptx.rindex("cvt.rn.satfinite")]
        assert "bar.sync" not in loop
