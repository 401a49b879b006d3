"""A product with both matrices of a mixing layer, split afterwards, is a product with each."""

from __future__ import annotations

import pytest

from loka.graph.ir import PART
from tests.support.canonical_forms import canonical

PARAMETERS = {"w": (8, 6)}
INPUTS = {"x": (6, 5)}
BOTH = "GEMM both = matmul self.w x: torch.matmul({0}, {1})"
PAIRS = ("t = transpose a: {0}.transpose(1, 2)", "p = matmul x t: {0} @ {1}")
SPLIT = ("s = split both: torch.split({0}, [3, 5], dim=1)", "a = getitem s: {0}[0]", "b = getitem s: {0}[1]")
WAYS = {
    "split": SPLIT,
    "slices": ("a = getitem both: {0}[:, :3]", "b = getitem both: {0}[:, 3:]"),
    "narrow": ("a = narrow both: {0}.narrow(1, 0, 3)", "b = narrow both: {0}.narrow(1, 3, 5)"),
    "tensor_split": ("s = tensor_split both: {0}.tensor_split([3], dim=-2)", *SPLIT[1:]),
}


@pytest.mark.parametrize("lines", WAYS.values(), ids=WAYS)
def test_parts_that_a_mixing_layer_takes(lines: tuple[str, ...]) -> None:
    found = canonical((BOTH, *lines, *PAIRS), INPUTS, PARAMETERS, ("b",))
    parts = [step.operands[1].text for step in found.statements if step.op == PART]
    assert parts == ["self.w[0:3]", "self.w[3:8]"]


NEARLY = {
    "no mixing layer": (SPLIT, ("a", "b")),
    "overlapping": (("a = getitem both: {0}[:, :3]", "b = getitem both: {0}[:, 2:7]", *PAIRS), ("b",)),
}


@pytest.mark.parametrize(("lines", "read"), NEARLY.values(), ids=NEARLY)
def test_other_parts_stay_parts_of_one_product(lines: tuple[str, ...], read: tuple[str, ...]) -> None:
    found = canonical((BOTH, *lines), INPUTS, PARAMETERS, read)
    assert sum(step.call is not None for step in found.statements) == 1 or PART in {s.op for s in found.statements}
    if "no mixing" in NEARLY and lines is SPLIT:
        assert PART not in {step.op for step in found.statements}
