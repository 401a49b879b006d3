"""Run by test_interpreted.py: what is read and written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from loka.kernels.fused.launching import launch
from loka.kernels.fused.norm import norm_reference
from loka.numerics.quantize import AMAX_FLOOR, round_up_to_power_of_two
from tests.support.interpreted.faster_interpreter import PROGRAMS
from tests.support.interpreted.rendered_interpreted import exact_rows, results
from tests.support.kernels.rendered_cases import Package, write_package
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
    return compared + scales_of_each_format(package)


def scales_of_each_format(package: Package) -> int:
    """Scales by the largest value of e4m3, e5m2 and e4m3fnuz (240), of maxima at every step between two of them."""
    spec = WEIGHTS[0]
    for limit in (448.0, 57344.0, 240.0):
        edges = torch.tensor([limit * 2.0**exponent for exponent in range(-120, 100, 7)])
        inf = torch.full_like(edges, torch.inf)
        maxima = torch.cat([edges, edges.nextafter(inf), edges.nextafter(-inf), edges * 1.01, torch.zeros(1)])
        weights = [torch.zeros(len(maxima), each.width) for each in spec.quantizers]
        for x in weights:
            x[:, 1] = maxima

        def under_limit(kernel: Any, grid: tuple[int, ...], *given: Any, constants: tuple[Any, ...], num_warps: int):
            launch(kernel, grid, *given, constants=(*constants[:-1], limit), num_warps=num_warps)  # noqa: B023

        operator = getattr(package.fused, spec.function).operator
        made = operator.outputs(weights)
        operator.launch(package.triton_kernels, made, (weights,), under_limit)
        expected = round_up_to_power_of_two(maxima.clamp(min=AMAX_FLOOR) / limit)
        for scale in made[1::3]:
            assert torch.equal(scale[:, 0], expected), limit
    return 3
