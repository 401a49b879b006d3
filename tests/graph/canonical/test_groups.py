"""Canonical statements are grouped by what they stand for, and each group goes back to it on its own."""

from __future__ import annotations

import pytest

from loka.graph.canonical.forwards import as_traced, in_groups, is_canonical
from tests.support.canonical_forms import assert_same, canonical, statements
from tests.support.expressions import expression

SILU = ("g = sigmoid x: torch.sigmoid({0})", "s = mul x g: {0} * {1}")
SILU_ITSELF = "s = silu x: torch.nn.functional.silu({0})"
A, B = "a = relu x: torch.relu({0})", "b = tanh x: torch.tanh({0})"
C, D = "c = add a b: {0} + {1}", "d = mul c a: {0} * {1}"
CHECK, OTHER = "_ = check x: check({0})", "_ = check x: other({0})"


def grouped(traced: tuple[str, ...], ours: tuple[str, ...], result: str) -> list[tuple[list[str], list[str]]]:
    """For each group, the targets of its statements and of those that it stands for; [] for statements of both."""
    steps = list(in_groups(statements(*traced), statements(*ours), expression(result)))
    assert [step.text() for step in steps] == [step.text() for step in statements(*ours)]
    found: list[tuple[list[str], list[str]]] = []
    while steps:
        count = steps[0].group or 1
        assert (steps[0].group is None) == (not steps[0].written)
        assert not any(step.written or step.group for step in steps[1:count])
        found.append(([step.target for step in steps[:count]], [step.target for step in steps[0].written]))
        del steps[:count]
    return found


def test_what_is_the_same_stands_for_itself() -> None:
    assert grouped((A, B, C), (A, B, C), "c") == [(["a"], []), (["b"], []), (["c"], [])]


def test_a_group_is_as_short_as_possible() -> None:
    traced, ours = (A, *SILU, B, C), (A, SILU_ITSELF, B, C)
    assert grouped(traced, ours, "c, s") == [(["a"], []), (["s"], ["g", "s"]), (["b"], []), (["c"], [])]


def test_a_local_that_something_after_it_reads_is_made_in_both_forms() -> None:
    """The traced form needs g after s, which canonical statements do not have: no cut stands before its last reader."""
    reads = "y = mul s g: {0} * {1}"
    ours = (SILU_ITSELF, "h = sigmoid x: torch.sigmoid({0})", "y = mul s h: {0} * {1}")
    assert grouped((*SILU, reads), ours, "y") == [(["s", "h", "y"], ["g", "s", "y"])]


def test_statements_in_another_order_are_one_group() -> None:
    assert grouped((A, B, C), (B, A, C), "c") == [(["b", "a"], ["a", "b"]), (["c"], [])]
    assert grouped((A, B, C, D), (B, A, C, D), "d") == [(["b", "a"], ["a", "b"]), (["c"], []), (["d"], [])]


@pytest.mark.parametrize(("result", "last"), [("c", ["c"]), ("(c, a)", ["c"])])
def test_a_local_of_the_result_is_needed_to_the_end(result: str, last: list[str]) -> None:
    found = grouped((A, B, C), (B, A, C), result)
    assert found[-1][0] == last


def test_a_result_that_canonical_statements_make_last() -> None:
    """a is needed by the result alone: all that stands before it in the other form is in its group."""
    assert grouped((A, B), (B, A), "(a, b)") == [(["b", "a"], ["a", "b"])]
    assert grouped((A, B), (B,), "b") == [(["b"], ["a", "b"])]


def test_effects_are_on_the_same_side_of_a_cut() -> None:
    assert grouped((CHECK, A, OTHER, B), (CHECK, A, OTHER, B), "(a, b)") == [
        (["_"], []), (["a"], []), (["_"], []), (["b"], [])
    ]  # fmt: skip
    moved = grouped((A, CHECK, B, C), (CHECK, A, B, C), "c")
    assert moved == [(["_", "a"], ["a", "_"]), (["b"], []), (["c"], [])]
    late = grouped((CHECK, A, B, C), (A, B, CHECK, C), "c")
    assert late == [(["a", "b", "_"], ["_", "a", "b"]), (["c"], [])]


def test_effects_that_canonical_statements_leave_out_hold_nothing_up() -> None:
    found = grouped((CHECK, A, OTHER, B, C), (A, CHECK, B, C), "c")
    assert found == [(["a", "_"], ["_", "a"]), (["b"], ["_", "b"]), (["c"], [])]


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


def test_without_a_kept_statement_all_goes_back() -> None:
    back = as_traced(FOUND, frozenset())
    assert [step.text() for step in back.statements] == [step.text() for step in statements(*LINES)]
    assert not is_canonical(back)
    assert is_canonical(FOUND)
    assert_same(FOUND, INPUTS, PARAMETERS)


@pytest.mark.parametrize("kept", PLACES)
def test_with_one_kept_statement_the_others_go_back_and_it_computes_the_same(kept: int) -> None:
    mixed = as_traced(FOUND, frozenset([kept]))
    written = {step.text() for step in statements(*LINES)}
    texts = [step.text() for step in mixed.statements]
    assert FOUND.statements[kept].text() in texts
    starts = [place for place, step in enumerate(FOUND.statements) if step.written]
    group = next(({*range(at, at + (FOUND.statements[at].group or 1))} for at in starts if at <= kept < at + (
        FOUND.statements[at].group or 1)), {kept})  # fmt: skip
    own = {FOUND.statements[place].text() for place in group}
    assert set(texts) <= written | own
    assert not is_canonical(mixed)
    assert_same(FOUND, INPUTS, PARAMETERS, frozenset([kept]))


def test_with_all_kept_statements_it_is_the_canonical_form() -> None:
    mixed = as_traced(FOUND, frozenset(PLACES))
    assert [step.text() for step in mixed.statements] == [step.text() for step in FOUND.statements]
    assert_same(FOUND, INPUTS, PARAMETERS, frozenset(PLACES))
