"""What the integrations share, and Accelerate's hook: neither needs its framework."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import loka
import loka.integrations
from loka.integrations.accelerate import AccelerateHook
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


class Accelerator:
    """Stands for accelerate's: what the hook asks of it, and what it was told."""

    def __init__(self):
        self.sync_gradients = True
        self.registered, self.logged, self.casts = [], [], 0

    def register_for_checkpointing(self, registered):
        self.registered.append(registered)

    def log(self, figures, step):
        self.logged.append((step, figures))

    @contextlib.contextmanager
    def autocast(self):
        self.casts += 1
        with torch.autocast("cpu", torch.bfloat16):
            yield


class Lost(nn.Module):
    """A model whose forward does not reach its last layer."""

    def __init__(self):
        super().__init__()
        self.model = models.Blocks()

    def forward(self, x):
        return self.model.layers[0](x)


def apply(model):
    return sample.apply(model, sample.BLOCKS)


def loss(model, x):
    return model(x.clone().requires_grad_()).square().mean()  # the sample plans gradients of its input, too


def rows(step):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step))


def train(hook, model, steps, accelerator=None):
    for step in steps:
        if accelerator is not None:
            accelerator.sync_gradients = step % 2 == 0  # whether the batch before ended an optimizer step
        hook.step(rows(step))
        loss(model, rows(step)).backward()


GUARD = {"loss": loss, "every": 1}


@pytest.mark.parametrize(
    ("name", "framework"),
    [("AccelerateHook", "accelerate"), ("LightningCallback", "lightning"), ("TransformersCallback", "transformers")],
)
def test_a_framework_that_is_not_installed_is_named(monkeypatch, name, framework):
    monkeypatch.setattr(loka.integrations, "find_spec", lambda asked: None)
    with pytest.raises(loka.InputError) as error:
        getattr(loka.integrations, name)
    assert str(error.value) == (
        f"loka.integrations.{name} needs {framework}, which is not installed: pip install {framework}"
    )


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match=r"module 'loka.integrations' has no attribute 'KerasCallback'"):
        _ = loka.integrations.KerasCallback


def test_the_hook_applies_at_once_and_verifies_after_the_first_step():
    accelerator, model = Accelerator(), models.Blocks()
    hook = AccelerateHook(accelerator, apply, model)
    assert hook.patch.sites == ("layers.0.up.0", "layers.0.down", "layers.1.up.0", "layers.1.down", "head")
    train(hook, model, range(2))
    assert (hook.guard, hook.state_dict(), accelerator.registered) == (None, {}, [])

    hook = AccelerateHook(accelerator, apply, models.Blocks())
    hook.step(rows(0))
    with pytest.raises(loka.VerifyError, match="15 of 15 planned FP8 GEMMs did not run"):
        hook.step(rows(1))


def test_a_guard_sees_one_batch_of_each_optimizer_step_and_its_figures_are_logged():
    accelerator, model = Accelerator(), models.Blocks()
    hook = AccelerateHook(accelerator, apply, model, guard=GUARD)
    assert accelerator.registered == [hook]
    train(hook, model, range(4), accelerator)
    assert [step for step, _ in accelerator.logged] == [0, 1]
    assert accelerator.logged[1][1]["guard/loss"] == hook.guard.report.loss
    assert accelerator.casts == 2  # the precision of the training


def test_a_log_of_ones_own_takes_the_place_of_the_trackers():
    accelerator, steps = Accelerator(), []
    guard = {**GUARD, "log": lambda step, figures: steps.append(step)}
    AccelerateHook(accelerator, apply, models.Blocks(), guard=guard).step(rows(0))
    assert (steps, accelerator.logged) == ([0], [])


@pytest.mark.parametrize("begun", [False, True])
def test_a_guard_goes_on_from_a_checkpoint(begun):
    """Which may be loaded before the first step or after it."""
    model = models.Blocks()
    hook = AccelerateHook(Accelerator(), apply, model, guard=GUARD)
    assert hook.state_dict() == {}
    train(hook, model, range(3))
    state = hook.state_dict()
    assert state["step"] == 3
    model = models.Blocks()
    resumed = AccelerateHook(Accelerator(), apply, model, guard=GUARD)
    if begun:
        train(resumed, model, range(1))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    train(resumed, model, range(3, 4))
    assert resumed.state_dict()["step"] == 4


def test_what_cannot_be_applied_is_refused_with_what_to_write():
    with pytest.raises(loka.InputError, match=r"apply must be the generated package's function, as clicks.apply, not"):
        AccelerateHook(Accelerator(), sample, models.Blocks())
