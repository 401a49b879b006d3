"""What the comments of a draft say is what `loka plan` then prints, and each proposed mod changes the plan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.mods.policy_loader import load_policy
from loka.plan.draft import Drafted, DraftOptions, Proposal, checked

pytestmark = pytest.mark.slow

OWN = '''\
import torch
from torch import nn


class LowRankCross(nn.Module):
    def __init__(self, width, rank):
        super().__init__()
        self.V = nn.Linear(width, rank, bias=False)
        self.U = nn.Linear(rank, width)

    def forward(self, x0, x):
        return x0 * self.U(self.V(x)) + x


def tower(*widths):
    layers = []
    for k, n in zip(widths, widths[1:]):
        layers += [nn.Linear(k, n), nn.LayerNorm(n), nn.ReLU()]
    return nn.Sequential(*layers)


class TwoTower(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.user, self.item = tower(40, width, width), tower(40, width, width)
        self.join = nn.Linear(2 * width, width)
        self.crosses = nn.ModuleList([LowRankCross(width, 32) for _ in range(2)])
        self.head = nn.Linear(width, 1)

    def forward(self, user, item):
        x0 = self.join(torch.cat([self.user(user), self.item(item)], dim=1))
        x = x0
        for cross in self.crosses:
            x = cross(x0, x)
        return self.head(x).squeeze(-1)

    def example_inputs(self, batch):
        return torch.randn(batch, 40), torch.randn(batch, 40)


class Branches(nn.Module):
    """Its Parameter cannot be taken: the forward depends on the values."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(64, 64)), nn.Linear(64, 64)

    def forward(self, x):
        x = x @ self.weight
        if x.sum() > 0:
            x = x + 1
        return self.out(x)

    def example_inputs(self, batch):
        return (torch.randn(batch, 64),)


def two_tower():
    return TwoTower()


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1))


def mlp_inputs(batch):
    return (torch.randn(batch, 64),)


def branches():
    return Branches()
'''
MODELS = {
    "two_tower": ("ownmodels:two_tower", ()),
    "mlp": ("ownmodels:mlp", ("--inputs", "ownmodels:mlp_inputs")),
    "branches": ("ownmodels:branches", ()),
    "movietweetings_ranker": ("loka.zoo:movietweetings_ranker", ("--inputs", "loka.zoo:movietweetings_inputs")),
}


@pytest.fixture(params=MODELS)
def drafted(request, shop, loka) -> Path:
    """The draft for a model."""
    (shop.folder / "ownmodels.py").write_text(OWN)
    factory, options = MODELS[request.param]
    ran = loka("init", factory, *options, "--batch-size", "64")
    assert ran.status == 0, ran.err
    return shop.folder / "policies" / f"{request.param}.yaml"


def planned(path: Path, loka) -> dict:
    ran = loka("plan", "--no-gains", str(path), "--json")
    assert ran.status == 0, ran.err
    return json.loads(ran.out)


def test_the_draft_says_what_plan_finds(drafted, loka):
    """Its header the sites and the share, each comment what the mod changes."""
    text = drafted.read_text()
    head = text.splitlines()[1]
    count, could = re.fullmatch(
        r"# (\d+) GEMM sites?\. With compute: fp8, ([<\d.]+ %) of the training GEMM FLOPs would run in FP8;", head
    ).groups()
    found = planned(drafted, loka)
    assert (found["sites"], found["share_fp8"]) == (int(count), 0.0)
    drafted.write_text(text.replace("compute: auto #", "compute: fp8 #"))
    assert f"{100 * planned(drafted, loka)['share_fp8']:.1f} %" == could
    at = text.find("# mods:\n")
    lines = text[at:].splitlines()[1:] if at >= 0 else []
    said = dict(re.fullmatch(r"#   - \{use: (\w+).*?\} # (.*); [^;]*", line).groups() for line in lines)
    exact = [line for line in lines if line.endswith("; the same function")]
    for group in (exact, *([line] for line in lines if line not in exact)):
        if not group:
            continue
        drafted.write_text(text[:at] + "mods:\n" + "".join(f"{line.removeprefix('# ')}\n" for line in group))
        out = loka("plan", "--no-gains", str(drafted)).out
        for mod in load_policy(drafted).mods:
            (line,) = [each for each in out.splitlines() if each.startswith(f"  {mod.use} (")]
            assert line.partition("): ")[0].count("\n") == 0
            assert line.endswith(f": {said[mod.use]}"), (line, said[mod.use])


def test_a_model_that_cannot_be_planned_is_drafted_without_promises(monkeypatch):
    from loka.errors import InputError
    from loka.plan import draft

    def refuse(path):
        raise InputError("no")

    monkeypatch.setattr(draft, "make_plan", refuse)
    new = Proposal("no_bias", "1 bias dropped", False)
    found = checked(DraftOptions("x", "a:b", None, 8), Drafted((), (Proposal("pad_alignment", "?", True), new)))
    assert (found.mods, found.could) == ((new,), None)


def test_models_of_many_sites_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loka.plan.draft.MANY", 0)
    monkeypatch.setattr("loka.plan.draft.make_plan", pytest.fail)
    site = Site("fc", GemmKind.LINEAR, "", "fc.weight", None, RowCount(1), 64, 64, 1, 1, 1.0, True, (), (), "")
    drafted = Drafted((site,), ())
    assert checked(DraftOptions("x", "a:b", None, 8), drafted) is drafted
