"""Changes of a model that its generated forward does not follow: refused with the place, what is there, the plan."""

from __future__ import annotations

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn

from generated import ranker as package
from loka import dispatch
from loka.dispatch.bind.check_model import AGAIN, BACK
from loka.zoo import ranker, ranker_inputs
from tests.support import dispatch_sample as sample
from tests.support.models import changed_models as models
from tests.support.models.dispatch_models import mlp, step

pytestmark = [pytest.mark.filterwarnings("ignore:.*is on cpu"), pytest.mark.filterwarnings("ignore:Mismatch dtype")]
ANOTHER = "its own forward is another"


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


ENDS = [*((name, shape.inlines[-1]) for name, shape in models.SHAPES.items()), ("looped", ()), ("outer", ())]


@pytest.mark.parametrize(("shape", "inline"), ENDS)
def test_an_unchanged_model_is_bound_and_computes_the_same(shape, inline):
    model, bind = bound(shape, inline)
    patch = bind()
    assert models.agree(model, models.made(shape), models.inputs(shape))
    patch.verify()


def train(model):
    model(*ranker_inputs(8)).sum().backward()


APPENDED = (
    f"'head': {ANOTHER}: v7 = self.mlp.7(v6) -> [?, 2048], planned was "
    "v7 = layer_norm(v6, [2048], self.norm.weight, self.norm.bias, 1e-05)"
)


def test_a_linear_appended_to_the_ranker():
    model = ranker()
    model.head.mlp.append(nn.Linear(2048, 2048))
    refused(lambda: package.apply(model), f"{APPENDED}: {AGAIN}")
    assert not any(isinstance(module, dispatch.Bound) for module in model.modules())


def test_a_dropout_put_into_a_sequential():
    model = ranker()
    model.layers[1].fmb.insert(2, nn.Dropout(0.1))
    with pytest.raises(dispatch.BindError) as error:
        package.apply(model)
    problem = error.value.problems[0]
    where = "'layers.1': its own forward is another at wukong.py:"
    assert problem.startswith(where)
    assert "v7 = dropout(v6, 0.1, True, False), planned was v7 = silu(v6, inplace=False)" in problem
    assert "'layers.1': has no parameter 'fmb.3.weight', planned with shape (2048, 2048)" in error.value.problems


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_swapped_after_apply(mode):
    model = ranker()
    patch = package.apply(model, mode=mode)
    model.head.mlp[2] = nn.GELU()
    model.layers[0].norm = nn.LayerNorm(128, eps=1e-3)
    model.embed.dense[1].eps = 0.1
    with torch.no_grad():
        model(*ranker_inputs(8))
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify(backward=False)
    dense, layer, head = error.value.problems
    gelu = "v2 = gelu(v1, approximate='none'), planned was v2 = silu(v1, inplace=False)"
    assert head == f"'head': {ANOTHER}: {gelu}: {BACK}"
    assert layer.startswith("'layers.0': its own forward is another at wukong.py:")
    assert "self.norm.bias, 0.001), planned was v16 = layer_norm(" in layer
    assert dense.startswith("'embed.dense': its own forward is another: v1 = layer_norm(v0, [256], self.1.weight")


def test_what_is_called_may_be_another_and_what_is_inlined_its_like():
    model = ranker()
    model.head.out = nn.Sequential(nn.Linear(2048, 4), nn.Linear(4, 1))
    patch = package.apply(model)
    model.head.out.append(nn.Tanh())
    model.head.mlp[0], model.head.norm = nn.Linear(2048, 2048), nn.LayerNorm(2048)
    train(model)
    patch.verify()
    assert model.head.mlp[0].weight.grad is not None
    del model.head.out
    found_out(patch, f"'head': {ANOTHER}: return v8, planned was v9 = self.out(v8) -> [?, 1]: {BACK}")


def reordered(model):
    model.towers = nn.ModuleDict({name: model.towers[name] for name in (OTHER, KEY)})


def shortened(model):
    model.pairs = model.pairs[:1]


KEY, OTHER = "user id", "it\"em's\n{0}"
ITEMS = {
    "a layer": ("looped", lambda model: model.layers.append(models.Layer())),
    "one of none": ("looped", lambda model: model.extra.append(nn.Identity())),
    "a parameter": ("products", lambda model: setattr(model, "order", [*model.order, 1])),
    "a parameter less": ("products", shortened),
    "a key": ("by key", lambda model: model.towers.update({"new": nn.Identity()})),
    "a key less": ("by key", lambda model: model.towers.pop(OTHER)),
    "order": ("by key", reordered),
}


@pytest.mark.parametrize("case", ITEMS)
def test_items_of_containers(case):
    shape, change = ITEMS[case]
    for before in (True, False):
        model, bind = bound(shape, ("layers.0", "layers.1") if shape == "looped" else ())
        patch = None if before else bind()
        change(model)
        with pytest.raises(dispatch.BindError if before else dispatch.VerifyError) as error:
            bind() if before else patch.verify()
        assert error.value.problems[0].startswith(f"the model itself: {ANOTHER} at changed_models.py:")
        assert error.value.problems[0].endswith(AGAIN if before else BACK)


ATTRIBUTES = {
    "a name": (lambda model: setattr(model, "name", "silu"), "v1 = silu(v0), planned was v1 = gelu(v0)"),
    "a function": (lambda model: setattr(model, "act", torch.sin), "sin(v5), planned was v6 = tanh(v5)"),
    "a closure": (lambda model: setattr(model, "own", models.shifted_by(3)), "roll(v9, 3, 1), planned was v10 = roll"),
    "an object": (lambda model: setattr(model.settings, "shift", 4), "roll(v6, 4, 1), planned was v7 = roll(v6, 1"),
    "a partial": (lambda model: model.leaky.keywords.update(negative_slope=0.4), "negative_slope=0.4), planned was"),
}


@pytest.mark.parametrize("case", ATTRIBUTES)
def test_attributes_of_every_kind(case):
    change, says = ATTRIBUTES[case]
    model, bind = bound("functional", ())
    patch = bind()
    change(model)
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    (problem,) = error.value.problems
    assert problem.startswith(f"the model itself: {ANOTHER} at changed_models.py:")
    assert says in problem


def test_a_buffer_of_another_shape():
    model, bind = bound("functional", ())
    patch = bind()
    model.mask = torch.ones(1)  # which broadcasts: the operations are the same
    with pytest.raises(dispatch.VerifyError, match=r"its own forward is another: self\.mask: .*1\], planned was .*6\]"):
        patch.verify()


def test_an_attribute_that_went():
    model, bind = bound("functional", ())
    patch = bind()
    del model.leaky
    with pytest.raises(dispatch.VerifyError, match=r"own forward cannot be compared with the planned one: .*leaky"):
        patch.verify()


def test_another_value_of_a_float():
    model, bind = bound("looped", ("layers.0", "layers.1"))
    patch = bind()
    patch.verify()
    model.layers[1].gain = 0.25
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert "its own forward is another" in error.value.problems[0]
    assert "0.25" in error.value.problems[0]


def test_what_is_shared_stays_shared():
    for change in ("a module", "a tensor"):
        model, bind = bound("shared", ("one", "net.1", "other"))
        patch = bind()
        if change == "a module":
            model.two = copy.deepcopy(model.one)
            says = "v1 = self.two(v0) -> [?, 6], planned was v1 = linear(v0, self.one.weight, self.one.bias)"
        else:
            model.other.weight = nn.Parameter(torch.eye(6))
            says = "self.other.weight, self.other.bias), planned was v2 = linear(v1, self.one.weight, self.other.bias)"
        with pytest.raises(dispatch.VerifyError) as error:
            patch.verify()
        assert says in error.value.problems[0]


def test_a_constant_from_outside(monkeypatch):
    _, bind = bound("functional", ())
    patch = bind()
    monkeypatch.setattr(models, "SCALE", 0.25)
    says = r"changed_models.py:\d+ 'x = getattr.* \* SCALE': v2 = mul\(v1, 0.25\), planned was v2 = mul\(v1, 0.5\)"
    with pytest.raises(dispatch.VerifyError, match=says):
        patch.verify()
    _, bind = bound("functional", ())
    with pytest.raises(dispatch.BindError, match=says):
        bind()


def test_a_method_of_a_child_that_is_called_past_its_forward(monkeypatch):
    _, bind = bound("dynamic", ())

    def project(self, x):
        return x

    monkeypatch.setattr(models.Stack, "project", project)
    with pytest.raises(dispatch.BindError, match="the model itself: its own forward is another"):
        bind()


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
        copied.head.mlp.append(nn.Linear(2048, 2048))
        found_out(patch, f"{APPENDED}: {BACK}")
        del copied.head.mlp[-1]
        patch.verify()


def test_pieces_of_a_flat_parameter_are_not_blamed():
    model = ranker()
    patch = package.apply(model)
    train(model)
    flat = nn.Parameter(torch.zeros(3))
    model.head.norm.weight = flat
    with pytest.raises(dispatch.VerifyError, match=r"'head': norm.weight has shape \(3,\), planned was \(2048,\)"):
        patch.verify()
    flat._fsdp_flattened = True  # as FullyShardedDataParallel marks what it keeps between forwards
    patch.verify()
