"""Models in wrappers: opened where what is inside is the planned model, otherwise named with what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

BLOCKS = (sample.blocks("layers.0", "layers.1"),)


class FabricModule(nn.Module):
    """Stands for what Lightning's Fabric.setup returns: what its strategy made, and the model itself."""

    def __init__(self, model):
        super().__init__()
        self._forward_module = nn.DataParallel(model)
        self._original_module = model

    def forward(self, x):
        return self._forward_module(x)


FabricModule.__module__, FabricModule.__qualname__ = "lightning.fabric.wrappers", "_FabricModule"


class Task(nn.Module):
    """A module of the user's own, as Lightning has them: the model in an attribute, and a loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = nn.MSELoss()

    def forward(self, x):
        return self.loss(self.model(x), torch.zeros(len(x), 1))


def compiled(model):
    """Compiled, with a child that is compiled by itself."""
    model[2] = torch.compile(model[2], backend="eager")
    return torch.compile(nn.DataParallel(model), backend="eager")


@pytest.mark.parametrize("wrap", [AveragedModel, FabricModule, nn.DataParallel, checkpoint_wrapper, compiled])
def test_apply_goes_to_what_a_wrapper_holds(wrap):
    wrapped = wrap(models.mlp())
    patch = sample.apply(wrapped)
    assert patch.sites == ("0", "2", "4")
    assert dispatch.patch_of(wrapped).sites == patch.sites
    models.step(wrapped)
    patch.verify()
    patch.remove()
    assert not any(isinstance(module, dispatch.Bound) for module in wrapped.modules())


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (Task, "model"),
        (lambda model: Task(nn.DataParallel(model)), "model"),
        (lambda model: nn.Sequential(nn.Identity(), Task(model)), "get_submodule('1.model')"),
    ],
)
def test_a_module_that_holds_the_model_is_refused_with_the_attribute(wrap, name):
    held = wrap(models.Blocks())
    with pytest.raises(dispatch.BindError) as error:
        sample.apply(held, BLOCKS)
    assert str(error.value) == (
        f"tests.support.dispatch_sample: this {type(held).__name__} holds the model that was planned in its .{name}, "
        f"and has none of the planned modules itself: apply to that, dispatch_sample.apply(model.{name}) [LK053]"
    )
    assert not any(isinstance(module, dispatch.Bound) for module in held.modules())


def test_a_model_that_has_some_of_the_modules_is_told_of_those_it_lacks():
    model = nn.Sequential(*models.mlp()[:3], nn.Sequential(*models.mlp()))
    with pytest.raises(dispatch.BindError, match="'4': the model has no such module"):
        sample.apply(model)


def test_adapt_names_the_attribute_too():
    no_bias = (dispatch.Adaptation("no_bias", ("0", "2"), sample.LINEAR),)
    with pytest.raises(dispatch.BindError, match=r"the model is wrapped in a Task, adapt what it wraps \('.model'\)"):
        dispatch.adapt(Task(models.mlp()), "pkg", no_bias)


@pytest.mark.parametrize("before", [True, False])
def test_an_inlined_child_may_be_compiled_in_place(before):
    """Module.compile() leaves its class; the generated forward does not call it."""
    model = models.Blocks()
    if before:
        model.layers[0].up[0].compile(backend="eager")
    planned = (sample.blocks("layers.0", planned=sample.block_fingerprint()),)
    patch = sample.apply(model, planned)
    if not before:
        model.layers[0].up[0].compile(backend="eager")
    models.step(model)
    patch.verify()


@pytest.mark.parametrize(
    ("wrap", "kind"),
    [
        (lambda child: torch.compile(child, backend="eager"), "OptimizedModule"),
        (checkpoint_wrapper, "CheckpointWrapper"),
    ],
)
def test_an_inlined_child_in_a_wrapper_is_refused_and_found_by_verify(wrap, kind):
    problem = (
        f"'layers.0': its child 'up.0' is wrapped ({kind}), and its forward is part of the generated one: wrap the "
        "module around it instead"
    )
    model = models.Blocks()
    patch = sample.apply(model, BLOCKS)
    models.step(model)
    with pytest.raises(dispatch.BindError, match=f"{kind} cannot be put around '0' of a Sequential"):
        model.layers[0].up[0] = wrap(model.layers[0].up[0])
    patch.verify()
    model.layers[0].up._modules["0"] = wrap(model.layers[0].up[0])
    with pytest.raises(dispatch.VerifyError) as found:
        patch.verify()
    assert found.value.problems == (problem,)
    patch.remove()
    with pytest.raises(dispatch.BindError) as refused:
        sample.apply(model, BLOCKS)
    assert problem in refused.value.problems


def test_a_forward_on_the_instance_is_refused_once():
    """Accelerate's prepare sets one for mixed precision, on the whole model."""
    model = models.Blocks()
    block = model.layers[0]
    block.forward = block.forward
    with pytest.raises(dispatch.BindError) as error:
        sample.apply(model, (sample.blocks("layers.0", planned=sample.block_fingerprint()),))
    (problem,) = error.value.problems
    assert "apply before it is set (Accelerate's prepare sets one for mixed precision), or remove it first" in problem
