"""Run by test_recorded.py in a process of its own, with TRITON_INTERPRET=1: records, and the tiles of transpositions.

The interpreter rounds to FP8 wrongly, so values are compared where they are FP8 already.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from quantised_interpreted import TILES, coarse
from recorded_cases import TRANSPOSED, TURNED, largest_of, new_record, recorded
from rendered_cases import Package, arguments_of, random_inputs, write_package
from rendered_interpreted import PROGRAMS, poisoned, results

from loka.kernels import operators
from loka.kernels.rendered_specs import NormForward


def same_record(package: Package, spec, arguments: list[torch.Tensor]) -> None:
    """Two launches add to one record what two calls of the reference do; values that are FP8 already agree."""
    ours, theirs = new_record(), new_record()
    for _ in range(2):
        got = results(package, spec, *arguments, ours)
        expected = package.run(spec, *arguments, theirs)
    assert ours[0] == theirs[0], (spec, ours, theirs)
    assert abs(largest_of(ours) - largest_of(theirs)) <= 1e-5 * largest_of(theirs), spec
    bare = "x" in spec.parameters and len(arguments) == 2 and not getattr(spec, "activation", None)
    for name in ("values", "turned"):
        if name in got:
            assert got[name].shape == expected[name].shape
            exact = bare and spec.how.power_of_two
            assert not exact or torch.equal(got[name].float(), expected[name].float()), (spec, name)


def main(folder: Path) -> None:
    """All checks; prints how many kernels were compared."""
    widths = (13, 200, 256, 624)
    norms = [spec for width in widths for spec in recorded(width)]
    package = write_package(folder / "recorded_interpreted", [*norms, *TURNED, *TRANSPOSED])
    operators.tiles = lambda x, side: TILES
    operators.programs = lambda x, rows, per_multiprocessor: PROGRAMS
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)
    compared = 0
    for spec in norms:
        for rows in (1, 17):
            inputs = random_inputs(rows, spec.width, torch.float32)
            inputs.tensors["x"][0, 1] = torch.inf
            scale = torch.full((1, 1), 2.0**-5 if spec.norm or spec.activation else 1.0) * 448.0 / spec.how.limit
            if spec.norm or spec.activation:
                forward = isinstance(spec, NormForward)
                named = [inputs.tensors[n] for n in spec.parameters if n in inputs.tensors]
                tensors = named if forward else arguments_of(spec, inputs)
                tensors = [tensor for tensor in tensors if tensor is not None]
            else:
                tensors = [coarse(rows, spec.width)]
            same_record(package, spec, [*tensors, scale])
            compared += 1
    for spec in TURNED:
        for shape in ((1, 13), (130, 200), (257, 128)):
            same_record(package, spec, [coarse(*shape), torch.ones(1, 1) * 448.0 / spec.how.limit])
            compared += 1
    for spec in TRANSPOSED:
        matrices = [coarse(*shape).to(torch.float8_e5m2) for shape in ((130, 200), (1, 13), (257, 16))]
        got = list(results(package, spec, *matrices[: spec.count]).values())
        for ours, values in zip(got, matrices, strict=False):
            assert torch.equal(ours.view(torch.uint8), values.view(torch.uint8).t())
        compared += 1
    print(compared)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
