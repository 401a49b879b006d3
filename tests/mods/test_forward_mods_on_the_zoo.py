"""The mods that rewrite forwards on the zoo's Wukong and DLRM-DCNv2: what there is for them, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.policy.problems import PolicyError

pytestmark = pytest.mark.slow


def planned(folder: Path, model: str, mods: str) -> Plan:
    policy = folder / "policy.yaml"
    policy.write_text(
        f'version: 1\nname: zoo\nmodel: {{factory: "loka.zoo:{model}", inputs: "loka.zoo:ranker_inputs", '
        f"batch_size: 64}}\ndefaults: {{compute: keep}}\nmods: [{mods}]\n"
    )
    return make_plan(policy)


@pytest.mark.parametrize("model", ["small_ranker", "dlrm"])
@pytest.mark.parametrize("use", ["merge_siblings", "batch_small"])
def test_there_are_neither_siblings_nor_batches(tmp_path: Path, model: str, use: str) -> None:
    with pytest.raises(PolicyError, match=f"{use} can change nothing of what it matches"):
        planned(tmp_path, model, f"{{use: {use}}}")


@pytest.mark.parametrize(
    ("mods", "reason"),
    [
        ("", "it is part of a mixing layer, for which fuse_interaction has kernels"),
        ("{use: fuse_interaction}, ", "fuse_interaction takes it into a kernel as it is written"),
    ],
)
def test_products_of_mixing_layers_stay_for_fuse_interaction(tmp_path: Path, mods: str, reason: str) -> None:
    plan = planned(tmp_path, "small_ranker", f"{mods}{{use: pad_alignment, to: 128}}")
    assert all(mod.rewritten for mod in plan.mods)
    left = {each.name: each.reason for each in plan.mods[-1].unchanged}
    for name in ("rank", "compress"):
        assert left[f"layers.0.{name}"].startswith(reason)
