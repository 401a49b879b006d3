"""Biases are those of the linear, however they are added or multiplied along; sizes in norms are numbers."""

from __future__ import annotations

import pytest

from tests.support.canonical_forms import canonical, templates, texts

PARAMETERS = {"w": (6, 6), "b": (6,), "row": (1, 6), "s": ()}
INPUTS = {"x": (6,), "g": (6,), "h": (6,)}
GEMM = "GEMM u = linear x self.w: torch.nn.functional.linear({0}, {1})"
LINEAR = "torch.nn.functional.linear({0}, {1}, {2})"
FACTORED = ("p = mul g u: {0} * {1}", "q = mul self.b g: {0} * {1}", "y = add q p: torch.add({0}, {1})")


def made(*lines: str, read: tuple[str, ...] = ()) -> list[str]:
    return texts(canonical((GEMM, *lines), INPUTS, PARAMETERS, read))


def test_a_bias_that_is_multiplied_along_with_the_product() -> None:
    first, second = made(*FACTORED)
    assert first.endswith("= torch.nn.functional.linear(x, self.w, self.b)")
    assert second == f"y = g * {first.partition(' =')[0]}"


def test_with_a_further_term_it_is_a_cross_layer() -> None:
    lines = (
        "p = mul u g: {0} * {1}",
        "r = add h p: {0} + {1}",
        "q = mul self.b g: {0} * {1}",
        "y = add r q: {0} + {1}",
    )
    found = templates(canonical((GEMM, *lines), INPUTS, PARAMETERS))
    assert found == [LINEAR, "{0} * {1}", "{0} + {1}"]


@pytest.mark.parametrize(
    ("old", "new"), [("mul g u", "mul h u"), ("torch.add({0}, {1})", "{0} - {1}"), ("self.b", "self.s")]
)
def test_other_factors_and_differences_stay(old: str, new: str) -> None:
    assert "u = torch.nn.functional.linear(x, self.w)" in made(*(line.replace(old, new) for line in FACTORED))


@pytest.mark.parametrize("bias", ["self.b", "self.row"])
def test_a_bias_is_the_bias_of_the_linear(bias: str) -> None:
    (step,) = made(f"y = add u {bias}: {{0}} + {{1}}")
    assert step.startswith(f"y = torch.nn.functional.linear(x, self.w, {bias}")


def test_a_product_that_is_read_elsewhere_keeps_its_sum() -> None:
    found = made("y = add u self.b: {0} + {1}", read=("u",))
    assert found == ["u = torch.nn.functional.linear(x, self.w)", "y = u + self.b"]


@pytest.mark.parametrize("bias", ["", " self.b"])
def test_a_convolution_of_size_one_is_a_product_with_its_matrix(bias: str) -> None:
    text = "torch.nn.functional.conv1d({0}, {1}, {2})" if bias else "torch.nn.functional.conv1d({0}, {1})"
    parameters = {"w": (6, 8, 1), "b": (6,)}
    found = canonical([f"GEMM y = conv1d x self.w{bias}: {text}"], {"x": (8, 5)}, parameters)
    calls = [step for step in found.statements if step.call is not None]
    assert [step.operands[1].text for step in calls] == ["self.w.flatten(-2)"]
    assert [step.template for step in calls] == [LINEAR if bias else "torch.nn.functional.linear({0}, {1})"]


@pytest.mark.parametrize(
    "before",
    [
        ("shape = shape x: {0}.shape", "d = getitem shape: {0}[2]"),
        ("shape = size x: {0}.size()", "d = getitem shape: {0}[-1]"),
        ("d = size x: {0}.size(-1)",),
        ("d = getitem x: {0}.shape[2]",),
    ],
)
def test_a_norm_over_a_size_is_one_over_that_number(before: tuple[str, ...]) -> None:
    norm = "y = layer_norm x d self.n: torch.nn.functional.layer_norm({0}, ({1},), {2})"
    for read in ((), ("d",)):
        found = texts(canonical([*before, norm], {"x": (4, 32)}, {"n": (32,)}, read))
        assert [step for step in found if "layer_norm" in step] == [found[0]] or read
        assert any("(32,)" in step or "({1},)" in step or "(d,)" in step for step in found)
