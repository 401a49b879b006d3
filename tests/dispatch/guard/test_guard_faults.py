"""Planted faults are found at the module that has them, which runs by its own forward until they are gone."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

import loka
from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support import planted_faults
from tests.support.models import dispatch_models as models

SITES = ("layers.0.up.0", "layers.0.down", "layers.1.up.0", "layers.1.down", "head")
LIMIT = 100  # sampled steps


def owner(site):
    """The bound module of a site."""
    return site if site == "head" else site[: len("layers.0")]


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def batches(seed=0):
    """Rows and what the model should say of them, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(16, 32, generator=generator)
        yield x, x[:, :4].sum(1, keepdim=True)


def train(model, guard, steps, stop=lambda: False):
    """Train with a guard until `stop`; weights grow a little in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _, batch in zip(range(steps), batches(), strict=False):
        guard.step(batch)
        if stop():
            return
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1.01 if parameter.dim() > 1 else 1


def counter_id(patch, site):
    """The counter id of a site's fprop."""
    return next(number for number, label in patch._labels() if label == (site, "fprop"))


def test_each_check_is_logged_with_its_figures(model, patch, monkeypatch):
    got = []
    planted_faults.plant(monkeypatch, counter_id(patch, SITES[0]), "output is a half more")
    guard = loka.Guard(model, patch, loss=loss, every=2, log=lambda *each: got.append(each))
    train(model, guard, LIMIT, stop=lambda: guard.events)
    assert got[0][0] == 1
    assert got[0][1]["guard/fallen"] == 0
    step, figures = got[-1]
    assert step == guard.events[0].step
    assert figures["guard/fallen"] == 1
    assert figures["guard/loss"] == guard.report.loss
    assert figures["guard/loss_fp8"] == guard.report.loss_fp8
    assert figures["guard/layers.0/output"] == guard.report.errors["layers.0"]["output"] > 0
    assert all(type(value) is float for value in figures.values())


def test_without_a_fault_nothing_happens(model, patch):
    guard = loka.Guard(model, patch, loss=loss, every=1)
    train(model, guard, 60)
    assert guard.events == ()
    assert patch.sites == SITES
    errors = guard.report.errors
    assert list(errors) == ["layers.0", "layers.1", "head"]
    assert "gradient of its input" in errors["layers.1"]
    assert all(0 < value < 0.1 for value in errors["layers.0"].values())
    assert guard.report.loss_fp8 != guard.report.loss


@pytest.mark.parametrize(
    ("site", "fault"),
    # Each fault at two of the sites, of other owners. The input of the first needs no gradient: it has no dgrad.
    [
        (SITES[place % 5], fault)
        for first, fault in enumerate(planted_faults.FAULTS)
        for place in (first, first + 2)
        if (SITES[place % 5], fault) != (SITES[0], "dgrad is wrong")
    ],
)
def test_a_fault_is_found_at_its_module_which_falls_back(site, fault, model, patch, monkeypatch):
    planted_faults.plant(monkeypatch, counter_id(patch, site), fault)
    guard = loka.Guard(model, patch, loss=loss, every=1, return_after=None)
    train(model, guard, LIMIT, stop=lambda: guard.events)
    (event,) = guard.events
    assert (event.action, event.module) == ("fell back", owner(site))
    assert site in event.sites
    assert event.value > event.limit
    assert guard.fallen == (owner(site),)
    assert patch.sites == tuple(each for each in SITES if owner(each) != owner(site))
    assert event.figure in str(event)


class Outer(dispatch.Bound):
    """A generated forward around bound modules, with no GEMM in FP8 itself."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


@pytest.mark.parametrize("fault", ["dgrad is wrong", "output is NaN"])
def test_a_bound_module_around_another_is_not_blamed_for_it(fault, monkeypatch):
    model = models.mlp()
    outer = sample.around(Outer, sites=(), gemms=())
    patch = sample.apply(model, (outer, sample.linears("0", "2")))
    planted_faults.plant(monkeypatch, counter_id(patch, "0"), fault)
    guard = loka.Guard(model, patch, loss=lambda model, x: model(x).square().mean(), every=1)
    for step in range(20):
        guard.step(torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).requires_grad_())
    assert guard.fallen == ("0",)
    assert guard.report.errors[""] == {"output": 0.0, "gradient of its input": 0.0}


@pytest.mark.parametrize("every", [7, 1000])
def test_while_a_figure_is_over_its_limit_the_next_steps_are_checked(every, model, patch, monkeypatch):
    planted_faults.plant(monkeypatch, counter_id(patch, "head"), "output is a half more")
    guard = loka.Guard(model, patch, loss=loss, every=every)
    with torch.no_grad():
        for _, batch in zip(range(every - 1), batches(), strict=False):
            guard.step(batch)
    assert guard.report is None
    train(model, guard, 20, stop=lambda: guard.events)
    (event,) = guard.events
    assert event.step == every - 1 + 7  # eight checks before a figure counts
    assert guard.fallen == ("head",)


def test_a_module_returns_when_the_fault_is_gone_and_stays_when_it_falls_again(model, patch, monkeypatch):
    guard = loka.Guard(model, patch, loss=loss, every=1, return_after=5)
    take_out = planted_faults.plant(monkeypatch, counter_id(patch, "layers.1.down"), "output is NaN")
    train(model, guard, 12)
    assert guard.fallen == ("layers.1",)
    assert [event.step for event in guard.events] == [0]
    take_out()
    train(model, guard, 5)
    assert guard.events[-1].action == "returned"
    assert (guard.events[-1].module, guard.events[-1].step) == ("layers.1", 16)
    assert patch.sites == SITES
    patch.reset()
    train(model, guard, 1)
    patch.verify(backward=False)
    planted_faults.plant(monkeypatch, counter_id(patch, "layers.1.down"), "output is NaN")
    train(model, guard, 1)
    assert guard.fallen == ("layers.1",)
    assert str(guard.events[-1]).endswith("that are not finite; it stays")
    monkeypatch.undo()
    train(model, guard, 20)
    assert guard.fallen == ("layers.1",)
    assert len(guard.events) == 3


def test_what_a_user_keeps_is_left_to_the_user(model, patch, monkeypatch):
    patch.keep("head")
    planted_faults.plant(monkeypatch, counter_id(patch, "head"), "output is NaN")
    guard = loka.Guard(model, patch, loss=loss, every=1)
    train(model, guard, 3)
    assert guard.events == ()
    assert guard.report.errors["head"]["output"] == float("inf")


def test_findings_are_logged_with_what_was_compared(model, patch, monkeypatch, caplog):
    planted_faults.plant(monkeypatch, counter_id(patch, "head"), "output is NaN")
    guard = loka.Guard(model, patch, loss=loss, every=1)
    train(model, guard, 1)
    (record,) = caplog.records
    assert record.name == "loka"
    assert record.getMessage() == (
        "guard: step 0: 'head' fell back: FP8 makes values of its output that are not finite; "
        "it returns after 20 good checks"
    )


def test_a_module_that_was_restored_by_hand_may_fall_again(model, patch, monkeypatch):
    guard = loka.Guard(model, patch, loss=loss, every=1, return_after=2)
    take_out = planted_faults.plant(monkeypatch, counter_id(patch, "head"), "output is NaN")
    train(model, guard, 1)
    patch.restore("head")
    assert guard.fallen == ()
    train(model, guard, 1)
    assert [event.action for event in guard.events] == ["fell back"] * 2
    take_out()
    patch.restore("head")
    train(model, guard, 5)
    assert len(guard.events) == 2
    assert patch.sites == SITES


class Experts(nn.Module):
    """Two experts whose first layers read one tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return (self.c(self.a(x).relu()) + self.d(self.b(x).tanh())).sum(1, keepdim=True)


MERGED = """\
version: 1
name: merged
model:
  factory: "tests.dispatch.guard.test_guard_faults:Experts"
  inputs: "tests.dispatch.guard.test_guard_faults:rows"
  batch_size: 16
target: reference
defaults: {compute: fp8, scaling: rowwise, fuse: never}
mods: [{use: merge_siblings}]
"""


def rows(batch_size):
    return (torch.randn(batch_size, 32),)


@pytest.mark.parametrize("site", ["a+b", "c"])
def test_a_fault_around_bound_modules_is_not_theirs(tmp_path, monkeypatch, site):
    (tmp_path / "merged.yaml").write_text(MERGED)
    loka.generate(tmp_path / "merged.yaml", tmp_path / "merged_experts")
    monkeypatch.syspath_prepend(tmp_path)
    model, package = Experts(), importlib.import_module("merged_experts")
    patch = package.apply(model)
    assert set(patch.sites) == {"a+b", "c", "d"}
    kernels, faulty = package.modules.kernels, counter_id(patch, site)
    plain = kernels.linear_e4m3_rowwise
    monkeypatch.setattr(kernels, "linear_e4m3_rowwise", lambda *each: plain(*each) * (1.5 if each[-1] == faulty else 1))
    guard = loka.Guard(model, patch, loss=loss, every=1)
    train(model, guard, LIMIT, stop=lambda: guard.events)
    assert [name for event in guard.events for name in event.sites] == [site]
    assert set(patch.sites) == {"a+b", "c", "d"} - {site}
