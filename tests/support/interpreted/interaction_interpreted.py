"""Run by test_interpreted.py: indexing and masks, on float16 and float32.

The interpreter is right about float16, which FM and dot interactions take as they take bfloat16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.kernels.interaction_cases import (
    CONCAT_NORMS,
    DOTS,
    SIZES,
    concat_norm_inputs,
    concat_norm_specs,
    dot_inputs,
    dot_specs,
    exact_concat_norm,
    exact_dot,
    exact_fm,
    fm_inputs,
    fm_specs,
    summed,
)
from tests.support.kernels.rendered_cases import Package, write_package

SAMPLES = 7


def run(package: Package, spec: Any, *arguments: object) -> dict[str, Tensor]:
    """What the kernel computes in the interpreter."""
    return package.launch(spec, *arguments)


def compare(spec: Any, got: dict[str, Tensor], exact: dict[str, Tensor], limit: float) -> int:
    """How many results were compared; NaN, from memory that was never written, is near nothing."""
    for name, result in got.items():
        expected = exact[name]
        error = (summed(name, result.double(), expected) - expected).abs().max() / expected.abs().max()
        assert error < limit, (spec, name, float(error))
    return len(got)


def main(folder: Path) -> int:
    """All checks; returns how many results of both were compared."""
    specs: list[Any] = [spec for sizes in SIZES for spec in fm_specs(sizes)]
    specs += [spec for sizes in DOTS for spec in dot_specs(sizes)]
    package = write_package(
        folder / "interpreted", [*specs, *(s for case in CONCAT_NORMS for s in concat_norm_specs(case))]
    )
    compared = 0
    for sizes in SIZES:
        inputs = fm_inputs(sizes, SAMPLES, torch.float16)
        wide = torch.cat(
            [inputs["passed"], inputs["dcompressed"]], 1
        )  # parts of a wider tensor are read where they lie
        inputs["passed"], inputs["dcompressed"] = wide[:, : sizes.embeddings], wide[:, sizes.embeddings :]
        exact = exact_fm(sizes, inputs)
        for spec in fm_specs(sizes):
            compared += compare(spec, run(package, spec, *(inputs[p] for p in spec.parameters)), exact, 0.01)
    for pair in DOTS:
        inputs = dot_inputs(pair, SAMPLES, torch.float16)
        for spec in dot_specs(pair):
            found = run(package, spec, *(inputs[p] for p in spec.parameters))
            compared += compare(spec, found, exact_dot(inputs), 0.01)
    for case in CONCAT_NORMS:
        inputs = concat_norm_inputs(case, SAMPLES, torch.float32)
        exact = exact_concat_norm(case, inputs)
        forward, backward = concat_norm_specs(case)
        known = {**inputs, **run(package, forward, *(inputs[p] for p in forward.parameters), torch.float32)}
        compare(forward, {name: known[name] for name in forward.results}, exact, 1e-5)
        compare(backward, run(package, backward, *(known[p] for p in backward.parameters)), exact, 1e-5)
        compared += 1
    return compared
