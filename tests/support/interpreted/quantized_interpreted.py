"""Run by test_interpreted.py: indexing and masks of modes.

The interpreter rounds to FP8 wrongly, so values are compared where they are FP8 already: scales that are powers of two,
elements of one bit of mantissa. Scales, maxima and counts are float32 and integers, and compared everywhere.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from loka.kernels.fused import operators
from loka.kernels.fused.matrix_kernels import CastTranspose
from tests.support.interpreted.faster_interpreter import PROGRAMS
from tests.support.interpreted.rendered_interpreted import results
from tests.support.kernels.quantized_cases import CAST_TRANSPOSES, specs
from tests.support.kernels.rendered_cases import Package, arguments_of, random_inputs, write_package
from tests.support.pairwise import pairwise

TILES = 6  # of 128 x 128, no fewer than the matrices have
WIDTHS = (13, 200, 256, 624)  # of several rows at a step or one; blocks that are filled or not
SPECS = pairwise(spec for width in WIDTHS for spec in specs(width))
ROWS = (1, 17)


def coarse(rows: int, width: int) -> Tensor:
    """Elements +-2**k and +-1.5 * 2**k from 1 to 384, rows of different sizes: exact in both formats."""
    generator = torch.Generator().manual_seed(rows + width)
    exponents = torch.randint(0, 9, (rows, width), generator=generator).float()
    signs = torch.randint(0, 2, (rows, width), generator=generator) * 2 - 1
    halves = 1.0 + 0.5 * torch.randint(0, 2, (rows, width), generator=generator)
    return 2.0**exponents * halves * signs * 2.0 ** (torch.arange(rows) % 5)[:, None]


def last_arguments(spec, y: Tensor) -> list[Tensor]:
    known = torch.tensor([[2.0**-5 if spec.how.limit > 448.0 else 1.0]])
    maxima = torch.zeros(1030)
    maxima[-1] = y.abs().amax()
    return [{"scale": known, "maxima": maxima}[name] for name in spec.how.parameters]


def check(package: Package, spec, arguments: list[Tensor], exact: bool) -> int:
    """Compares the kernel, interpreted, with the reference; how many results."""
    got, expected = results(package, spec, *arguments), package.run(spec, *arguments)
    for name in spec.results:
        ours, theirs = got[name].float(), expected[name].float()
        if name == "values":
            assert ours.shape == theirs.shape
            assert not exact or torch.equal(ours, theirs), spec
        elif name in ("amax", "overflow", "scale_max"):
            assert ours.shape == (PROGRAMS,)
            total = ours.sum() if name == "overflow" else ours.max()
            assert torch.isclose(total, theirs.sum(), rtol=1e-5, atol=0.0), (spec, name)
        elif name == "scale":
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=0.0), spec
    return len(spec.results)


def check_transposed(package: Package, spec: CastTranspose, x: Tensor) -> int:
    """Both copies, and what comes with them; a grid of more tiles than there are writes nothing more."""
    arguments = [x, *last_arguments(spec, x)]
    got, expected = results(package, spec, *arguments), package.run(spec, *arguments)
    for name in ("values", "transposed"):
        assert got[name].shape == expected[name].shape
        assert not spec.how.power_of_two or torch.equal(got[name].float(), expected[name].float()), (spec, name)
    if spec.how.scaling == "tensorwise":
        assert torch.allclose(got["scale"], expected["scale"], rtol=1e-6)
        return 3
    assert got["amax"].max() == expected["amax"]
    assert got["overflow"].sum() == expected["overflow"]
    return 4


def main(folder: Path) -> int:
    """All checks; returns how many results were compared."""
    package = write_package(folder / "modes_interpreted", [*SPECS, *CAST_TRANSPOSES])
    operators.tiles = lambda x, side: TILES
    compared = 0
    for number, spec in enumerate(SPECS):
        bare, rows = spec.norm is None and spec.activation is None, ROWS[number % 2]
        x = coarse(rows, spec.width)
        given = [x] if bare else arguments_of(spec, random_inputs(rows, spec.width, torch.float32))
        compared += check(package, spec, [*given, *last_arguments(spec, x)], bare and spec.how.power_of_two)
    for spec in CAST_TRANSPOSES:
        for shape in ((1, 13), (130, 200), (257, 128)):
            compared += check_transposed(package, spec, coarse(*shape))
    return compared
