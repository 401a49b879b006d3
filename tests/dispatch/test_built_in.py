"""Changes of what a generated forward has built in, case by case: refused with the place, what is there, the plan."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

from generated import ranker as package
from loka import dispatch
from loka.dispatch.bind.built_in import AGAIN, BACK
from loka.zoo import ranker, ranker_inputs
from tests.support import dispatch_sample as sample
from tests.support.models import changed_models as models
from tests.support.models.dispatch_models import mlp, step

pytestmark = [pytest.mark.filterwarnings("ignore:.*is on cpu"), pytest.mark.filterwarnings("ignore:Mismatch dtype")]


def refused(bind, *problems):
    """That binding fails for these reasons."""
    with pytest.raises(dispatch.BindError) as error:
        bind()
    assert error.value.problems == problems


def found_out(patch, *problems):
    """That verify fails for these reasons alone."""
    with pytest.raises(dispatch.VerifyError, match="the bound model is not as it was bound") as error:
        patch.verify()
    assert error.value.problems == problems


def bound(shape, inline):
    """A model of `changed_models`, and what binds it."""
    model, (binding, _) = models.made(shape), models.bound_as(shape, inline)
    return model, lambda: dispatch.apply(model, "p", (binding,), target="reference")


def train(model):
    model(*ranker_inputs(8)).sum().backward()


APPENDED = "'head': its child 'mlp' holds 8 items, planned were 7"


def test_a_linear_appended_to_the_ranker():
    model = ranker()
    model.head.mlp.append(nn.Linear(256, 256))
    refused(lambda: package.apply(model), f"{APPENDED}: {AGAIN}")
    assert not any(isinstance(module, dispatch.Bound) for module in model.modules())


def test_a_dropout_put_into_a_sequential():
    model = ranker()
    model.layers[1].fmb.insert(2, nn.Dropout(0.1))
    with pytest.raises(dispatch.BindError) as error:
        package.apply(model)
    assert f"'layers.1': its child 'fmb' holds 8 items, planned were 7: {AGAIN}" in error.value.problems
    wrong = "'layers.1': its child 'fmb.2' is a torch.nn.modules.dropout.Dropout, planned was a torch.nn.modules."
    assert any(problem.startswith(f"{wrong}activation.SiLU") for problem in error.value.problems)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_swapped_after_apply(mode):
    model = ranker()
    patch = package.apply(model, mode=mode)
    model.head.mlp[2] = nn.GELU()
    model.layers[0].norm = nn.LayerNorm(32, eps=1e-3)
    model.embed.dense[1].eps = 0.1
    with torch.no_grad():
        model(*ranker_inputs(8))
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify(backward=False)
    kinds = "is a torch.nn.modules.activation.GELU, planned was a torch.nn.modules.activation.SiLU"
    assert {f"'head': its child 'mlp.2' {kinds}: {BACK}"} < set(error.value.problems)
    assert f"'layers.0': its child 'norm' has eps = 0.001, planned was 1e-05: {BACK}" in error.value.problems
    assert f"'embed.dense': its child '1' has eps = 0.1, planned was 1e-05: {BACK}" in error.value.problems


def test_what_is_called_may_be_another_and_what_is_inlined_its_like():
    model = ranker()
    model.head.out = nn.Sequential(nn.Linear(256, 4), nn.Linear(4, 1))
    patch = package.apply(model)
    model.head.out.append(nn.Tanh())
    model.head.mlp[0], model.head.norm = nn.Linear(512, 256), nn.LayerNorm(256)
    train(model)
    patch.verify()
    assert model.head.mlp[0].weight.grad is not None
    del model.head.out
    found_out(
        patch,
        f"'head': lacks 'out': {BACK}",
        f"'head': has no child 'out', which the generated forward calls: {BACK}",
    )


def reordered(model):
    model.towers = nn.ModuleDict({name: model.towers[name] for name in (OTHER, KEY)})


def shortened(model):
    model.pairs = model.pairs[:1]


KEY, OTHER = "user id", "it\"em's\n{0}"
ITEMS = {
    "a layer": ("looped", lambda model: model.layers.append(models.Layer()), "layers' holds 3 items, planned were 2"),
    "one of none": ("looped", lambda model: model.extra.append(nn.Identity()), "extra' holds 1 item, planned were 0"),
    "a parameter": ("products", lambda model: model.ws.append(models.weight()), "ws' holds 4 items, planned were 3"),
    "a parameter less": ("products", shortened, "pairs' holds 1 item, planned were 2"),
    "a key": ("by key", lambda model: model.towers.update({"new": nn.Identity()}), "towers' also holds 'new'"),
    "a key less": ("by key", lambda model: model.towers.pop(KEY), f"towers' lacks {KEY!r}"),
    "order": ("by key", reordered, f"towers' holds {OTHER!r}, {KEY!r} in this order, planned was {KEY!r}, {OTHER!r}"),
}


@pytest.mark.parametrize("case", ITEMS)
def test_items_of_containers(case):
    shape, change, says = ITEMS[case]
    for before in (True, False):
        model, bind = bound(shape, ("layers.0", "layers.1") if shape == "looped" else ())
        patch = None if before else bind()
        change(model)
        with pytest.raises(dispatch.BindError if before else dispatch.VerifyError) as error:
            bind() if before else patch.verify()
        problem = f"the model itself: its child '{says}: {AGAIN if before else BACK}"
        assert error.value.problems[0] == problem
        assert shape == "products" or len(error.value.problems) == 1 or case == "a key less"


def test_attributes_of_every_kind():
    model, bind = bound("functional", ())
    patch = bind()
    model.name, model.act, model.own = "silu", torch.sin, models.shifted_by(3)
    model.settings.shift = 4
    del model.leaky
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    said = [
        problem.removeprefix("the model itself: has ").removesuffix(f": {BACK}") for problem in error.value.problems
    ]
    assert said[0] == "act = torch.sin, planned was torch.tanh"
    assert said[1].startswith("leaky = absent, planned was partial torch.nn.functional.leaky_relu(negative_slope=0.3)")
    assert said[2] == "name = 'silu', planned was 'gelu'"
    assert said[3].startswith("own = tests.support.models.changed_models.shifted_by.<locals>.shifted(shift=3) (source ")
    values = (f"{models.__name__}.Settings(rounds=2, shift={shift})" for shift in (4, 1))
    assert said[4] == "settings = {}, planned was {}".format(*values)


def test_a_float_that_is_read_live_may_change():
    model, bind = bound("looped", ("layers.0", "layers.1"))
    patch, twin = bind(), models.made("looped")
    for gain in (0.25, 2):
        model.layers[1].gain = twin.layers[1].gain = gain
        patch.verify()
        assert models.agree(model, twin, models.inputs("looped"))
    model.layers[1].gain = None
    found_out(
        patch,
        f"the model itself: its child 'layers.1' has gain = None, planned was a float, read in each call: {BACK}",
    )


def test_what_is_shared_stays_shared():
    model, bind = bound("shared", ("one", "net.1", "other"))
    patch = bind()
    model.two = copy.deepcopy(model.one)
    model.other.weight = nn.Parameter(torch.eye(6))
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert f"the model itself: has two = the module 'two', planned was the module 'one': {BACK}" in error.value.problems
    tied = "has weight = the tensor 'other.weight', planned was the tensor 'one.weight'"
    assert f"the model itself: its child 'other' {tied}: {BACK}" in error.value.problems


def test_a_constant_from_outside(monkeypatch):
    _, bind = bound("functional", ())
    patch = bind()
    monkeypatch.setattr(models, "SCALE", 0.25)
    reads = f"the model itself: its forward reads {models.__name__}.SCALE = 0.25, planned was 0.5"
    found_out(patch, f"{reads}: {BACK}")
    _, bind = bound("functional", ())
    refused(bind, f"{reads}: {AGAIN}")


def test_a_method_of_a_child_that_is_called_past_its_forward(monkeypatch):
    _, bind = bound("dynamic", ())

    def project(self, x):
        return x

    monkeypatch.setattr(models.Stack, "project", project)
    refused(bind, f"the model itself: its child 'stack' has another method project than planned: {AGAIN}")


def test_a_plain_linear_that_lost_or_got_a_bias():
    model = mlp()
    patch = sample.apply(model)
    step(model)
    model[2].bias = None
    found_out(patch, f"'2': has no parameter 'bias', planned with shape (32,): {BACK}")
    model = mlp()
    model[2].bias = None
    patch = sample.apply(model, (sample.linears("2", bias=False),))
    step(model)
    model[2].bias = nn.Parameter(torch.ones(32))
    found_out(patch, f"'2': has a bias that the generated forward does not add: {BACK}")


def test_copies_are_held_to_the_same():
    model = ranker()
    importlib.import_module(package.__name__).apply(model)  # pickle finds classes where they are imported from now
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - what was dumped here
        train(copied)
        patch = dispatch.patch_of(copied)
        patch.verify()
        copied.head.mlp.append(nn.Linear(256, 256))
        found_out(patch, f"{APPENDED}: {BACK}")
        del copied.head.mlp[-1]
        patch.verify()


def test_pieces_of_a_flat_parameter_are_not_blamed():
    model = ranker()
    patch = package.apply(model)
    train(model)
    flat = nn.Parameter(torch.zeros(3))
    model.head.norm.weight = flat
    with pytest.raises(dispatch.VerifyError, match=r"'head': norm.weight has shape \(3,\), planned was \(256,\)"):
        patch.verify()
    flat._fsdp_flattened = True  # as FullyShardedDataParallel marks what it keeps between forwards
    patch.verify()
