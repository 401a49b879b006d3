"""Identifiers are made, never taken."""

from __future__ import annotations

import keyword

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka.codegen.modules.binding_text import numbered
from loka.codegen.names import RESERVED, Layers, Names, class_name, layers, shown, snake, variable_name

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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("sites", "around", "name", "longer", "paths"),
    [
        ([("head.mlp.0", "head.mlp.4")], (), "head_mlp", "head_mlp_0_to_4", ("head.mlp",)),
        ([("head.mlp.0",)], (), "head_mlp_0", "head_mlp_0", ("head.mlp.0",)),
        ([("a.0.up", "a.0.down"), ("a.1.up", "a.1.down")], (), "a", "a_up_to_down", ("a.0", "a.1")),
        ([("head.mlp.3", "head.mlp.6")], ("head.mlp.0",), "head_mlp_3_to_6", "head_mlp_3_to_6", ("head.mlp",)),
        ([("head.mlp.3", "head.mlp.6")], ("head.mlps.0",), "head_mlp", "head_mlp_3_to_6", ("head.mlp",)),
        ([("up", "head")], (), "tower", "up_to_head", ("up to head",)),
        ([("0", "2")], (), "tower", "layer_0_to_2", ("0 to 2",)),
        ([("",)], (), "tower", "tower", ("",)),
        ([("0",)], (), "layer_0", "layer_0", ("0",)),
    ],
)
def test_functions_are_called_after_layers(
    sites: list[tuple[str, ...]], around: tuple[str, ...], name: str, longer: str, paths: tuple[str, ...]
) -> None:
    assert layers(sites, "tower", (*around, *sites[0])) == Layers(name, longer, paths)


@given(st.lists(st.text(), min_size=1))
def test_names_of_any_layers_are_plain_identifiers(paths: list[str]) -> None:
    found = layers([paths], "tower")
    for made in (found.name, found.longer):
        assert Names().unique(made).isidentifier()


def test_the_longer_name_where_the_short_one_is_taken() -> None:
    names = Names()
    wanted = ("head_mlp", "head_mlp_0_to_4")
    found = [names.first_free(wanted) for _ in range(3)]
    assert found == ["head_mlp", "head_mlp_0_to_4", "head_mlp_0_to_4_2"]
    assert [names.unique("Tower") for _ in range(2)] == ["Tower", "TowerX2"]


def test_class_names_as_functions() -> None:
    found = [snake(name) for name in ("EmbedDense", "LayersFmb0", "DCNv2", "a")]
    assert found == ["embed_dense", "layers_fmb0", "dcnv2", "a"]
