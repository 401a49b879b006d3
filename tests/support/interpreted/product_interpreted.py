"""Run by test_interpreted.py: indexing and masks, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from loka.kernels.fused import operators
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from tests.support.interpreted.faster_interpreter import PROGRAMS
from tests.support.interpreted.rendered_interpreted import near, results
from tests.support.kernels.product_cases import (
    arguments,
    backwards,
    exact,
    forwards,
    inputs_of,
    product_inputs,
    products,
)
from tests.support.kernels.rendered_cases import Package, write_package
from tests.support.pairwise import pairwise

WIDTHS = (13, 16, 256, 600, 768, 1100)  # blocks in 256, and in the padded 768
NORMS = pairwise(spec for width in WIDTHS for spec in (*forwards(width), *backwards(width)))


def check_norms(package: Package, specs: Sequence[NormForward | NormBackward], rows: int) -> int:
    """Each plain result of a norm against the reference's, and each scale; how many were compared."""
    compared = 0
    for spec in specs:
        tensors = inputs_of(rows, spec.width, torch.float32)
        residual = spec.residual if isinstance(spec, NormForward) else spec.summed
        given = arguments(spec, tensors, exact(spec, tensors, residual))
        got, expected = results(package, spec, *given), package.run(spec, *given)
        for name in spec.results:
            result = got[name]
            if name == "values" or (name == "scale_max" and result.max() == expected[name].max()):
                continue  # the interpreter rounds to e4m3 in its own way
            if name in ("dweight", "dbias", "dadd"):
                result = result.sum(0, keepdim=True)
            assert near(result, expected[name]), (spec, rows, name)
            compared += 1
    return compared


def check_products(package: Package, width: int, rows: int) -> int:
    """Each sum of products against the reference's; how many were compared."""
    for product in products(width):
        given = [*product_inputs(product, rows, torch.float32).values(), torch.float32]
        assert near(results(package, product, *given)["out"], package.run(product, *given)["out"]), product
    return len(products(width))


def main(folder: Path) -> int:
    package = write_package(folder / "interpreted", [*NORMS, *(spec for width in WIDTHS for spec in products(width))])
    operators.programs = lambda x, rows, per_multiprocessor: PROGRAMS if x.shape[0] else 1
    compared = sum(check_norms(package, NORMS, rows) for rows in (1, 5, 0))
    return compared + sum(check_products(package, width, rows) for width in WIDTHS for rows in (1, 5, 0))
