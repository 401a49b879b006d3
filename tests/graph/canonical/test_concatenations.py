"""What parts of a concatenation have in common is that of the whole, where all of them have it."""

from __future__ import annotations

import pytest

from loka.graph.ir import ForwardIR
from tests.support.canonical_forms import assert_same, canonical, templates, texts
from tests.support.expressions import template

X = {"x": (5, 6)}
PARTS = ("a = getitem x: {0}[:, :2]", "b = getitem x: {0}[:, 2:]")
ROWS = {"c": (2, 6), "d": (3, 6)}
WEIGHTS = {"w": (6,), "v": (6,)}
NORM = "torch.nn.functional.layer_norm({0}, (6,), {1}, None, 1e-05)"
JOIN = "y = cat s u: torch.cat([{0}, {1}], 1)"


def made(lines: tuple[str, ...], inputs: dict[str, tuple[int, ...]]) -> ForwardIR:
    """The canonical form, which computes the same."""
    named = {name: size for name, size in WEIGHTS.items() if any(f"self.{name}" in line for line in lines)}
    found = canonical(lines, inputs, named)
    assert_same(found, inputs, named)
    return found


UNBOUND = ("s = unbind x: {0}.unbind(1)", *(f"p{each} = getitem s: {{0}}[{each}]" for each in range(5)))
WHOLES = {
    "slices": (*PARTS, "c = cat a b: torch.cat([{0}, {1}], 1)"),
    "split": (
        "s = split x: {0}.split([2, 3], 1)",
        "a = getitem s: {0}[0]",
        "b = getitem s: {0}[1]",
        "c = cat a b: torch.cat([{0}, {1}], -2)",
    ),
    "chunks of columns": (
        "s = chunk x: {0}.chunk(3, 2)",
        *(f"{name} = getitem s: {{0}}[{place}]" for place, name in enumerate("abe")),
        "c = cat a b e: torch.cat([{0}, {1}, {2}], 2)",
    ),
    "stacked": (*UNBOUND, "c = stack p0 p1 p2 p3 p4: torch.stack([{0}, {1}, {2}, {3}, {4}], 1)"),
}


@pytest.mark.parametrize("lines", WHOLES.values(), ids=WHOLES)
def test_all_parts_of_a_tensor_in_order_are_that_tensor(lines: tuple[str, ...]) -> None:
    assert texts(made((*lines, "y = relu c: torch.relu({0})"), X)) == ["y = torch.nn.functional.relu(x)"]


def test_parts_side_by_side_along_another_dimension_are_a_view() -> None:
    columns = "c = stack p0 p1 p2 p3 p4: torch.stack([{0}, {1}, {2}, {3}, {4}], 2)"
    found = texts(made((*UNBOUND, columns, "y = cumsum c: {0}.cumsum(1)"), X))
    assert found == ["c = x.transpose(1, 2).contiguous()", "y = c.cumsum(1)"]
    flat = "c = cat p0 p1 p2 p3 p4: torch.cat([{0}, {1}, {2}, {3}, {4}], 1)"
    assert texts(made((*UNBOUND, flat, "y = relu c: torch.relu({0})"), X))[0].endswith("x.flatten(-2)")


def test_halves_of_columns_under_each_other_are_a_view() -> None:
    halves = ("a = getitem x: {0}[:, :, :3]", "b = getitem x: {0}[:, :, 3:]", "c = cat a b: torch.cat([{0}, {1}], 1)")
    found = made((*halves, "y = cumsum c: {0}.cumsum(1)"), X)
    assert {step.op for step in found.statements} <= {"unflatten", "transpose", "reshape", "flatten", "cumsum"}


NO_WHOLES = {
    "another order": (*PARTS, "y = cat b a: torch.cat([{0}, {1}], 1)"),
    "twice the same": (*PARTS, "y = cat a b a: torch.cat([{0}, {1}, {2}], 1)"),
    "one too few": (*UNBOUND, "y = stack p0 p1 p2 p3: torch.stack([{0}, {1}, {2}, {3}], 1)"),
    "a gap": ("a = getitem x: {0}[:, :2]", "b = getitem x: {0}[:, 3:]", "y = cat a b: torch.cat([{0}, {1}], 1)"),
    "overlapping": ("a = getitem x: {0}[:, :3]", "b = getitem x: {0}[:, 2:]", "y = cat a b: torch.cat([{0}, {1}], 1)"),
    "shifted": ("a = getitem x: {0}[:, :2]", "b = getitem x: {0}[:, 1:4]", "y = cat a b: torch.cat([{0}, {1}], 1)"),
    "one part changed": (*PARTS, "s = silu a: torch.nn.functional.silu({0})", "y = cat s b: torch.cat([{0}, {1}], 1)"),
}


@pytest.mark.parametrize("lines", NO_WHOLES.values(), ids=NO_WHOLES)
def test_other_parts_are_concatenated(lines: tuple[str, ...]) -> None:
    found = templates(made((*lines, "r = add y y: torch.add({0}, {1})"), X))
    assert found[-1] == "{0} + {0}"  # the rest is canonical
    assert sum("torch.cat(" in each or "torch.stack(" in each for each in found) == 1
    assert sum("[" in each and "torch" not in each for each in found) >= 2  # the parts are still taken


def test_parts_of_two_tensors_are_concatenated() -> None:
    lines = ("a = getitem x: {0}[:, :2]", "b = getitem z: {0}[:, 2:]", "y = cat a b: torch.cat([{0}, {1}], 1)")
    assert templates(made(lines, {"x": (5, 6), "z": (5, 6)}))[-1] == "torch.cat([{0}, {1}], 1)"


@pytest.mark.parametrize("sums", [("a c", "b d"), ("c a", "d b"), ("a c", "d b")])
def test_sums_with_all_parts_of_a_tensor_are_the_sum_with_it(sums: tuple[str, str]) -> None:
    lines = (*PARTS, f"s = add {sums[0]}: {{0}} + {{1}}", f"u = add {sums[1]}: {{0}} + {{1}}", JOIN)
    join, total = made(lines, {**X, **ROWS}).statements
    assert template(join) == "torch.cat([{0}, {1}], 1)"
    assert [ref.text for ref in join.operands] == ["c", "d"]
    assert template(total) == "{0} + {1}"
    assert {ref.text for ref in total.operands} == {"x", join.target}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s = add a c: {0} + {1}", "u = mul b d: {0} * {1}"),
        ("s = mul a c: {0} * {1}", "u = mul b d: {0} * {1}"),
        ("s = add a c: {0} + {1}", "u = sub b d: {0} - {1}"),
    ],
)
def test_other_operations_with_parts_stay_those_of_each(first: str, second: str) -> None:
    found = made((*PARTS, first, second, JOIN), {**X, **ROWS})
    assert found.statements[-1].text() == "y = torch.cat([s, u], 1)"


def test_norms_of_parts_stay_those_of_each() -> None:
    lines = (f"s = layer_norm c self.w: {NORM}", f"u = layer_norm d self.w: {NORM}", JOIN)
    found = made(lines, ROWS)
    assert [step.target for step in found.statements] == ["s", "u", "y"]
