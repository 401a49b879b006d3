"""A bias that is multiplied along with a product, or has one row, is the bias of the linear."""

from __future__ import annotations

import pytest

from loka.graph.canonical.linears import canonical_linears
from loka.graph.ir import Ref, RefKind, SiteCall, Statement

SHAPE = (None, 6)
GEMM = Statement(
    "u",
    "linear",
    "torch.nn.functional.linear({0}, {1})",
    (Ref(RefKind.LOCAL, "x"), Ref(RefKind.ATTRIBUTE, "self.w")),
    SiteCall("w", "{0}", "{1}", None, "{0}"),
)


def canonical(*lines: str, read: tuple[str, ...] = ()) -> list[str]:
    """The text of the statements after the GEMM; the last target is read outside, and those of `read`."""
    steps = [GEMM]
    for line in lines:
        head, _, template = line.partition(": ")
        target, _, op, *names = head.split()
        kinds = (RefKind.ATTRIBUTE if "." in name else RefKind.LOCAL for name in names)
        refs = tuple(Ref(kind, name) for kind, name in zip(kinds, names, strict=True))
        steps.append(Statement(target, op, template, refs))
    names = {ref.text for step in steps for ref in step.operands} | {step.target for step in steps}
    readers = {name: {i for i, s in enumerate(steps) if any(r.text == name for r in s.operands)} for name in names}
    for name in (steps[-1].target, *read):
        readers[name] = {*readers[name], len(steps)}
    attributes = {"self.w": (6, 6), "self.b": (6,), "self.row": (1, 6), "self.s": ()}
    made = canonical_linears(steps, dict.fromkeys(names, SHAPE), readers, attributes)
    return [step.text() for step in made]


FACTORED = ("p = mul g u: {0} * {1}", "q = mul self.b g: {0} * {1}", "y = add q p: torch.add({0}, {1})")


def test_a_bias_that_is_multiplied_along_with_the_product() -> None:
    assert canonical(*FACTORED) == ["u = torch.nn.functional.linear(x, self.w, self.b)", "y = g * u"]


@pytest.mark.parametrize(
    ("old", "new"),
    [("mul g u", "mul h u"), ("torch.add({0}, {1})", "{0} - {1}"), ("self.b", "self.s")],
)
def test_other_factors_and_differences_stay(old: str, new: str) -> None:
    lines = [line.replace(old, new) for line in FACTORED]
    assert canonical(*lines)[0] == GEMM.text()


def test_a_product_that_is_read_elsewhere_stays() -> None:
    assert canonical(*FACTORED, read=("p",))[0] == GEMM.text()


def test_a_bias_of_one_row_is_the_bias_of_the_linear() -> None:
    factored = [line.replace("self.b", "self.row") for line in FACTORED]
    assert canonical(*factored)[0] == "u = torch.nn.functional.linear(x, self.w, self.row.flatten())"
    added = canonical("y = add u self.row: {0} + {1}")
    assert added == ["y = torch.nn.functional.linear(x, self.w, self.row.flatten())"]
