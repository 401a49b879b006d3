"""Several patches on one model, one after another, on its parts, and inside of each other: each undoes its own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

NAME = sample.__name__
FIRST, REST = (sample.linears("0"),), (sample.linears("2"), sample.linears("4", shape=(1, 32)))


def bound(model):
    """The modules of a model that are bound, by name."""
    return [name for name, module in model.named_modules() if isinstance(module, dispatch.Bound)]


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_second_remove_does_nothing_to_a_later_patch(model, mode):
    old = sample.apply(model)
    old.remove()
    new = sample.apply(model, mode=mode)
    hooks = [len(module._load_state_dict_post_hooks) for module in model]
    old.remove()
    assert bound(model) == ["0", "2", "4"]
    assert [len(module._load_state_dict_post_hooks) for module in model] == hooks
    assert repr(old) == f"<Patch {NAME}: removed>"
    assert repr(new) == f"<Patch {NAME}: 3 sites in 3 modules>"
    with torch.no_grad():
        model(torch.randn(4, 32))
    new.verify(backward=False)


def test_remove_leaves_what_another_patch_has_bound_since(model):
    old = sample.apply(model)
    dispatch.patch_of(model).remove()
    new = sample.apply(model, FIRST)
    assert repr(old) == f"<Patch {NAME}: 0 sites in 0 modules, 3 lost since apply>"
    assert old.sites == ()
    old.reset()
    assert old.keep("0") == ()
    old.remove()
    assert bound(model) == ["0"]
    models.step(model)
    new.verify(backward=False)


def test_a_patch_that_lost_a_module_says_so(model):
    patch = sample.apply(model)
    dispatch.patch_of(model[2]).remove()
    assert repr(patch) == f"<Patch {NAME}: 2 sites in 2 modules, 1 lost since apply>"
    assert patch.sites == ("0", "4")
    patch.keep("4")
    assert repr(patch) == f"<Patch {NAME}: 1 site in 1 module, 1 kept, 1 lost since apply>"
    with patch.trial(True) as modules:
        assert [each.name for each in modules] == ["0", "4"]
    patch.remove()
    assert bound(model) == []


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_patches_on_parts_are_removed_in_any_order(model, order):
    plain, x = copy.deepcopy(model), torch.randn(4, 32)
    patches = [sample.apply(model, FIRST), sample.apply(model, REST)]
    models.step(model)
    for patch in patches:
        patch.verify(backward=False)
    both = dispatch.patch_of(model)
    assert repr(both) == f"<Patch {NAME}: 3 sites in 3 modules>"
    patches[order[0]].remove()
    assert bound(model) == [["0"], ["2", "4"]][order[1]]
    patches[order[1]].verify(backward=False)
    patches[order[1]].remove()
    assert torch.equal(model(x), plain(x))
    assert [type(module) for module in model] == [type(module) for module in plain]


def test_the_patch_of_a_model_with_two_packages_names_both():
    model = nn.ModuleDict({"one": models.mlp(), "two": models.Blocks()})
    other = type("Linear", (sample.modules.Linear,), {"__module__": "another.package.modules"})
    binding = sample.linears("0")
    sample.apply(model["one"], (dispatch.Binding(**{**_fields(binding), "bound": other}),))
    sample.apply(model["two"], sample.BLOCKS)
    assert repr(dispatch.patch_of(model)) == f"<Patch another.package, {NAME}: 6 sites in 4 modules>"


def _fields(binding):
    return {name: getattr(binding, name) for name in binding.__slots__}


def test_contexts_of_one_patch_nest(model):
    with sample.apply(model) as patch:
        with patch as same:
            assert same is patch
        assert bound(model) == ["0", "2", "4"]
        models.step(model)
        patch.verify()
    assert bound(model) == []
    with pytest.raises(dispatch.BindError, match="cannot enter: this patch was removed"), patch:
        pass


def test_contexts_of_several_patches_nest(model):
    with sample.apply(model, FIRST), sample.apply(model, REST) as rest:
        assert bound(model) == ["0", "2", "4"]
        rest.remove()
        with sample.apply(model, REST):
            assert bound(model) == ["0", "2", "4"]
        assert bound(model) == ["0"]
    assert bound(model) == []


def test_trials_nest(model):
    patch = sample.apply(model)
    patch.keep("2")
    states = []

    def look():
        states.append(bound(model))

    with patch.trial(False):
        look()
        with patch.trial(True):
            look()
            with patch.trial(False):
                look()
                with patch.trial(None):
                    look()
            look()
        look()
    look()
    every, some = ["0", "2", "4"], ["0", "4"]
    assert states == [[], every, [], [], every, [], some]
    assert repr(patch) == f"<Patch {NAME}: 2 sites in 2 modules, 1 kept>"
    models.step(model)
    patch.verify()
    assert patch.restore("2") == ("2",)


@pytest.mark.parametrize("fp8", [True, False, None])
def test_a_patch_that_is_removed_in_a_trial_stays_removed(model, fp8):
    plain, x = copy.deepcopy(model), torch.randn(4, 32)
    patch = sample.apply(model)
    patch.keep("2")
    with patch.trial(fp8):
        patch.remove()
    assert bound(model) == []
    assert not any("loka" in vars(module) for module in model)
    assert torch.equal(model(x), plain(x))
    sample.apply(model)


def test_ranges_nest(model):
    with sample.apply(model) as patch:
        forwards = [type(module).forward for module in model]
        with patch.ranges(), patch.ranges():
            models.step(model)
        assert [type(module).forward for module in model] == forwards
        patch.verify()
