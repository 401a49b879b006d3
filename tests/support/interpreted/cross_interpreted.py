"""Run by test_interpreted.py: indexing and masks, on float32."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.kernels.cross_cases import SPECS, check, inputs_of
from tests.support.kernels.rendered_cases import write_package

ROWS = (1, 45)  # less than a block, and more than three programs take at a step


def main(folder: Path) -> int:
    """All checks; returns how many there were."""
    package = write_package(folder / "crossed", SPECS)
    for spec in SPECS:
        for rows in ROWS:
            inputs = inputs_of(spec, rows, torch.float32)
            got = package.launch(spec, *(inputs[name] for name in spec.parameters))
            check(spec, got, inputs, 1e-5)
    return len(SPECS) * len(ROWS)
