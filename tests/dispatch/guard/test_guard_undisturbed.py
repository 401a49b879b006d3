"""Training with a guard that finds nothing is training without one, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import loka
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


class Model(nn.Module):
    """What a check could disturb: BatchNorm, dropout, activation checkpoints, work in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(32)
        self.layers = nn.ModuleList([models.Block(), models.Block()])
        self.act = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        x = self.layers[0](self.norm(x))
        x = self.act(x)
        x = checkpoint(self.layers[1], x, use_reentrant=False)
        return self.head(self.dropout(x))


def bound(model):
    return sample.apply(model, sample.BLOCKS)


def loss(model, batch):
    return (model(batch["x"]) - batch["y"]).square().mean()


def batch(step, rows=16):
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(rows, 32, generator=generator),
        "y": torch.randn(rows, 1, generator=generator),
        "step": step,
    }


def trained(model, guard=None, steps=8):
    """Train, accumulating two batches a step; the guard steps where it disturbs most: amid the accumulation."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, batch(step)).backward()
        if guard is not None:
            guard.step(batch(step))
        loss(model, batch(step + 100)).backward()
        optimizer.step()
    return model.state_dict(), torch.get_rng_state()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, 5])
def test_training_is_bit_equal_with_and_without(rows):
    plain, guarded = Model(), Model()
    bound(plain)
    guard = loka.Guard(guarded, bound(guarded), loss=loss, every=2, rows=rows)
    expected, expected_random = trained(plain)
    state, random = trained(guarded, guard)
    assert guard.report.step == 7
    assert guard.events == ()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in state)
    assert torch.equal(random, expected_random)


def test_a_check_leaves_nothing_behind():
    model = Model()
    patch = bound(model)
    loss(model, batch(0)).backward()
    guard = loka.Guard(model, patch, loss=loss, every=1)
    model.layers[1].eval()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    values = {name: grad.clone() for name, grad in grads.items()}
    buffers = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    types = [type(module) for module in model.modules()]
    random = torch.get_rng_state()
    guard.step(batch(1))
    assert guard.report is not None
    for name, parameter in model.named_parameters():
        assert parameter.grad is grads[name]
        assert torch.equal(parameter.grad, values[name])
    assert all(now is buffers[name][0] and torch.equal(now, buffers[name][1]) for name, now in model.named_buffers())
    assert [module.training for module in model.modules()] == modes
    assert [type(module) for module in model.modules()] == types
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_dropout_is_the_same_in_both_runs():
    model = Model()
    model.dropout.p = 0.9  # another mask would change the loss by much
    guard = loka.Guard(model, bound(model), loss=loss, every=1)
    guard.step(batch(0))
    assert abs(guard.report.loss_fp8 - guard.report.loss) < 0.01 * guard.report.loss


def test_no_hook_that_waits_for_a_gradient_runs():
    """Optimizers that step in the backward would train on the batch of a check."""
    model = Model()
    patch = bound(model)
    ran = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ran.append)
    loka.Guard(model, patch, loss=loss, every=1).step(batch(0))
    assert ran == []
    loss(model, batch(0)).backward()
    assert len(ran) == len(list(model.parameters()))


def test_what_a_check_runs_does_not_count():
    model = Model()
    patch = bound(model)
    loka.Guard(model, patch, loss=loss, every=1).step(batch(0))
    with pytest.raises(loka.VerifyError, match="15 of 15 planned FP8 GEMMs did not run"):
        patch.verify()
    loss(model, batch(0)).backward()
    patch.verify()


def test_autocast_of_the_caller_holds_in_a_check():
    model = Model()
    seen = []

    def autocast_loss(model, batch):
        out = model(batch["x"])
        seen.append(out.dtype)
        return out.float().square().mean()

    guard = loka.Guard(model, bound(model), loss=autocast_loss, every=1)
    with torch.autocast("cpu", torch.bfloat16):
        guard.step(batch(0))
    assert seen == [torch.bfloat16] * 3
    assert guard.events == ()


def test_a_compiled_model_and_its_copy_are_checked_by_what_is_inside():
    model = Model()
    patch = bound(model)
    guard = loka.Guard(torch.compile(model, backend="eager"), patch, loss=loss, every=1)
    guard.step(batch(0))
    eager = loka.Guard(model, patch, loss=loss, every=1)
    eager.step(batch(0))
    assert guard.report == eager.report
    copied = copy.deepcopy(model)
    with pytest.raises(
        loka.BindError, match="the patch is of another model than the one given, which lacks its 'layers"
    ):
        loka.Guard(copied, patch, loss=loss)
