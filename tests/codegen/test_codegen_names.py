"""Identifiers are made, never taken."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.codegen.modules.binding_text import numbered
from loka.codegen.text.comments import shown
from loka.codegen.text.identifiers import RESERVED, Names, class_name, variable_name

LINEAR = "torch.nn.modules.linear.Linear"


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (("layers.0.fmb.0", "layers.1.fmb.0"), "LayersFmb0"),
        (("bottom.low_rank",), "BottomLowRank"),
        (("0", "2"), "Linear"),
        (("0",), "Module0"),
        (("a.1.2",), "A1X2"),
        (("",), "Linear"),
        (("層",), "Linear"),
        (("a.b", "c.d.e"), "Linear"),
        (("class",), "Class"),
    ],
)
def test_class_name(modules: tuple[str, ...], expected: str) -> None:
    assert class_name(modules, LINEAR) == expected


def test_hint_only_where_it_is_a_class_name() -> None:
    assert class_name(("a",), LINEAR, "FmbFirst") == "FmbFirst"
    assert class_name(("a",), LINEAR, "x = 1") == "A"
    assert class_name(("a",), LINEAR, "Exception") == "A"


def test_unique_keeps_the_frozen_sibling_free() -> None:
    names = Names()
    assert names.unique("Tower", ("Frozen",)) == "Tower"
    assert names.unique("TowerFrozen", ("Frozen",)) == "TowerFrozenX2"
    assert names.unique("Tower", ("Frozen",)) == "TowerX2"


@given(st.text(), st.text(), st.text())
def test_made_names_are_plain_identifiers(module: str, kind: str, hint: str) -> None:
    for made in (Names().unique(class_name((module,), kind, hint)), Names().unique(variable_name(module, "value"))):
        assert made.isidentifier()
        assert made.isascii()
        assert not keyword.iskeyword(made)
        assert made not in RESERVED


@given(st.text())
def test_shown_names_end_no_docstring_and_no_comment(name: str) -> None:
    text = shown(name)
    assert text.isascii()
    assert text.isprintable()
    assert '"' not in text
    assert "\\" not in text


def test_ranges_of_layers() -> None:
    assert numbered([(f"layers.{i}.up", "head") for i in range(2, 9, 3)]) == (
        ('f"layers.{i}.up"', '"head"'),
        "range(2, 9, 3)",
    )
    assert numbered([("a.0",), ("a.1",), ("a.3",)]) is None
    assert numbered([("a.00",), ("a.01",), ("a.02",)]) is None
    assert numbered([("a.0.0",), ("a.1.1",), ("a.2.2",)]) == (('f"a.{i}.{i}"',), "range(3)")
    assert numbered([("a.{i}.0",), ("a.{i}.1",), ("a.{i}.2",)]) is None
