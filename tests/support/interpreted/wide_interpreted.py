"""Run by test_interpreted.py: rows in chunks, indexing and masks."""

from __future__ import annotations

from pathlib import Path

import torch

from loka.kernels.fused import operators
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantization import Quantization
from tests.support.interpreted import product_interpreted, recorded_interpreted, rendered_interpreted
from tests.support.interpreted.faster_interpreter import PROGRAMS
from tests.support.interpreted.rendered_interpreted import exact_rows, results
from tests.support.kernels.product_cases import backwards, forwards
from tests.support.kernels.recorded_cases import recorded
from tests.support.kernels.rendered_cases import (
    BLOCK_PARTS,
    PARTS,
    Package,
    arguments_of,
    norm_specs,
    random_inputs,
    write_package,
)
from tests.support.pairwise import pairwise

ODD, EVEN = 16389, 24576  # ends within chunks, forward and backward; whole chunks, and blocks of 256
WIDTHS = (ODD, EVEN)
STATISTICS = NormForward(EVEN, "layer_norm", True, True, 1e-5, None, False, False, True)
MAXIMA: list[NormForward | NormBackward] = [
    NormForward(ODD, None, False, False, 0.0, None, False, True, True, how=Quantization("maximum")),
    NormBackward(ODD, None, False, False, 0.0, "silu", False, True, how=Quantization("maximum")),
]


def parts_of(width: int) -> list[tuple[str | None, bool, bool, str | None, bool]]:
    """All norms but those of blocks, and the rest."""
    return PARTS if width == ODD else [*BLOCK_PARTS, PARTS[0], PARTS[6], *PARTS[-2:]]


def check_statistics(package: Package) -> None:
    """Rows whose chunks lie far apart, and far from zero: a sum of squares would have nothing left of them."""
    x = torch.randn(3, EVEN) + 1e3 + 10.0 * (torch.arange(EVEN) // 8192)
    got = results(package, STATISTICS, x, torch.ones(EVEN), torch.zeros(EVEN))
    assert torch.allclose(got["mean"].double(), x.double().mean(1), rtol=1e-6)
    exact = (x.double().var(1, unbiased=False) + 1e-5).rsqrt()
    assert torch.allclose(got["rstd"].double(), exact, rtol=1e-5), (got["rstd"], exact)


def check_maxima(package: Package) -> None:
    """One number for each program, the largest finite magnitude among what it saw."""
    inputs = random_inputs(5, ODD, torch.float32)
    inputs.tensors["x"][0, ODD - 1] = torch.inf
    forward, backward = MAXIMA
    for spec, given in ((forward, [inputs.tensors["x"]]), (backward, [inputs.grad, inputs.tensors["x"]])):
        got, expected = results(package, spec, *given)["amax"], package.run(spec, *given)["amax"]
        assert abs(got.max() - expected.max()) <= 1e-5 * expected.max(), spec


def check_guessed_scales(package: Package) -> None:
    """Rows whose scale is that of the row that a program had before, or another."""
    spec = NormForward(ODD, None, False, False, 0.0, None, False, True, True)
    x = exact_rows(9, ODD)  # as many powers of two as rows; three rows for each program
    x /= x.abs().amax(1, keepdim=True) / 448.0
    x[6] /= 4.0
    x[7] *= 4.0
    x[8] = 0.0
    got, expected = results(package, spec, x), package.run(spec, x)
    assert torch.equal(got["scale"], expected["scale"])
    assert torch.equal(got["values"].float(), expected["values"].float())


def check_without_rows(package: Package, specs: list[NormForward | NormBackward]) -> None:
    """Without rows, sums are zero."""
    for spec in specs[::5]:
        inputs = random_inputs(0, spec.width, torch.float32)
        arguments = arguments_of(spec, inputs)
        for name, result in results(package, spec, *arguments).items():
            assert result.abs().float().sum() == 0.0, (spec, name)


def main(folder: Path) -> int:
    """All checks; returns how many results of norms were compared."""
    norms = pairwise(spec for width in WIDTHS for spec in norm_specs(width, parts_of(width)))
    summed, known = pairwise([*forwards(ODD), *backwards(ODD)]), pairwise(recorded(ODD))
    alone = [spec for width in WIDTHS for spec in rendered_interpreted.quantizers(width)]
    package = write_package(
        folder / "wide_interpreted", dict.fromkeys([*norms, *summed, *known, *alone, *MAXIMA, STATISTICS])
    )
    operators.row_parts = lambda x, rows, across, per_multiprocessor: PROGRAMS
    rendered_interpreted.ROWS = (5,)
    compared = rendered_interpreted.check_norms(package, norms)
    rendered_interpreted.check_scales(package, norms)
    for width in WIDTHS:
        rendered_interpreted.check_quantizers(package, width)
    compared += product_interpreted.check_norms(package, summed, 5)
    for spec in known:
        recorded_interpreted.check_norm(package, spec, 5)
    check_statistics(package)
    check_maxima(package)
    check_guessed_scales(package)
    check_without_rows(package, norms)
    return compared
