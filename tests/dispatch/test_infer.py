"""mode="infer": weights are quantized once, never stale without a word, never a missing gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


@pytest.fixture
def x():
    return torch.randn(6, 32)


def test_frozen_gives_what_training_gives(x):
    train, infer = models.Blocks(), models.Blocks()
    bindings = sample.BLOCKS
    sample.apply(train, bindings)
    patch = sample.apply(infer, bindings, mode="infer")
    with torch.no_grad():
        assert torch.equal(train(x), infer(x))
    patch.verify()
    assert infer.layers[0].loka_weight_1.shape == (32, 64)


def test_casts_and_moves_quantize_anew(x):
    model = models.mlp()
    patch = sample.apply(model, mode="infer")
    model.to(torch.bfloat16)
    assert model[0].loka_weight_0.dtype == torch.float8_e4m3fn
    assert model[0].loka_scale_0.dtype == torch.float32
    with torch.no_grad():
        assert model(x.bfloat16()).dtype == torch.bfloat16
    patch.verify()
    model.to("meta")
    assert model[0].loka_weight_0.device.type == "meta"
    model.to_empty(device="cpu").float()
    model.load_state_dict(models.mlp().state_dict())
    patch.verify()


def test_gradients_that_would_be_lost_are_an_error(x):
    model = models.mlp()
    sample.apply(model, mode="infer")
    with pytest.raises(dispatch.FrozenWeightError, match=r"its parameters need gradients.*mode='train'"):
        model(x)
    model.requires_grad_(False)
    with pytest.raises(dispatch.FrozenWeightError, match="its input need gradients"):
        model(x.clone().requires_grad_())
    assert model(x).shape == (6, 1)


def test_it_works_without_gradients_and_applied_in_inference_mode_is_refreshed_outside(x):
    model = models.mlp()
    with torch.inference_mode():
        patch = sample.apply(model, mode="infer")
        first = model(x)
    patch.refresh()
    patch.reset()
    with torch.no_grad():
        assert torch.equal(first, model(x))
    patch.verify()


def test_remove_takes_buffers_and_hooks_away(x):
    model = models.mlp()
    expected = model(x)
    patch = sample.apply(model, mode="infer")
    patch.remove()
    assert type(model[0]) is nn.Linear
    assert not list(model.buffers())
    assert not model[0]._non_persistent_buffers_set
    assert not model[0]._load_state_dict_post_hooks
    assert torch.equal(model(x), expected)


@pytest.mark.slow
def test_compiled(x):
    model = models.mlp()
    patch = sample.apply(model, mode="infer")
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(dispatch.FrozenWeightError, match="its parameters need gradients"):
        compiled(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    patch.reset()
    with torch.inference_mode():
        compiled(x)
    patch.verify()


def test_a_child_that_was_replaced_is_named_although_nothing_can_be_compared(x):
    model = models.Blocks()
    patch = sample.apply(model, (sample.blocks("layers.0"),), mode="infer")
    with torch.no_grad():
        model(x)
    model.layers[0].up[0] = nn.Tanh()
    with pytest.raises(dispatch.VerifyError, match=r"'layers.0': has no parameter 'up.0.weight', planned with shape"):
        patch.verify()
