"""Canonical statements take the place of traced ones, whichever of them are chosen."""

from __future__ import annotations

import random

import pytest

from loka.graph.canonical.forwards import is_canonical
from loka.graph.canonical.splicing import spliced
from loka.graph.ir import ForwardIR
from tests.support.canonical_forms import Sizes, assert_same, canonical, statements, texts

LINES = (
    "GEMM u = linear x self.w: torch.nn.functional.linear({0}, {1})",
    "g = sigmoid u: torch.sigmoid({0})",
    "s = mul u g: {0} * {1}",
    "t = cumsum s: {0}.cumsum(1)",
    "a = add t z: torch.add({0}, {1})",
    "r = relu a: torch.relu({0})",
    "y = addcmul r z a: torch.addcmul({0}, {1}, {2})",
)
INPUTS, PARAMETERS = {"x": (6,), "z": (6,)}, {"w": (6, 6)}
FOUND = canonical(LINES, INPUTS, PARAMETERS, ("t",))
PLACES = range(len(FOUND.statements))

# Products of transposed inputs, a bias of its own, a block of it, and what reads a product in two layouts.
TURNED = canonical(
    (
        "c = tanh z: torch.tanh({0})",
        "v = transpose x: {0}.transpose(0, 1)",
        "GEMM m = matmul self.w v: {0} @ {1}",
        "flat = view m: {0}.view(-1)",
        "o = transpose m: {0}.transpose(0, 1)",
        "b = add o self.b: {0} + {1}",
        "g = sigmoid b: torch.sigmoid({0})",
        "s = mul b g: {0} * {1}",
        "h = mul s c: {0} * {1}",
        "y = add h b: torch.add({0}, {1})",
    ),
    {"x": (6,), "z": (6,)},
    {"w": (6, 6), "b": (6,)},
    ("flat",),
)

# A tensor that is read as it is, by way of a view that must be contiguous.
BACK = canonical(
    (
        "GEMM m = matmul self.w x: {0} @ {1}",
        "r = view m: {0}.view(-1, 4)",
        "s = view r: {0}.view(-1, 6, 4)",
        "y = cat s x: torch.cat([{0}, {1}], 1)",
    ),
    {"x": (6, 4)},
    {"w": (6, 6)},
)


def test_without_a_kept_statement_it_is_what_was_traced() -> None:
    back = spliced(FOUND, frozenset())
    assert [step.text() for step in back.statements] == [step.text() for step in statements(*LINES)]
    assert not is_canonical(back)
    assert is_canonical(FOUND)
    assert_same(FOUND, INPUTS, PARAMETERS)


@pytest.mark.parametrize("kept", PLACES)
def test_one_kept_statement_stands_in_its_place(kept: int) -> None:
    mixed = spliced(FOUND, frozenset([kept]))
    own = FOUND.statements[kept]
    assert own.text() in texts(mixed)
    others = {*texts(mixed)} - {own.text(), *(step.text() for step in statements(*LINES))}
    assert all("mul_rows" in text for text in (own.text(), *others) if others)  # a local of the canonical form alone
    assert not is_canonical(mixed)
    assert_same(FOUND, INPUTS, PARAMETERS, frozenset([kept]))


def test_what_only_a_replaced_statement_read_goes() -> None:
    (silu,) = (place for place, step in enumerate(FOUND.statements) if step.op == "silu")
    assert texts(spliced(FOUND, frozenset([silu])))[:3] == [
        "u = torch.nn.functional.linear(x, self.w)",
        "s = torch.nn.functional.silu(u)",
        "t = s.cumsum(1)",
    ]


@pytest.mark.parametrize(
    ("forward", "inputs", "parameters"),
    [
        (FOUND, INPUTS, PARAMETERS),
        (TURNED, INPUTS, {"w": (6, 6), "b": (6,)}),
        (BACK, {"x": (6, 4)}, {"w": (6, 6)}),
    ],
)
def test_any_choice_computes_the_same_with_one_product(forward: ForwardIR, inputs: Sizes, parameters: Sizes) -> None:
    drawn = random.Random(0)
    places = range(len(forward.statements))
    for _ in range(40):
        kept = frozenset(place for place in places if drawn.random() < drawn.choice((0.2, 0.5, 0.8)))
        assert_same(forward, inputs, parameters, kept)
        mixed = spliced(forward, kept).statements
        targets = [step.target for step in mixed]
        assert len(set(targets)) == len(targets)
        assert {forward.statements[place].target for place in kept} <= {*targets}
        assert [step.call.site for step in mixed if step.call is not None] == ["w"]


def test_kept_statements_that_only_each_other_read_stay_together() -> None:
    """The traced ones stand between those of two chains."""
    lines = (
        "GEMM u = linear x self.w: torch.nn.functional.linear({0}, {1})",
        "v = linear z self.v: torch.nn.functional.linear({0}, {1})",
        "g = sigmoid u: torch.sigmoid({0})",
        "h = cumsum v: {0}.cumsum(1)",
        "s = mul u g: {0} * {1}",
        "y = mul s h: torch.mul({0}, {1})",
    )
    forward = canonical(lines, INPUTS, {"w": (6, 6), "v": (6, 6)})
    kept = frozenset(place for place, step in enumerate(forward.statements) if step.target in ("u", "s"))
    assert [step.target for step in spliced(forward, kept).statements] == ["v", "h", "u", "s", "y"]
