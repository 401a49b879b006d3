"""Biases are those of the linear, however they are added; sizes in norms are numbers."""

from __future__ import annotations

import pytest

from tests.support.canonical_forms import assert_same, canonical, statements, templates, texts
from tests.support.expressions import template

PARAMETERS = {"w": (6, 6), "b": (6,), "row": (1, 6), "s": ()}
INPUTS = {"x": (6,), "g": (6,), "h": (6,)}
GEMM = "GEMM u = linear x self.w: torch.nn.functional.linear({0}, {1})"
LINEAR = "torch.nn.functional.linear({0}, {1}, {2})"
FACTORED = ("p = mul g u: {0} * {1}", "q = mul self.b g: {0} * {1}", "y = add q p: torch.add({0}, {1})")


def made(*lines: str, read: tuple[str, ...] = ()) -> list[str]:
    return texts(canonical((GEMM, *lines), INPUTS, PARAMETERS, read))


def test_a_bias_that_is_multiplied_along_with_the_product_stays() -> None:
    """The expanded form of a cross layer: write factor * (product + bias)."""
    assert "u = torch.nn.functional.linear(x, self.w)" in made(*FACTORED)


def test_a_bias_cast_to_the_dtype_of_the_product_is_its_bias() -> None:
    found = made("d = dtype u: {0}.dtype", "c = to self.b d: {0}.to({1})", "y = add u c: {0} + {1}")
    assert found == ["y = torch.nn.functional.linear(x, self.w, self.b)"]


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
    assert [template(step) for step in calls] == [LINEAR if bias else "torch.nn.functional.linear({0}, {1})"]


@pytest.mark.parametrize(
    "text",
    [
        "torch.nn.functional.conv1d({0}, {1}, None, 2)",  # every second column
        "torch.nn.functional.conv1d({0}, {1}, None, 1, 1)",  # with columns of zeros
    ],
)
def test_other_convolutions_stay(text: str) -> None:
    assert templates(canonical([f"GEMM y = conv1d x self.w: {text}"], {"x": (8, 5)}, {"w": (6, 8, 1)})) == [text]


def test_a_convolution_of_two_columns_stays() -> None:
    text = "torch.nn.functional.conv1d({0}, {1})"
    assert templates(canonical([f"GEMM y = conv1d x self.w: {text}"], {"x": (8, 5)}, {"w": (6, 8, 2)})) == [text]


def test_a_convolution_that_is_no_gemm_of_a_site_stays() -> None:
    text = "torch.nn.functional.conv1d({0}, {1})"
    assert templates(canonical([f"y = conv1d x self.w: {text}"], {"x": (8, 5)}, {"w": (6, 8, 1)})) == [text]


SIZED = "y = layer_norm x d self.n: torch.nn.functional.layer_norm({0}, ({1},), {2})"
SIZES = {
    "unpacked": ("shape = shape x: {0}.shape", "d = getitem shape: {0}[2]"),
    "of size()": ("shape = size x: {0}.size()", "d = getitem shape: {0}[-1]"),
    "size": ("d = size x: {0}.size(-1)",),
    "shape": ("d = getitem x: {0}.shape[2]",),
}
OF_A_NUMBER = "y = torch.nn.functional.layer_norm(x, (32,), self.n, None, 1e-05)"


@pytest.mark.parametrize("before", SIZES.values(), ids=SIZES)
def test_a_norm_over_a_size_is_one_over_that_number(before: tuple[str, ...]) -> None:
    found = canonical([*before, SIZED], {"x": (4, 32)}, {"n": (32,)})
    assert texts(found) == [OF_A_NUMBER]
    assert_same(found, [*before, SIZED], {"x": (4, 32)}, {"n": (32,)})


@pytest.mark.parametrize("before", SIZES.values(), ids=SIZES)
def test_a_size_that_others_read_stays(before: tuple[str, ...]) -> None:
    found = texts(canonical([*before, SIZED], {"x": (4, 32)}, {"n": (32,)}, ("d",)))
    assert found == [OF_A_NUMBER, *(step.text() for step in statements(*before))]


def test_the_size_of_the_batch_is_no_number() -> None:
    lines = ("d = getitem x: {0}.shape[0]", "y = expand z d: {0}[:1].expand({1}, -1)")
    assert texts(canonical(lines, {"x": (6,), "z": (6,)}, {})) == [step.text() for step in statements(*lines)]


def test_a_sum_after_a_linear_keeps_its_columns() -> None:
    """What reads it needs it flat; between the linear and the sum a view would stand in a kernel's way."""
    lines = (
        "GEMM first = linear x self.a: torch.nn.functional.linear({0}, {1})",
        "total = add first z: {0} + {1}",
        "flat = flatten total: {0}.flatten(1)",
        "GEMM second = linear flat self.b: torch.nn.functional.linear({0}, {1})",
        "y = add w second: {0} + {1}",
    )
    shapes, weights = {"x": (3, 4), "z": (3, 6), "w": (5,)}, {"a": (6, 4), "b": (5, 18)}
    found = canonical(lines, shapes, weights)
    assert [step.target for step in found.statements] == ["first", "total", "flat", "second", "y"]
    assert_same(found, lines, shapes, weights)


def test_a_sum_of_several_products_keeps_their_columns() -> None:
    """A column alone, and a sum within the sum."""
    lines = (
        "lead = add z self.c: {0} + {1}",
        "GEMM first = linear x self.a: torch.nn.functional.linear({0}, {1})",
        "total = add lead first: {0} + {1}",
        "GEMM second = linear w self.b: torch.nn.functional.linear({0}, {1})",
        "both = add total second: {0} + {1}",
        "y = squeeze both: {0}.squeeze(1)",
    )
    shapes, weights = {"x": (4,), "z": (1,), "w": (5,)}, {"a": (1, 4), "b": (1, 5), "c": (1,)}
    found = canonical(lines, shapes, weights)
    assert [step.target for step in found.statements] == ["lead", "first", "total", "second", "both", "y"]
    assert_same(found, lines, shapes, weights)


def test_a_sum_of_numbers_stays() -> None:
    """A loss of two terms."""
    lines = (
        "GEMM h = linear x self.w: torch.nn.functional.linear({0}, {1})",
        "one = sum h: {0}.sum()",
        "two = mean h: {0}.mean()",
        "y = add one two: {0} + {1}",
    )
    found = canonical(lines, {"x": (4,)}, {"w": (3, 4)})
    assert [step.target for step in found.statements] == ["h", "one", "two", "y"]
