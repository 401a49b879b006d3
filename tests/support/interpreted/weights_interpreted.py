"""Run by test_interpreted.py: what is read and written."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from loka.kernels.fused.norm import norm_reference
from tests.support.interpreted.faster_interpreter import PROGRAMS
from tests.support.interpreted.rendered_interpreted import exact_rows, results
from tests.support.kernels.rendered_cases import write_package
from tests.support.kernels.weight_cases import ROWS, WEIGHTS


def main(folder: Path) -> int:
    """Weights of every case, whole and cut from wider ones, against the reference; returns how many were compared."""
    package = write_package(folder / "interpreted", WEIGHTS)
    compared = 0
    for spec in WEIGHTS:
        for first in range(len(ROWS)):
            rows = [ROWS[(first + index) % len(ROWS)] for index in range(len(spec.quantizers))]
            weights = [exact_rows(m, each.width) for m, each in zip(rows, spec.quantizers, strict=True)]
            given = [F.pad(x, (0, 3), value=1e30)[:, : x.shape[1]] if (first + x.shape[1]) % 2 else x for x in weights]
            got = results(package, spec, *given)
            for index, (x, each) in enumerate(zip(weights, spec.quantizers, strict=True)):
                values, scale, _ = norm_reference.quantize_rows(F.pad(x, (0, each.columns - each.width)))
                assert torch.equal(got[f"values_{index}"].float(), values.float()), (spec, index, rows)
                assert torch.equal(got[f"scale_{index}"], scale), (spec, index, rows)
                largest = got[f"scale_max_{index}"]
                assert largest.shape == (PROGRAMS,)
                assert largest.max() == (scale.max() if rows[index] else 0.0), (spec, index, rows)
                compared += 1
    return compared
