"""Mods in a plan: carried out before sites are found, told in words, kept in plan.json, compared, and explained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loka.kernels.measurements.parts import TimeSource
from loka.mods.adaptation import Adaptation, RewriteResult, Unchanged
from loka.mods.policy_loader import load_policy
from loka.plan.examine import examine
from loka.plan.mod_words import describe_changes, describe_gain, describe_mod, describe_unchanged, touches
from loka.plan.plan import Gain, ModPlan, Plan, SiteTiming, StepTime
from loka.plan.planner import make_plan
from loka.plan.prospect import gain_of
from loka.plan.view.explain import explain
from loka.policy.problems import PolicyError
from tests.support.plan.report_plans import plan_of_sites

MODELS = """
from torch import nn
import torch


class Shop(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(
            nn.Linear(48, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 96), nn.LayerNorm(96), nn.SiLU()
        )
        self.gate = nn.Linear(96, 40)
        self.norm = nn.LayerNorm(40)
        self.out = nn.Linear(40, 1)

    def forward(self, x):
        return self.out(self.norm(self.gate(self.tower(x))))


def shop():
    return Shop()


def example_inputs(batch_size):
    return (torch.randn(batch_size, 48),)
"""
HEAD = 'version: 1\nname: shop\nmodel: {factory: "modshop:shop", batch_size: 32}\ndefaults: {compute: fp8}\n'
Write = Callable[[str], Path]


@pytest.fixture
def write(write_module) -> Write:
    """Writes the entries of `mods` as a policy for the small model above; § is taken out."""
    write_module("modshop", MODELS)

    def put(*mods: str, name: str = "shop.yaml", more: str = "") -> Path:
        text = HEAD + more + "mods:\n" + "".join(f"  - {mod}\n" for mod in mods)
        Path(name).write_text(text.replace("§", ""))
        return Path(name)

    return put


# entries with § before the place of what is wrong, and what the message says
CASES = {
    "nothing matches": (("{use: no_bias, match: §'layers.*'}",), "'layers.*' matches no module that it could change"),
    "misspelt": (("{use: no_bias, match: §towr.0}",), "did you mean 'tower.0' or 'tower.3'"),
    "one of two": (("{use: no_bias, match: ['tower.*', §gaet]}",), "did you mean 'gate'"),
    "misspelt exception": (("{use: no_bias, except: §'gaet'}",), "did you mean 'gate'"),
    "of another kind": (("{use: block_norm, match: §gate}",), "block_norm cannot change 'gate': it is a nn.Linear"),
    "all excepted": (("§{use: hard_swish, except: 'tower.*'}",), "all that it matches is excepted; correct except"),
    "nothing can": (("§{use: block_norm, match: '*norm*'}",), "can change nothing of what it matches: 'norm': "),
    "named and cannot": (
        ("{use: block_norm, match: [§norm, tower.1]}",),
        "block_norm cannot change 'norm': ",
    ),
    "twice": (
        ("{use: no_bias, match: gate}", "§{use: no_bias}"),
        "'gate': no_bias changes it already (mod 1: no_bias, at shop.yaml:6:5); leave it out of one of the two",
    ),
    "twice in another way": (
        ("{use: block_norm, block: 32, match: 'tower.*'}", "§{use: block_norm, block: 16, except: norm}"),
        "'tower.1', 'tower.4': block_norm changes it already (mod 1: block_norm, at shop.yaml:6:5)",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_told_at_its_place(case, write):
    mods, says = CASES[case]
    line, text = next((line, mod) for line, mod in enumerate(mods) if "§" in mod)
    column = len("  - ") + text.index("§") + 1
    with pytest.raises(PolicyError) as caught:
        examine(load_policy(write(*mods)))
    assert [(each.place.line, each.place.column) for each in caught.value.problems] == [(6 + line, column)], str(
        caught.value
    )
    assert says in str(caught.value)


LEFT = ("named and cannot", "of another kind", "twice", "twice in another way")  # which it does not excuse


@pytest.mark.parametrize("case", [case for case in CASES if case not in LEFT])
def test_optional_excuses_what_finds_nothing(case, write):
    mods = [mod.replace("{use", "{optional: true, use") for mod in CASES[case][0]]
    assert len(make_plan(write(*mods)).mods) == len(mods)


def test_an_exception_and_two_entries_share_the_work(write):
    plan = make_plan(
        write("{use: block_norm, block: 16, match: tower.1}", "{use: block_norm, except: [tower.1, norm]}")
    )
    assert [each.modules for mod in plan.mods for each in mod.adaptations] == [("tower.1",), ("tower.4",)]
    assert all(not mod.unchanged for mod in plan.mods)


def test_explain_names_the_mods_at_a_site_and_beside_it(write):
    plan = make_plan(write("{use: no_bias, note: largest gain}", "{use: block_norm, block: 32}", "use: hard_swish"))
    mods = [(each.mod, each.what, each.note) for each in explain(plan, "tower.3").mods]
    assert mods == [
        ("mod 1: no_bias", "tower.3: bias dropped", "largest gain"),
        ("mod 2: block_norm", "tower.1: LayerNorm -> BlockNorm 32", ""),
        ("mod 2: block_norm", "tower.4: LayerNorm -> BlockNorm 32", ""),
        ("mod 3: hard_swish", "tower.2: SiLU -> Hardswish", ""),
        ("mod 3: hard_swish", "tower.5: SiLU -> Hardswish", ""),
    ]
    assert [each.what for each in touches(plan, "tower.0")] == [
        "tower.0: bias dropped",
        "tower.1: LayerNorm -> BlockNorm 32",
        "tower.2: SiLU -> Hardswish",
    ]
    (left,) = touches(plan, "out")
    assert left.what.startswith("left as it is: a final prediction layer")


def a_mod(**changes: object) -> ModPlan:
    return replace(ModPlan("merge_siblings", "mod 1: merge_siblings", "a.yaml:3", True, "one GEMM"), **changes)  # type: ignore[arg-type]


def test_words_of_rewritten_forwards():
    made = tuple(
        RewriteResult(
            "merge_siblings", f"layers.{i}", (f"layers.{i}.q", f"layers.{i}.k"), f"layers.{i}.q+k", "2 linears as one"
        )
        for i in range(3)
    )
    mod = a_mod(rewritten=made)
    assert (
        describe_mod(plan_of_sites(), mod)
        == "merge_siblings (a.yaml:3), the same function: 2 linears as one in layers.* (3 times)"
    )
    assert describe_changes(a_mod()) == "nothing"


def test_sites_of_rewritten_forwards_know_their_mods(make_plan, make_site):
    made = RewriteResult("merge_siblings", "layers.0", ("layers.0.q", "layers.0.k"), "layers.0.q+k", "2 linears as one")
    plan = make_plan(make_site("layers.0.q+k"), make_site("layers.1.q"), mods=(a_mod(rewritten=(made,)),))
    assert [each.what for each in touches(plan, "layers.0.q+k")] == ["2 linears as one"]
    assert touches(plan, "layers.1.q") == ()


def test_words_of_what_is_left_and_gained():
    left = [
        *(Unchanged(f"layers.{i}.norm", "no block divides 100") for i in range(4)),
        Unchanged("", "it is the model itself"),
    ]
    assert describe_unchanged(left) == [
        "layers.*.norm (4): no block divides 100",
        "the model itself: it is the model itself",
    ]
    plan = plan_of_sites()
    assert describe_gain(plan, a_mod()) == ""
    assert describe_gain(plan, a_mod(gain=Gain(12.34, 0.031))) == "gains 12.3 us of a training step, 3.1 % (estimated)"
    assert describe_gain(plan, a_mod(gain=Gain(-2.0, -0.05))) == "costs 2.0 us of a training step, 5.0 % (estimated)"
    assert describe_gain(plan, a_mod(gain=Gain(0.0, 0.0))) == "no difference in what is timed"
    sigmoid = Adaptation("hard_swish", ("a", "b"), "torch.nn.modules.activation.Sigmoid")
    assert describe_changes(a_mod(adaptations=(sigmoid,))) == "2 Sigmoid -> Hardsigmoid"


@pytest.mark.slow
def test_a_mixing_layer_that_is_fused_is_not_padded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        "version: 1\nname: a\n"
        'model: {factory: "loka.zoo:small_ranker", inputs: "loka.zoo:ranker_inputs", batch_size: 64}\n'
    )
    Path("a.yaml").write_text(
        text + "defaults: {compute: keep}\nmods: [{use: pad_alignment}, {use: fuse_interaction}]\n"
    )
    pad, fuse = make_plan("a.yaml").mods
    assert {each.sites for each in pad.rewritten} == {("embed.dense.0",), ("head.out",)}
    left = {each.name for each in pad.unchanged if each.reason.startswith("fuse_interaction takes it")}
    assert left == {f"layers.{i}.{name}" for i in range(3) for name in ("rank", "compress")}
    assert sum(each.what.startswith("a mixing layer") for each in fuse.rewritten) == 3


def timed(plan: Plan, *us: float | None) -> Plan:
    times = (None if each is None else StepTime(each, 0.0, TimeSource.MEASURED) for each in us)
    sites = (
        replace(site, timing=None if time is None else SiteTiming(time, time, time))
        for site, time in zip(plan.sites, times, strict=True)
    )
    return replace(plan, sites=tuple(sites))


def test_a_gain_is_the_difference_of_what_both_plans_time(make_plan, make_site):
    two = make_plan(make_site("q"), make_site("k"))
    one = make_plan(make_site("q+k"))
    assert gain_of(timed(two, 30.0, 10.0), timed(two, 20.0, 10.0)) == Gain(10.0, 0.25)
    assert gain_of(timed(two, 30.0, 10.0), timed(one, 25.0)) == Gain(15.0, 0.375)
    assert gain_of(timed(two, 30.0, None), timed(two, 20.0, None)) == Gain(10.0, 0.3333)
    assert gain_of(timed(two, 30.0, None), timed(two, 20.0, 10.0)) is None
    assert gain_of(timed(two, 30.0, None), timed(one, 25.0)) is None
    assert gain_of(two, timed(two, 20.0, 10.0)) is None
