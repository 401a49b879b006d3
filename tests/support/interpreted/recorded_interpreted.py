"""Run by test_interpreted.py: what is recorded, and the tiles of transpositions.

The interpreter rounds to FP8 wrongly, so values are compared where they are FP8 already.
"""

from __future__ import annotations

from pathlib import Path

import torch

from loka.kernels.fused import operators
from loka.kernels.fused.norm.fused_cast_transpose import FusedCastTranspose
from tests.support.interpreted.quantized_interpreted import TILES, coarse
from tests.support.interpreted.rendered_interpreted import near, results
from tests.support.kernels.recorded_cases import (
    CAST_TRANSPOSES,
    TRANSPOSES,
    fused_cast_transposes,
    largest_of,
    new_record,
    recorded,
)
from tests.support.kernels.rendered_cases import Package, arguments_of, random_inputs, write_package
from tests.support.pairwise import fields_of, pairwise


def same_record(package: Package, spec, arguments: list[torch.Tensor]) -> None:
    """Two launches add to one record what two calls of the reference do; values that are FP8 already agree."""
    ours, theirs = new_record(), new_record()
    for _ in range(2):
        got = results(package, spec, *arguments, ours)
        expected = package.run(spec, *arguments, theirs)
    assert ours[0] == theirs[0], (spec, ours, theirs)
    assert abs(largest_of(ours) - largest_of(theirs)) <= 1e-5 * largest_of(theirs), spec
    bare = "x" in spec.parameters and len(arguments) == 2 and not getattr(spec, "activation", None)
    for name in ("values", "transposed"):
        if name in got:
            assert got[name].shape == expected[name].shape
            exact = bare and spec.how.power_of_two
            assert not exact or torch.equal(got[name].float(), expected[name].float()), (spec, name)


def same_tiles(package: Package, both: FusedCastTranspose, arguments: list[torch.Tensor]) -> None:
    """One launch against the reference: what is float32 or counted, the tiles' places, and most of the values."""
    ours, theirs = new_record(), new_record()
    got, expected = results(package, both, *arguments, ours), package.run(both, *arguments, theirs)
    assert abs(int(ours[0]) - int(theirs[0])) <= 1, (both, ours, theirs)
    assert abs(largest_of(ours) - largest_of(theirs)) <= 1e-5 * largest_of(theirs), both
    values, wanted = got["values"].float(), expected["values"].float()
    assert torch.equal(got["transposed"].float().t(), values), both
    assert torch.isclose(values, wanted, rtol=0.13, atol=0.01).float().mean() > 0.9, both
    if "dadd" in got:
        assert near(got["dadd"].sum(0, keepdim=True), expected["dadd"]), both


def check_norm(package: Package, spec, rows: int) -> None:
    """A norm under a static scale, with an element that is not finite."""
    inputs = random_inputs(rows, spec.width, torch.float32)
    inputs.tensors["x"][0, 1] = torch.inf
    scale = torch.full((1, 1), 2.0**-5 if spec.norm or spec.activation else 1.0) * 448.0 / spec.how.limit
    tensors = arguments_of(spec, inputs) if spec.norm or spec.activation else [coarse(rows, spec.width)]
    same_record(package, spec, [*tensors, scale])


def main(folder: Path) -> int:
    """All checks; returns how many kernels were compared."""
    widths = (13, 200, 256, 624)
    norms = pairwise(spec for width in widths for spec in recorded(width))
    fused = [both for width in (13, 200, 512) for both in fused_cast_transposes(width)]
    local = pairwise(fused, lambda both: fields_of(both.spec))
    package = write_package(folder / "recorded_interpreted", [*norms, *CAST_TRANSPOSES, *TRANSPOSES, *local])
    operators.tiles = lambda x, side: TILES
    compared = 0
    for spec in norms:
        for rows in (1, 17):
            check_norm(package, spec, rows)
            compared += 1
    # A row of tiles more than there are.
    operators.programs = lambda x, rows, per_multiprocessor: -(-len(x) // rows) + 1
    for both in local:
        for rows in (1, 17, 130):
            inputs = random_inputs(rows, both.spec.width, torch.float32)
            same_tiles(package, both, [*arguments_of(both.spec, inputs), torch.full((1, 1), 2.0**-5)])
            compared += 1
    for spec in CAST_TRANSPOSES:
        for shape in ((1, 13), (130, 200), (257, 128)):
            same_record(package, spec, [coarse(*shape), torch.ones(1, 1) * 448.0 / spec.how.limit])
            compared += 1
    for spec in TRANSPOSES:
        matrices = [coarse(*shape).to(torch.float8_e5m2) for shape in ((130, 200), (1, 13), (257, 16))]
        got = list(results(package, spec, *matrices[: spec.count]).values())
        for ours, values in zip(got, matrices, strict=False):
            assert torch.equal(ours.view(torch.uint8), values.view(torch.uint8).t())
        compared += 1
    return compared
