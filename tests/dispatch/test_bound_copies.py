"""Copies of a bound model, by copy, deepcopy, pickle and torch.save: bound, and to nothing but themselves."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))  # noqa: S301 - made here


COPIES = pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])


@COPIES
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_copy_is_bound_with_numbers_of_its_own(duplicate, mode):
    model, x = models.mlp(), torch.randn(4, 32)
    patch = sample.apply(model, mode=mode)
    other = duplicate(model)
    numbers = {number for module in (model, other) for i in (0, 2, 4) for number in module[i].loka.numbers}
    assert len(numbers) == 6
    with torch.no_grad():
        result = other(x)
    with pytest.raises(dispatch.VerifyError, match="ran as a copy"):
        patch.verify(backward=False)
    copied = dispatch.patch_of(other)
    assert copied.sites == ("0", "2", "4")
    copied.verify(backward=False) if mode == "infer" else models.step(other)
    copied.reset()
    with torch.no_grad():
        assert torch.equal(model(x), result)
    with pytest.raises(dispatch.VerifyError):
        copied.verify(backward=False)


@COPIES
def test_a_copy_works_on_its_own_parameters(duplicate):
    model, x = models.mlp(), torch.randn(4, 32)
    sample.apply(model)
    expected = model(x)
    other = duplicate(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(other(x), expected)
    dispatch.patch_of(other).remove()
    assert type(other[0]) is nn.Linear
    assert isinstance(model[0], dispatch.Bound)


@COPIES
def test_a_frozen_copy_follows_load_state_dict(duplicate):
    model, x = models.mlp(), torch.randn(4, 32)
    sample.apply(model, mode="infer")
    other = duplicate(model)
    assert other[0].loka_weight_0.dtype == torch.float8_e4m3fn
    state = {name: value * 2 for name, value in model.state_dict().items()}
    with torch.inference_mode():
        before = other(x)
        other.load_state_dict(state)
        assert not torch.equal(other(x), before)
    dispatch.patch_of(other).verify()


def test_shallow_copy_shares_parameters_but_not_counts():
    linear = nn.Linear(32, 32)
    patch = sample.apply(linear, (sample.linears(""),))
    other = copy.copy(linear)
    assert other.weight is linear.weight
    other(torch.randn(2, 32))
    with pytest.raises(dispatch.VerifyError):
        patch.verify(backward=False)
    other.weight = nn.Parameter(torch.zeros(32, 32))
    assert torch.equal(other(torch.randn(2, 32)), other.bias.expand(2, 32))


def test_replica_works_on_its_own_parameters_and_counts_for_the_original():
    linear = nn.Linear(32, 32)
    patch = sample.apply(linear, (sample.linears(""),))
    replica = linear._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(32, 32), torch.ones(32)
    assert torch.equal(replica(torch.randn(2, 32)), torch.ones(2, 32))
    patch.verify(backward=False)


def test_a_class_that_pickles_its_own_way_says_so():
    class Own(nn.Linear):
        def __reduce__(self):
            return Own, (2, 2)

    module = Own(32, 32)
    sample.apply(module, (sample.linears("", replaces=Own),))
    with pytest.raises(dispatch.BindError, match="pickles in a way of its own"):
        pickle.dumps(module)


def test_user_code_that_copies_by_new_and_dict_gets_a_bound_copy():
    class Own(nn.Linear):
        def __deepcopy__(self, memo):
            new = type(self).__new__(type(self))
            new.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()})
            return new

    module = Own(32, 32)
    sample.apply(module, (sample.linears("", replaces=Own),))
    other, x = copy.deepcopy(module), torch.randn(3, 32)
    assert torch.equal(other(x), module(x))
    assert other.loka.numbers != module.loka.numbers


def test_patch_of_a_plain_model_is_an_error():
    with pytest.raises(dispatch.BindError, match="no module of this model is bound"):
        dispatch.patch_of(models.mlp())
