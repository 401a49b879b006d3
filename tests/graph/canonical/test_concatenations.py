"""Concatenations stay those of their parts; one of a single tensor is that tensor."""

from __future__ import annotations

import pytest

from loka.graph.ir import ForwardIR
from tests.support.canonical_forms import assert_same, canonical, templates, texts

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
    assert_same(found, lines, inputs, named)
    return found


PARTS_OF_ONE = {
    "in order": (*PARTS, "y = cat a b: torch.cat([{0}, {1}], 1)"),
    "another order": (*PARTS, "y = cat b a: torch.cat([{0}, {1}], 1)"),
    "overlapping": ("a = getitem x: {0}[:, :3]", "b = getitem x: {0}[:, 2:]", "y = cat a b: torch.cat([{0}, {1}], 1)"),
    "one part changed": (*PARTS, "s = silu a: torch.nn.functional.silu({0})", "y = cat s b: torch.cat([{0}, {1}], 1)"),
}


@pytest.mark.parametrize("lines", PARTS_OF_ONE.values(), ids=PARTS_OF_ONE)
def test_parts_of_one_tensor_are_concatenated(lines: tuple[str, ...]) -> None:
    found = templates(made((*lines, "r = add y y: torch.add({0}, {1})"), X))
    assert found[-1] == "{0} + {0}"  # the rest is canonical
    assert sum("torch.cat(" in each or "torch.stack(" in each for each in found) == 1
    assert sum("[" in each and "torch" not in each for each in found) >= 2  # the parts are still taken


def test_one_tensor_is_that_tensor() -> None:
    lines = ("c = cat x: torch.cat([{0}], 1)", "y = relu c: torch.relu({0})")
    assert texts(made(lines, X)) == ["y = torch.nn.functional.relu(x)"]


def test_parts_of_two_tensors_are_concatenated() -> None:
    lines = ("a = getitem x: {0}[:, :2]", "b = getitem z: {0}[:, 2:]", "y = cat a b: torch.cat([{0}, {1}], 1)")
    assert templates(made(lines, {"x": (5, 6), "z": (5, 6)}))[-1] == "torch.cat([{0}, {1}], 1)"


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
