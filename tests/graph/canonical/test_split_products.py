"""A product with both matrices of a mixing layer, split afterwards, is a product with each."""

from __future__ import annotations

import pytest

from loka.graph.ir import PART, ForwardIR
from tests.support.canonical_forms import assert_same, canonical, templates

PARAMETERS = {"w": (8, 6)}
INPUTS = {"x": (6, 5)}
BOTH = "GEMM both = matmul self.w x: torch.matmul({0}, {1})"
PAIRS = ("t = transpose a: {0}.transpose(1, 2)", "p = matmul x t: {0} @ {1}")
SPLIT = ("s = split both: torch.split({0}, [3, 5], dim=1)", "a = getitem s: {0}[0]", "b = getitem s: {0}[1]")
SLICES = ("a = getitem both: {0}[:, :3]", "b = getitem both: {0}[:, 3:]")
WAYS = {
    "split": SPLIT,
    "slices": SLICES,
    "narrow": ("a = narrow both: {0}.narrow(1, 0, 3)", "b = narrow both: {0}.narrow(1, 3, 5)"),
    "tensor_split": ("s = tensor_split both: {0}.tensor_split([3], dim=-2)", *SPLIT[1:]),
}


def made(lines: tuple[str, ...], read: tuple[str, ...], parameters: dict[str, tuple[int, ...]]) -> ForwardIR:
    """The canonical form, which has the results and the gradients of what was traced."""
    found = canonical(lines, INPUTS, parameters, read)
    assert_same(found, INPUTS, parameters)
    return found


def parts(forward: ForwardIR) -> list[str]:
    """The parts of the matrix that the forward multiplies by."""
    return [step.operands[1].text for step in forward.statements if step.op == PART]


@pytest.mark.parametrize("lines", WAYS.values(), ids=WAYS)
def test_parts_that_a_mixing_layer_takes(lines: tuple[str, ...]) -> None:
    found = made((BOTH, *lines, *PAIRS), ("b",), PARAMETERS)
    assert parts(found) == ["self.w[0:3]", "self.w[3:8]"]
    assert "both" in [step.target for step in found.traced]


def test_the_columns_of_a_matrix() -> None:
    product = "GEMM both = einsum x self.w: torch.einsum('bnd,nr->bdr', {0}, {1})"
    lines = (product, "a = getitem both: {0}[..., :3]", "b = getitem both: {0}[..., 3:]", "p = matmul x a: {0} @ {1}")
    assert parts(made(lines, ("b",), {"w": (6, 8)})) == ["self.w.t()[0:3]", "self.w.t()[3:8]"]


# What keeps the product as a whole: parts of it would be computed twice.
WHOLE = {
    "read as a whole": ((*SPLIT, *PAIRS), ("b", "both")),
    "changed": ((*SPLIT[:2], "b = add both: {0}[:, 3:] + 1", *PAIRS), ("b",)),
    "one part": ((SPLIT[0], SPLIT[1], *PAIRS), ("both",)),
}


@pytest.mark.parametrize(("lines", "read"), WHOLE.values(), ids=WHOLE)
def test_a_product_that_something_reads_as_a_whole_stays(lines: tuple[str, ...], read: tuple[str, ...]) -> None:
    forward = made((BOTH, *lines), read, PARAMETERS)
    assert not parts(forward)
    assert sum(step.call is not None for step in forward.statements) == 1


def test_parts_may_overlap() -> None:
    lines = (BOTH, "a = getitem both: {0}[:, :3]", "b = getitem both: {0}[:, 2:7]", *PAIRS)
    assert parts(made(lines, ("b",), PARAMETERS)) == ["self.w[0:3]", "self.w[2:7]"]


NEARLY = {
    "no mixing layer": (SPLIT, ("a", "b")),
    "every third row": (("a = getitem both: {0}[:, ::3]", "b = getitem both: {0}[:, 3:]", *PAIRS), ("b",)),
    "a third part": (
        (
            "s = split both: torch.split({0}, [3, 2, 3], dim=1)",
            *(f"{name} = getitem s: {{0}}[{place}]" for place, name in enumerate("abc")),
            *PAIRS,
        ),
        ("b", "c"),
    ),
    "in place": ((*SLICES, "i = add_ a: {0}.add_(1)", *PAIRS), ("b",)),
}


@pytest.mark.parametrize(("lines", "read"), NEARLY.values(), ids=NEARLY)
def test_other_parts_stay_parts_of_one_product(lines: tuple[str, ...], read: tuple[str, ...]) -> None:
    found = made((BOTH, *lines), read, PARAMETERS)
    assert parts(found) == []
    assert sum(step.call is not None for step in found.statements) == 1


def test_a_linear_that_is_split_stays() -> None:
    """It sums over the last dimension: one FP8 GEMM, as of queries, keys and values."""
    linear = "GEMM both = linear x self.w: torch.nn.functional.linear({0}, {1})"
    lines = (linear, "a = getitem both: {0}[..., :3]", "b = getitem both: {0}[..., 3:]")
    found = made((*lines, "p = mul a a: {0} * {1}"), ("b",), {"w": (8, 5)})
    assert parts(found) == []
    assert templates(found)[0] == "torch.nn.functional.linear({0}, {1})"
    assert sum(step.call is not None for step in found.statements) == 1
