"""LoRA on a bound model: around a bound layer it works, around a child whose forward was taken over it is refused."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


class LoRA(nn.Module):
    """A frozen linear, and two narrow ones beside it. Like others, it has the weight of what it holds."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_around_a_bound_layer(model):
    torch.manual_seed(0)
    plain = copy.deepcopy(model)
    patch = sample.apply(model)
    around = LoRA(model[2])
    model[2] = around
    plain[2] = copy.deepcopy(around)
    plain[2].base.__class__ = nn.Linear
    x = torch.randn(16, 32)
    found, exact = model(x), plain(x)
    assert 1e-4 < (found - exact).norm() / exact.norm() < 0.2
    found.sum().backward()
    patch.verify(backward=False)
    assert around.down.weight.grad is not None
    assert around.base.weight.grad is None
    assert repr(patch) == f"<Patch {sample.__name__}: 3 sites in 3 modules>"
    del model[2]
    with pytest.raises(dispatch.VerifyError, match="'2': was replaced in the model since apply"):
        patch.verify(backward=False)
    patch.remove()
    assert type(around.base) is nn.Linear


REFUSED = (
    "LoRA cannot be put around '0' of a Sequential: its forward is part of a generated one (layers.0.up.0, "
    "layers.0.down), which would not call it: remove the patch (patch.remove()) or send these sites back (patch.keep) "
    "first; or change the model, then generate, then apply [LK061]"
)


def test_around_a_child_whose_forward_is_part_of_a_generated_one():
    model = models.Blocks()
    patch = sample.apply(model, (sample.blocks("layers.0"),))
    child = model.layers[0].up[0]
    with pytest.raises(dispatch.BindError) as error:
        model.layers[0].up[0] = LoRA(child)
    assert str(error.value) == REFUSED
    assert model.layers[0].up[0] is child.requires_grad_(True)
    model.layers[1].up[0] = LoRA(model.layers[1].up[0])  # which is not bound
    models.step(model)
    patch.verify()
    patch.keep("layers.0.*")
    model.layers[0].up[0] = LoRA(child)
    patch.remove()
    models.step(model)


def test_a_child_may_be_set_again_to_itself():
    """torchrec's DistributedModelParallel does so with all that it does not shard."""
    model = models.Blocks()
    patch = sample.apply(model, (sample.blocks("layers.0"),))
    for module in list(model.modules()):
        for name, child in module.named_children():
            setattr(module, name, child)
    models.step(model)
    patch.verify()


def test_what_is_not_around_it_may_take_its_place():
    """`verify` says what became of it."""
    model = models.Blocks()
    patch = sample.apply(model, (sample.blocks("layers.0", planned=sample.block_fingerprint()),))
    model.layers[0].up[0] = nn.Linear(32, 64)
    patch.remove()
    model.layers[0].up[0] = LoRA(model.layers[0].up[0])


def test_a_model_is_not_held():
    model = models.Blocks()
    sample.apply(model, (sample.blocks("layers.0"),))
    gone = weakref.ref(model.layers[0].up)
    del model
    gc.collect()
    assert gone() is None
