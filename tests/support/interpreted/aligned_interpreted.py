"""Run by test_interpreted.py: what is read, written and left out."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from loka.kernels.fused.norm import norm_reference
from tests.support.interpreted.rendered_interpreted import exact_rows, results
from tests.support.kernels.aligned_cases import ALIGNED, ROWS
from tests.support.kernels.rendered_cases import write_package


def main(folder: Path) -> int:
    """Rows of every case, whole and cut from wider ones, against the reference; returns how many were compared."""
    package = write_package(folder / "interpreted", ALIGNED)
    compared = 0
    for spec in ALIGNED:
        for rows in ROWS:
            x = exact_rows(rows, spec.width)
            wider = F.pad(x, (0, 3), value=1e30)[:, : spec.width]  # beside it stands what must not be read
            values, scale, _ = norm_reference.quantize_rows(F.pad(x, (0, spec.aligned - spec.width)))
            for given in (x, wider):
                got = results(package, spec, given)
                assert torch.equal(got["values"].float(), values.float()), (spec, rows)
                assert torch.equal(got["scale"], scale), (spec, rows)
                compared += 1
    return compared
