"""What mods could change around each site: names that the mods take, found in the graph of the forward."""

from __future__ import annotations

import torch
from torch import nn

from loka.cli.tables.probe_tables import group_findings, show_findings
from loka.model.build_model import BuiltModel, build_model
from loka.mods.protocols import Concern
from loka.mods.suggestions import Suggestion, Suggestions, suggestible_mods
from loka.probe.profile.profile import Finding


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter_norm = nn.LayerNorm(32)
        self.up = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.SiLU())
        self.down = nn.Linear(64, 30)
        self.odd = nn.LayerNorm(30)
        self.out = nn.Linear(30, 1)

    def forward(self, x):
        return self.out(torch.nn.functional.silu(self.odd(self.down(self.up(self.enter_norm(x))))))


def suggestible(
    bias: str | None, input_sizes: str | None, norm_after: str | None, norm_before: str | None, activation: str | None
) -> Suggestions:
    """What is suggested against each concern, by the mod that is against it; None where nothing is."""
    names = {
        Concern.BIAS: ("no_bias", bias),
        Concern.INPUT_SIZES: ("norm_first", input_sizes),
        Concern.NORM_AFTER: ("block_norm", norm_after),
        Concern.NORM_BEFORE: ("block_norm", norm_before),
        Concern.ACTIVATION_BEFORE: ("hard_swish", activation),
    }
    return {concern: Suggestion(mod, name) for concern, (mod, name) in names.items() if name is not None}


def test_neighbours_are_the_modules_of_the_functions_around():
    model = Tower()
    assert suggestible_mods(BuiltModel(model, (torch.randn(8, 32),), {}, 8)) == {
        "up.0": suggestible("up.0", "up.0", "up.1", "enter_norm", None),
        "down": suggestible("down", None, None, "up.1", "up.2"),  # a width of 30 has no block
        "out": suggestible(None, None, None, None, None),  # the last keeps its bias, and F.silu has no module
    }
    assert all(linear.bias is not None for linear in (model.up[0], model.down, model.out))


def test_a_wukong():
    found = suggestible_mods(build_model("loka.zoo:small_ranker", "loka.zoo:ranker_inputs", 16))
    layer = suggestible("layers.1.fmb.3", "layers.1.fmb.3", "layers.1.fmb.4", "layers.1.fmb.1", "layers.1.fmb.2")
    assert found["layers.1.fmb.3"] == layer
    assert found["layers.1.fmb.0"][Concern.NORM_BEFORE] == Suggestion("block_norm", "layers.1.fmb_norm")
    assert Concern.BIAS not in found["layers.1.rank"]


def test_a_model_that_cannot_be_watched_proposes_nothing():
    assert suggestible_mods(BuiltModel(Tower(), (torch.randn(8, 31),), {}, 8)) == {}


def test_mods_of_findings_that_are_alike_are_one_for_all(capsys):
    def finding(layer: int, norm: str = "norm") -> Finding:
        remedy = f'mods: [{{use: block_norm, match: "layers.{layer}.{norm}"}}]'
        return Finding(f"layers.{layer}.up", "norm_cancels", f"the row means hold 8{layer} %", remedy)

    found = [finding(0), finding(1), finding(2)]
    assert len(group_findings(found)) == 1
    assert len(group_findings([*found, finding(0, "last")])) == 2
    sites = [f"layers.{i}.up" for i in range(3)]
    show_findings(found, sites, ["layers.0.norm", "layers.1.norm", "layers.2.norm", "norm"])
    assert '    mods: [{use: block_norm, match: "layers.*.norm"}]\n' in capsys.readouterr().out
    show_findings(found[:2], sites, ["layers.0.norm", "layers.1.norm", "layers.2.norm"])
    assert '    mods: [{use: block_norm, match: ["layers.0.norm", "layers.1.norm"]}]\n' in capsys.readouterr().out
    show_findings(found[:1], sites, ["layers.0.norm"])
    assert '    mods: [{use: block_norm, match: "layers.0.norm"}]\n' in capsys.readouterr().out
