"""Run by test_interpreted.py: BatchNorm's kernels, those that quantize nothing and the scales of the others."""

from __future__ import annotations

from pathlib import Path

import torch

from loka.kernels.fused.norm.norm_spec import NormForward
from tests.support.interpreted.rendered_interpreted import chosen, results
from tests.support.kernels.batch_norm_cases import case_of, check, specs
from tests.support.kernels.rendered_cases import write_package

WIDTHS = (13, 256, 600)


def main(folder: Path) -> int:
    """All checks; returns how many results were compared."""
    every = chosen(spec for width in WIDTHS for spec in specs(width))
    package = write_package(folder / "batch_norm_interpreted", every)
    compared = 0
    for spec in every:
        for rows in (7, 17):
            case = case_of(spec, rows, torch.float32)
            if not spec.quantize:
                plain = [torch.float32] if isinstance(spec, NormForward) else []
                check(spec, results(package, spec, *case.given(spec), *plain), case, 2e-4)
            else:
                got, expected = results(package, spec, *case.given(spec)), package.run(spec, *case.given(spec))
                assert torch.equal(got["scale"], expected["scale"]), spec
            compared += 1
    return compared
