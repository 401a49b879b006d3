"""Drift on real training: other seeds give no alarm, and what went wrong gives one where it went wrong."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from loka import zoo
from loka.numerics.enums import Operand
from loka.probe import drift
from loka.probe.profile import summarise
from loka.probe.profile.profile import Profile
from loka.probe.stats.operand_tracker import OperandTracker, operand_stats
from loka.probe.stats.site_stats import OperandStats, SiteStats
from tests.support.plan.made_profiles import make_profile

pytestmark = pytest.mark.slow

STEPS = 60
EVERY = 10
BATCH = 256
SITE = "layers.1.fmb.3"

Change = Callable[[Tensor], Tensor]


class Watch:
    """Trackers on the input and output gradient of every linear layer, fed while `on`."""

    def __init__(self, model: nn.Module) -> None:
        self.on = False
        self.trackers: dict[tuple[str, Operand], OperandTracker] = {}
        self.linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
        for name, module in self.linears.items():
            module.register_forward_hook(self.hook(name))

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def seen(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if self.on:
                self.take(name, Operand.INPUT, inputs[0])
                output.register_hook(lambda gradient: self.take(name, Operand.GRAD_OUTPUT, gradient))

        return seen

    def take(self, name: str, operand: Operand, x: Tensor) -> None:
        x = x.detach().flatten(0, -2)
        tracker = self.trackers.setdefault((name, operand), OperandTracker(operand, x.shape[1], "cpu"))
        tracker.update(x, x.abs().amax(0), x.shape[0])

    def profile(self) -> Profile:
        sites = []
        for name, module in self.linears.items():
            stats = SiteStats(
                name,
                module.in_features,
                module.out_features,
                self.stats(name, Operand.INPUT),
                self.stats(name, Operand.GRAD_OUTPUT),
                None,
                None,
            )
            sites.append(summarise.summarise(stats, (), BATCH))
        return make_profile(tuple(sites))

    def stats(self, name: str, operand: Operand) -> OperandStats | None:
        tracker = self.trackers.get((name, operand))
        return None if tracker is None else operand_stats(tracker.snapshot())


def trained(seed: int, change: Change | None = None) -> Profile:
    """Train the ranker and watch it. `change` is applied to the input of SITE."""
    torch.manual_seed(seed)
    model = zoo.small_ranker()
    if change is not None:
        model.get_submodule(SITE).register_forward_pre_hook(lambda _, inputs: (change(inputs[0]),))
    watch = Watch(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, foreach=True)
    for step, (inputs, target) in enumerate(islice(zoo.ranker_batches(BATCH, seed), STEPS), 1):
        watch.on = step % EVERY == 0
        optimizer.zero_grad()
        loss: Tensor = zoo.click_loss(model(*inputs), target)
        loss.backward()
        optimizer.step()
    return watch.profile()


@pytest.fixture(scope="module")
def profile() -> Profile:
    return trained(0)


def test_another_seed_gives_no_alarm(profile: Profile) -> None:
    rows = drift.compare(profile, trained(1))
    assert len(rows) == 2 * len(profile.sites)
    assert all(row.distance > 0.0 for row in rows)
    assert drift.exceeded(rows) == ()


def test_a_dead_layer(profile: Profile) -> None:
    rows = drift.compare(profile, trained(1, change=lambda x: 0.0 * x))
    assert {row.site for row in drift.exceeded(rows) if row.operand is Operand.INPUT} == {SITE}
    assert {(row.site, row.words) for row in rows if row.operand is Operand.INPUT and row.site == SITE} == {
        (SITE, "all zeros now; in the profile it had others")
    }
    # Nothing flows back through it either.
    assert ("layers.1.fmb.0", Operand.GRAD_OUTPUT) in {(row.site, row.operand) for row in drift.exceeded(rows)}
