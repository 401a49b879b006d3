"""`Guard.state_dict`: a job that is resumed goes on as the one that was stopped, and remembers what fell."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch.distributed import checkpoint

import loka
from tests.support import dispatch_sample as sample
from tests.support import planted_faults
from tests.support.models import dispatch_models as models


def loss(model, x):
    return model(x).square().mean()


def rows(step):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


def guarded(**options):
    """A model, its patch, and a guard that checks each step."""
    model = models.Blocks()
    patch = sample.apply(model, sample.BLOCKS)
    return patch, loka.Guard(model, patch, loss=loss, **{"every": 1, "return_after": 4, **options})


def run(guard, steps):
    for step in steps:
        guard.step(rows(step))


def plant(patch, monkeypatch, site, fault):
    """Plant a fault at a site of a patch; the counter ids of the next patch are others."""
    number = next(number for number, label in patch._labels() if label == (site, "fprop"))
    return planted_faults.plant(monkeypatch, number, fault)


def saved_and_read(state):
    """A state through a file, as a checkpoint has it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.fixture
def fallen(monkeypatch):
    """The patch and guard of a job in which 'layers.1' fell back."""
    patch, guard = guarded()
    run(guard, range(3))
    take_out = plant(patch, monkeypatch, "layers.1.down", "output is NaN")
    run(guard, [3])
    take_out()
    assert guard.fallen == ("layers.1",)
    return patch, guard


def test_a_resumed_job_remembers_what_fell_and_goes_on_alike(fallen):
    first, guard = fallen
    state = saved_and_read(guard.state_dict())
    patch, resumed = guarded()
    resumed.load_state_dict(state)
    assert resumed.fallen == ("layers.1",)
    assert patch.sites == first.sites
    assert resumed.state_dict() == state
    for one in (guard, resumed):
        run(one, range(4, 8))
    assert [(event.action, event.step) for event in resumed.events] == [("returned", 7)]
    assert resumed.state_dict() == guard.state_dict()
    assert resumed.report == guard.report


def test_a_module_that_fell_before_the_restart_stays_when_it_falls_again(fallen, monkeypatch):
    _, guard = fallen
    run(guard, range(4, 8))
    patch, resumed = guarded()
    resumed.load_state_dict(guard.state_dict())
    plant(patch, monkeypatch, "layers.1.down", "output is NaN")
    run(resumed, [8])
    assert str(resumed.events[-1]).endswith("; it stays")


def test_steps_are_counted_on_and_doubt_is_kept(monkeypatch):
    patch, guard = guarded(every=5)
    run(guard, range(7))
    _, resumed = guarded(every=5)
    resumed.load_state_dict(guard.state_dict())
    run(resumed, [7, 8])
    assert resumed.report is None
    run(resumed, [9])
    assert resumed.report.step == 9
    plant(patch, monkeypatch, "head", "output is a half more")
    run(guard, range(7, 10))
    again, resumed = guarded(every=5)
    resumed.load_state_dict(guard.state_dict())
    plant(again, monkeypatch, "head", "output is a half more")
    run(resumed, [10])
    assert resumed.report.step == 10


def test_a_state_is_json_too(fallen):
    state = fallen[1].state_dict()
    assert json.loads(json.dumps(state)) == state


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_distributed_checkpoint_holds_a_guard(fallen, tmp_path):
    checkpoint.save({"guard": fallen[1]}, checkpoint_id=tmp_path / "saved", no_dist=True)
    _, resumed = guarded()
    checkpoint.load({"guard": resumed}, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert resumed.fallen == ("layers.1",)
    assert resumed.state_dict() == fallen[1].state_dict()


def test_what_a_user_keeps_stays_the_users(fallen):
    patch, resumed = guarded(return_after=1)
    patch.keep("layers.1.*")
    resumed.load_state_dict(fallen[1].state_dict())
    assert resumed.fallen == ()
    run(resumed, range(4, 8))
    assert resumed.events == ()
    assert "layers.1.down" not in patch.sites


def test_loading_an_earlier_state_brings_back_what_fell_since(fallen):
    patch, guard = fallen
    guard.load_state_dict(guarded()[1].state_dict())
    assert guard.fallen == ()
    assert "layers.1.down" in patch.sites


def without(state, *path):
    """A copy of a state without the value at a path."""
    made = copy.deepcopy(state)
    place = made
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    return made


def test_states_that_do_not_fit_are_refused_with_nothing_changed(fallen):
    state = fallen[1].state_dict()
    patch, guard = guarded()
    before, sites = guard.state_dict(), patch.sites
    package = state["package"]
    other = {**state, "package": "generated.other"}
    with pytest.raises(loka.InputError) as error:
        guard.load_state_dict(other)
    assert str(error.value) == (
        f"guard: the state is of the package 'generated.other', and the patch of '{package}': apply the package that "
        "was guarded when the state was saved; or go on without the state, with all sites in FP8 and no past"
    )
    for changed, message in (
        ({"name": "layers.7"}, "the state has 'layers.7' with layers.0.up.0, layers.0.down, where this patch of"),
        ({"sites": ["layers.0.gate"]}, f"this patch of {package} has layers.0.up.0, layers.0.down: apply the package"),
    ):
        moved = copy.deepcopy(state)
        moved["modules"][0] |= changed
        with pytest.raises(loka.InputError, match=message):
            guard.load_state_dict(moved)
    assert (guard.state_dict(), patch.sites) == (before, sites)


def test_what_is_no_state_is_refused_with_nothing_changed(fallen):
    state = fallen[1].state_dict()
    patch, guard = guarded()
    before, sites = guard.state_dict(), patch.sites
    damaged = [without(state, key) for key in state]
    damaged += [without(state, "modules", 1, key) for key in state["modules"][1]]
    damaged += [without(state, "modules", 1, "judge", key) for key in ("in_doubt", "figures")]
    damaged += [without(state, "modules", 1, "judge", "figures", 0, 2)]
    damaged += [None, [], 3, {}, {**state, "step": "x"}, {**state, "step": float("inf")}, {**state, "modules": 3}]
    for each in damaged:
        with pytest.raises(loka.InputError, match="this is no state of a guard: give what its state_dict returned"):
            guard.load_state_dict(each)
    assert (guard.state_dict(), patch.sites) == (before, sites)


def test_a_removed_patch_takes_no_state(fallen):
    patch, guard = guarded()
    patch.remove()
    with pytest.raises(loka.BindError, match="cannot compare: this patch was removed"):
        guard.load_state_dict(fallen[1].state_dict())
