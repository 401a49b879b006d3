"""What a guard refuses, with what to do; and NaNs that FP8 has no part in."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka
from loka.dispatch.guard.verdicts import UNKNOWN_DB, promises
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


def loss(model, x):
    return model(x).square().mean()


@pytest.fixture
def model():
    return models.mlp()


@pytest.fixture
def patch(model):
    return sample.apply(model)


X = torch.zeros(8, 32).normal_(generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be a whole number of at least 1, not 0"),
        ({"every": 2.5}, r"every must be a whole number of at least 1, not 2\.5"),
        ({"rows": -1}, "rows must be a whole number of at least 1, not -1"),
        ({"return_after": True}, "return_after must be a whole number of at least 1, not True"),
        ({"margin": 0.5}, r"margin must be a number of at least 1, not 0\.5"),
        ({"margin": math.nan}, "margin must be a number of at least 1, not nan"),
        ({"log": 3}, "log must be callable, not a int"),
        ({"loss": 3}, "loss must be a function of a model and a batch, not a int"),
        ({"patch": nn.ReLU()}, "patch must be what apply returned, not a ReLU"),
        ({"model": loss}, r"model must be the nn\.Module that is trained, not a function"),
    ],
)
def test_arguments_are_checked_at_once(arguments, message, model, patch):
    with pytest.raises(loka.InputError, match=message):
        loka.Guard(**{"model": model, "patch": patch, "loss": loss, **arguments})


def test_patches_that_cannot_be_guarded(model, patch):
    with pytest.raises(loka.BindError, match="the patch is of another model than the one given, which lacks its '0'"):
        loka.Guard(models.mlp(), patch, loss=loss)
    frozen = models.mlp()
    with pytest.raises(loka.BindError, match="bound with mode='infer', without gradients: apply with mode='train'"):
        loka.Guard(frozen, sample.apply(frozen, mode="infer"), loss=loss)
    guard = loka.Guard(model, patch, loss=loss, every=2)
    patch.remove()
    guard.step(X)
    with pytest.raises(loka.BindError, match="cannot compare: this patch was removed"):
        guard.step(X)
    with pytest.raises(loka.BindError, match="cannot compare: this patch was removed"):
        loka.Guard(model, patch, loss=loss)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda model, x: model(x), r"must return a scalar tensor with a gradient, not a tensor of shape \(8, 1\)"),
        (lambda model, x: model(x).sum().detach(), r"not a tensor of shape \(\) without gradients"),
        (lambda model, x: model(x).sum().item(), "not a float"),
        (lambda model, x: x.clone().requires_grad_().sum(), "ran none of the bound modules: call the model that it is"),
    ],
)
def test_a_loss_that_is_none(wrong, message, model, patch):
    guard = loka.Guard(model, patch, loss=wrong, every=1)
    with pytest.raises(loka.InputError, match=message):
        guard.step(X)
    assert [type(module) for module in model] == [type(module) for module in model]
    assert patch.sites == ("0", "2", "4")
    assert not any(module._forward_hooks for module in model)


def test_what_a_loss_raises_says_how_it_was_called(model, patch):
    guard = loka.Guard(model, patch, loss=lambda output, target: output["click"] - target, every=1)
    with pytest.raises(TypeError, match="interpreted as an integer") as error:
        guard.step(X)
    (note,) = error.value.__notes__
    assert note.startswith("guard: `loss` was called as loss(model, batch), with what `step` was given")


def test_rows_of_a_batch_that_has_none_in_common(model, patch):
    guard = loka.Guard(model, patch, loss=lambda model, batch: loss(model, batch[0]), every=1, rows=4)
    with pytest.raises(
        loka.InputError, match="rows=4 takes the first rows of all tensors of the batch, which have 3, 8"
    ):
        guard.step((X, torch.zeros(3)))
    with pytest.raises(loka.InputError, match="which are none"):
        guard.step(("x", 3))
    seen = []
    guard = loka.Guard(model, patch, loss=lambda model, x: seen.append(len(x)) or loss(model, x), every=1, rows=4)
    guard.step(X)
    assert seen == [4, 4, 4]


def test_inference_mode_is_refused(model, patch):
    guard = loka.Guard(model, patch, loss=loss, every=1)
    with torch.inference_mode(), pytest.raises(loka.InputError, match=r"called in torch\.inference_mode"):
        guard.step(X)
    with torch.no_grad():  # a check has its own gradients
        guard.step(X)
    assert guard.report is not None


@pytest.mark.parametrize("around", [slice(None), slice(3, 4)])
def test_reentrant_checkpoints_are_refused_with_the_other_kind(around, model, patch):
    """Around bound modules, and around a kept one behind them."""

    def checkpointed(model, x):
        for number, layer in enumerate(model):
            inside = number in range(len(model))[around]
            x = checkpoint(layer, x.requires_grad_(), use_reentrant=True) if inside else layer(x)
        return x.sum()

    guard = loka.Guard(model, patch, loss=checkpointed, every=1)
    with pytest.raises(loka.InputError, match=r"checkpoint\.checkpoint\(\.\.\., use_reentrant=False\)"):
        guard.step(X.clone())


def test_a_package_without_bound_modules_is_guarded_without_effect(model):
    guard = loka.Guard(model, sample.apply(model, ()), loss=loss, every=1)
    assert guard.step(X) == ()
    assert guard.report.errors == {}


class Root(nn.Module):
    """Finite, with a gradient that is infinite times zero."""

    def forward(self, x):
        return (x - x.detach()).abs().sqrt() + x


class Log(nn.Module):
    """NaN for what is negative."""

    def forward(self, x):
        return (x - 100).sqrt()


OUTPUT = "the first value that is not finite is made here, without FP8 too: its output"


@pytest.mark.parametrize(
    ("place", "layer", "module", "says"),
    [
        (1, nn.Sequential(nn.ReLU(), Log()), "1.1", OUTPUT),
        (3, nn.Sequential(nn.ReLU(), Log()), "3.1", OUTPUT),
        (3, nn.Sequential(nn.ReLU(), Root()), "3.1", "without FP8 too: the gradient of its input"),
    ],
)
def test_a_nan_of_a_kept_layer_is_named_as_its_own(place, layer, module, says, model):
    model[place] = layer
    guard = loka.Guard(model, sample.apply(model), loss=loss, every=1)
    (event,) = guard.step(X)
    assert (event.action, event.module, guard.fallen) == ("not finite", module, ())
    assert str(event).endswith(says)


def test_nans_of_weights_of_the_batch_and_of_the_loss(model, patch):
    guard = loka.Guard(model, patch, loss=loss, every=1)
    (event,) = guard.step(torch.where(X > 1, torch.nan, X))
    assert event.module == "the batch"
    model[2].weight.data[0, 0] = torch.nan
    (event,) = guard.step(X)
    assert event.module == "2"
    assert str(event).endswith("its output; weight had such values before")
    model[2].weight.data[0, 0] = 0
    guard = loka.Guard(model, patch, loss=lambda model, x: (model(x).sum() * 0).log() * torch.nan, every=1)
    (event,) = guard.step(X)
    assert event.module == "the loss"
    assert patch.sites == ("0", "2", "4")


def test_promises_are_those_of_the_plan(model, patch):
    bound = patch._modules
    found = promises(sample.__name__, bound)["0"]
    assert found.output == pytest.approx(math.sqrt(0.01**2 + 10**-2.8))
    assert found.gradients == pytest.approx(math.sqrt(0.01**2 + 3 * 10**-2.8))
    unknown = promises("no.such.package", bound)["0"]
    assert unknown.output == pytest.approx(math.sqrt(0.01**2 + 10 ** (-UNKNOWN_DB / 10)))


@pytest.mark.parametrize("text", ["", "[]", '{"sites": [{}], "decisions": []}', '{"sites": 3, "decisions": []}'])
def test_a_plan_that_cannot_be_read_promises_what_is_usual(text, tmp_path, model, patch, monkeypatch):
    (tmp_path / "plan.json").write_text(text)
    monkeypatch.setattr(sample, "__file__", str(tmp_path / "__init__.py"))
    unknown = promises("no.such.package", patch._modules)
    assert promises(sample.__name__, patch._modules) == unknown
