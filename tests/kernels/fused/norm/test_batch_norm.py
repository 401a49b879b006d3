"""BatchNorm's kernels without a GPU: the reference against torch's own in float64, refusals, sm_90."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from tests.support.kernels.batch_norm_cases import case_of, check, specs
from tests.support.kernels.ptx_registers import unset_halves
from tests.support.kernels.rendered_cases import Package, reads_sixteen_bytes, write_package
from tests.support.pairwise import pairwise

WIDTHS = (13, 48, 512)
WIDE = pairwise(spec for width in (256, 1024, 2048, 4096) for spec in specs(width))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    made = [*(spec for width in WIDTHS for spec in specs(width)), *WIDE]
    return write_package(tmp_path_factory.mktemp("batch_norm") / "rendered_batch_norm", made)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("evaluation", [False, True])
def test_it_is_torchs_own(package: Package, width: int, evaluation: bool) -> None:
    for spec in specs(width):
        for rows in (7, 17):
            case = case_of(spec, rows, torch.float32, evaluation=evaluation)
            plain = [torch.float32] if isinstance(spec, NormForward) and not spec.quantize else []
            check(spec, package.run(spec, *case.given(spec), *plain), case, 2e-4)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (lambda: NormForward(8, "batch_norm", weight=True), "has add and weight"),
        (lambda: NormForward(8, "batch_norm", weight=True, add=True, residual=True), "the product itself"),
        (lambda: NormForward(8, "batch_norm", weight=True, add=True, activation="gate_sigmoid"), "no gate"),
        (lambda: NormForward(2**15, "batch_norm", weight=True, add=True), "more than the 16384"),
        (lambda: NormBackward(8, "layer_norm", sums_only=True), "only of a batch_norm"),
    ],
)
def test_what_its_kernels_do_not_do_is_refused(spec, reason) -> None:
    with pytest.raises(InputError, match=reason):
        spec()


@pytest.mark.slow
@pytest.mark.usefixtures("triton_cache")
@pytest.mark.parametrize("spec", WIDE, ids=lambda spec: f"{spec.function}_{spec.width}")
def test_it_compiles_for_hopper(package: Package, spec: NormForward | NormBackward, tmp_path: Path) -> None:
    from tests.support.kernels.sm90 import SHARED, compiled, spilled

    binary = compiled(package, spec)
    assert not unset_halves(binary.asm["ptx"])
    assert binary.metadata.shared <= SHARED
    assert spilled(binary, tmp_path) == 0
    assert ("cvt.rn.satfinite.e4m3x2.f32" in binary.asm["ptx"]) == spec.quantize
    assert reads_sixteen_bytes(binary.asm["ptx"])
