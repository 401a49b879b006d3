"""Faults planted in a small model that trains are found with the rule that is meant, and not without the fault."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from loka.mods.policy_loader import load_policy
from loka.mods.suggestions import suggestible_mods
from loka.plan.examine import examine
from loka.probe.finding_evidence import read_biases, track_biases
from loka.probe.learn import finish
from loka.probe.probe import Probe

pytestmark = pytest.mark.slow

MODEL = """\
import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 1024)
        self.norm = nn.LayerNorm(1024)
        self.second = nn.Linear(1024, 32)
        self.out = nn.Linear(32, 4)
        self.unused = nn.Linear(16, 4)
        self.branch = True  # off where it trains: the policy's model calls unused, the live one does not
        self.feature = 1.0  # factor of the input's feature 3
        self.spike = 0.0  # added to one feature after the norm
        self.lost = 1.0  # factor of the gradients of most rows

    def forward(self, x):
        side = self.unused(x) if self.branch else 0.0
        x = torch.cat([x[:, :3], self.feature * x[:, 3:4], x[:, 4:]], 1)
        x = self.norm(self.first(x))
        x = torch.nn.functional.silu(torch.cat([x[:, :1] + self.spike, x[:, 1:]], 1))
        x = self.out(self.second(x)) + side
        if x.requires_grad:
            x.register_hook(self.fade)
        return x

    def fade(self, grad):
        faded = grad.clone()
        faded[1:] *= self.lost
        return faded


def build():
    return Tower()


def inputs(batch_size):
    return (torch.randn(batch_size, 16),)
"""
POLICY = """\
version: 1
name: tower
model: {factory: "towermodel:build", inputs: "towermodel:inputs", batch_size: 256}
defaults: {compute: fp8, format: e4m3, scaling: SCALING}
"""


@pytest.fixture
def learn(tmp_path, monkeypatch):
    """Train the tower for eight steps, `plant`ed; gives its findings as (kind, site)."""
    (tmp_path / "towermodel.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "towermodel", raising=False)
    # Estimates take longest, and none counts here.
    monkeypatch.setattr("loka.probe.learn.estimate_site", lambda *given: ())

    def run(plant=None, between=None, scaling="rowwise", poison=None):
        (tmp_path / "tower.yaml").write_text(POLICY.replace("SCALING", scaling), encoding="utf-8")
        examined = examine(load_policy("tower.yaml"))
        import towermodel

        model = towermodel.build()
        model.branch = False
        if plant is not None:
            plant(model)
        before = read_biases(model, examined.sites)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        with Probe(model, "tower.yaml", every=1) as probe:
            for step in range(8):
                x = torch.randn(256, 16, generator=generator)
                if poison is not None and step == 3:
                    x[5, 5] = poison
                optimizer.zero_grad()
                model(x).square().nan_to_num().mean().backward()
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
                optimizer.step()
                if between is not None:
                    between(model)
                probe.step()
        tracks = track_biases(before, read_biases(model, examined.sites))
        given = probe.recorded(), examined.sites, examined.settings
        mods = suggestible_mods(examined.built)
        return finish(*given, batch_size=256, bias_norms=tracks, suggestible=mods).profile.findings

    yield run
    sys.modules.pop("towermodel", None)


def taken(finding, use):
    """The modules that the mod of a remedy changes, added to the policy as it says."""
    Path("mended.yaml").write_text(Path("tower.yaml").read_text() + finding.remedy + "\n", encoding="utf-8")
    (applied,) = examine(load_policy("mended.yaml")).adapted.applied
    assert applied.rule.use == use
    return applied.adaptations[0].modules


def told(findings):
    return [(each.kind, each.site) for each in findings]


def test_without_a_fault_only_the_layer_that_is_never_called_is_told(learn):
    assert told(learn()) == [("never_ran", "unused")]


def test_a_bias_that_is_driven_away(learn):
    def push(model):
        with torch.no_grad():
            model.second.bias += 0.05

    found = learn(between=push)
    assert told(found) == [("bias_diverges", "second"), ("never_ran", "unused")]
    assert taken(found[0], "no_bias") == ("second",)


def test_a_level_that_the_norm_has_to_subtract(learn):
    def plant(model):
        with torch.no_grad():
            model.first.bias += 3.0

    found = learn(plant)
    assert told(found) == [("norm_cancels", "first"), ("never_ran", "unused")]
    assert taken(found[0], "block_norm") == ("norm",)


def test_gradients_that_underflow_under_one_scale_and_not_under_one_a_row(learn):
    def plant(model):
        model.lost = 2.0**-24

    found = told(learn(plant, scaling="tensorwise"))
    assert ("gradient_underflows", "second") in found
    assert ("row_dominates", "second") in found
    assert ("row_dominates", "second") not in told(learn(plant))


def test_a_nan_in_one_batch_is_told_where_it_goes_and_spoils_nothing_else(learn):
    found = learn(poison=float("nan"))
    assert ("nonfinite", "first") in told(found)
    assert [each for each in told(found) if each[0] != "nonfinite"] == [("never_ran", "unused")]
