"""The tree of a model's modules: what is alike is one node, and of many children the smallest are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loka.bench.report.model_tree import (
    WIDEST,
    Precision,
    TreeNode,
    model_tree,
    name_parts,
)
from loka.plan.plan import SitePlan
from tests.support.plan.report_plans import plan_of_sites, site_plan


def named(nodes: tuple[TreeNode, ...]) -> dict[str, object]:
    """Labels with the number of alike modules, nested."""
    return {f"{node.label} x{node.count}": named(node.children) for node in nodes}


def tree(*sites: SitePlan) -> tuple[TreeNode, ...]:
    return model_tree(plan_of_sites(*sites))


def test_alike_branches_are_one_node_that_counts_for_all() -> None:
    layers = [site_plan(f"layers.{i}.{name}", share=0.1) for i in range(3) for name in ("up", "down")]
    found = tree(*layers, site_plan("head", fp8=False, share=0.4))
    assert named(found) == {"layers x1": {"0 to 2 x3": {"up x1": {}, "down x1": {}}}, "head x1": {}}
    layer = found[0].children[0]
    assert (layer.sites, layer.share) == (6, pytest.approx(0.6))
    assert (layer.children[0].sites, layer.children[0].share) == (3, pytest.approx(0.3))
    assert found[1].amounts == {Precision.NATIVE: pytest.approx(0.4)}
    assert layer.children[0].title == "layers.0.up"


def test_branches_that_differ_are_not_merged() -> None:
    found = tree(site_plan("layers.0"), site_plan("layers.1", fp8=False), site_plan("layers.2"))
    assert named(found) == {"layers x1": {"0, 2 x2": {}, "1 x1": {}}}
    renamed = tree(site_plan("tower.a"), site_plan("tower.b"))  # no numbers: names mean something
    assert named(renamed) == {"tower x1": {"a x1": {}, "b x1": {}}}


def test_a_module_with_one_child_is_joined_to_it() -> None:
    assert named(tree(site_plan("embed.dense.0"), site_plan("head"))) == {"embed.dense.0 x1": {}, "head x1": {}}


def test_names_of_any_form_are_taken_apart() -> None:
    assert name_parts("layers.0#1") == ["layers", "0", "#1"]
    assert name_parts("#0") == ["#0"]
    assert name_parts("<script>") == ["<script>"]
    assert name_parts("") == [""]
    assert name_parts("a#b.x#0.up") == ["a#b", "x#0", "up"]
    assert name_parts("a#b#12") == ["a#b", "#12"]
    assert name_parts("#.##") == ["#", "##"]


def test_of_many_children_those_with_fewest_flops_are_one() -> None:
    sites = [site_plan(f"tower.{i}", share=0.001 if i % 2 else 0.01, fp8=i % 3 > 0) for i in range(3 * WIDEST)]
    sites = [replace(each, site=replace(each.site, k=i + 1)) for i, each in enumerate(sites)]  # no two are alike
    (node,) = tree(*sites)
    *kept, rest = node.children
    assert [child.label for child in kept] == [str(i) for i in range(0, 2 * WIDEST - 2, 2)]
    assert (rest.label, rest.sites) == (f"{2 * WIDEST + 1} more", 2 * WIDEST + 1)
    assert sum(child.share for child in node.children) == pytest.approx(1)
