"""A check runs the model without the hooks of the user: a hook that counts or logs runs once a step."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.nn.utils import prune

import loka
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


def loss(model, x):
    return model(x).square().mean()


X = torch.zeros(8, 32).normal_(generator=torch.Generator().manual_seed(3))

# Each registers a hook and returns its handle; `counted` counts.
OF_MODULES = {
    "forward pre": lambda module, counted: module.register_forward_pre_hook(counted),
    "forward pre, with keywords": lambda module, counted: module.register_forward_pre_hook(counted, with_kwargs=True),
    "forward": lambda module, counted: module.register_forward_hook(counted),
    "forward, with keywords": lambda module, counted: module.register_forward_hook(counted, with_kwargs=True),
    "forward, always": lambda module, counted: module.register_forward_hook(counted, always_call=True),
    "forward, first": lambda module, counted: module.register_forward_hook(counted, prepend=True),
    "backward pre": lambda module, counted: module.register_full_backward_pre_hook(counted),
    "backward": lambda module, counted: module.register_full_backward_hook(counted),
    "a partial": lambda module, counted: module.register_forward_hook(partial(counted, 1)),
}
OF_ALL = {
    "all: forward pre": torch_modules.register_module_forward_pre_hook,
    "all: forward": torch_modules.register_module_forward_hook,
    "all: forward, always": partial(torch_modules.register_module_forward_hook, always_call=True),
    "all: backward pre": torch_modules.register_module_full_backward_pre_hook,
    "all: backward": torch_modules.register_module_full_backward_hook,
}


def accumulator(parameter):
    """The node that adds to a parameter's gradient; it lives as long as it is held."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


OF_PARAMETERS = {
    "gradient": lambda parameter, counted: parameter.register_hook(counted),
    "gradients together": lambda parameter, counted: torch.autograd.graph.register_multi_grad_hook(
        (parameter,), counted
    ),
    "gradient accumulated": lambda parameter, counted: parameter.register_post_accumulate_grad_hook(counted),
    "accumulator": lambda parameter, counted: accumulator(parameter).register_hook(counted),
    "before the accumulator": lambda parameter, counted: accumulator(parameter).register_prehook(counted),
}


class Counter:
    """A hook that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1


@pytest.mark.parametrize("kind", [*OF_MODULES, *OF_ALL, *OF_PARAMETERS])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_hook_of_the_user_runs_in_training_alone(kind, checkpointed, model, patch):
    """On the model, on bound modules, on children that a generated forward calls, and on a bound weight."""
    counts, handles, alive = Counter(), [], []
    if kind in OF_MODULES:
        handles += [OF_MODULES[kind](module, counts) for module in (model, model.layers[1], model.head)]
    elif kind in OF_ALL:
        handles.append(OF_ALL[kind](counts))
    else:
        weights = (model.head.weight, model.layers[1].down)
        alive = [accumulator(weight) for weight in weights]
        handles += [OF_PARAMETERS[kind](weight, counts) for weight in weights]

    def loss(model, x):
        if checkpointed:
            return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean()
        return model(x).square().mean()

    try:
        loss(model, X).backward()
        once = counts.calls
        assert once > 0
        hooks = [list(place.items()) for place in places(model)]
        guard = loka.Guard(model, patch, loss=loss, every=1)
        guard.step(X)
        assert guard.report is not None
        assert counts.calls == once
        assert [list(place.items()) for place in places(model)] == hooks  # and in their order
        loss(model, X).backward()
        assert counts.calls == 2 * once
    finally:
        for handle in handles:
            handle.remove()
    assert len(alive) in (0, 2)
    loss(model, X).backward()
    assert counts.calls == 2 * once


def places(model):
    """Every dictionary of hooks."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    yield from (getattr(module, name) for module in model.modules() for name in names)
    yield from (getattr(torch_modules, f"_global{name}") for name in names)
    yield from (each._backward_hooks for each in model.parameters() if each._backward_hooks is not None)


def test_no_hook_runs_in_the_search_for_a_nan_either(model, patch):
    counts = Counter()
    model.head.register_forward_hook(counts)
    model.layers[1].register_full_backward_hook(counts)
    guard = loka.Guard(model, patch, loss=lambda model, x: (model(x) * torch.nan).sum(), every=1)
    (event,) = guard.step(X)
    assert (event.action, event.module) == ("not finite", "the loss")
    assert counts.calls == 0


def test_hooks_come_back_when_the_loss_fails(model, patch):
    counts = Counter()
    model.head.register_forward_hook(counts)

    def broken(model, x):
        model(x)
        raise KeyError("clicks")

    with pytest.raises(KeyError, match="clicks"):
        loka.Guard(model, patch, loss=broken, every=1).step(X)
    assert counts.calls == 0
    model(X)
    assert counts.calls == 1


def test_a_hook_that_the_loss_registers_runs_and_may_stay(model, patch):
    counts = Counter()
    model.head.register_forward_hook(counts)
    seen = []

    def tapped(model, x):
        handle = model.head.register_forward_hook(lambda module, args, out: seen.append(out))
        out = model(x)
        handle.remove()
        return out.square().mean() + seen.pop().mean()

    loka.Guard(model, patch, loss=tapped, every=1).step(X)
    assert counts.calls == 0
    assert list(model.head._forward_hooks.values()) == [counts]


def test_hooks_of_torch_run(model, patch):
    """They are a part of the model: `prune` computes the weight in one."""
    model.extra = nn.Linear(1, 1, bias=False)
    prune.l1_unstructured(model.extra, "weight", amount=0.5)
    counts = Counter()
    model.extra.register_forward_hook(counts)
    values = []

    def loss(model, x):
        values.append(model.extra.weight_mask.sum().item() * model.extra(torch.ones(1, 1)).item())
        return model(x).square().mean()

    guard = loka.Guard(model, patch, loss=loss, every=1)
    with torch.no_grad():
        model.extra.weight_orig.fill_(3.0)
        model.extra.weight_mask.fill_(1.0)
    guard.step(X)
    assert values == [3.0] * 3
    assert counts.calls == 0


def doubled(module, args, out):
    """A hook that changes what its module computes."""
    return 2 * out


def test_hooks_that_change_the_model_run_on_request(model, patch):
    expected = loss(model, X).item()
    model.head.register_forward_hook(doubled)
    for hooks, factor in ((False, 1), (True, 4)):
        guard = loka.Guard(model, patch, loss=loss, every=1, hooks=hooks)
        guard.step(X)
        assert guard.report.loss_fp8 == pytest.approx(factor * expected)
        assert guard.report.loss == pytest.approx(factor * expected, rel=0.1)


def test_a_loss_that_reads_what_a_hook_kept_is_told_how(model, patch):
    kept = {}
    model.layers[0].register_forward_hook(lambda module, args, out: kept.update(out=out))

    def loss(model, x):
        return model(x).square().mean() + kept["out"].square().mean()

    loss(model, X).backward()
    guard = loka.Guard(model, patch, loss=loss, every=1)
    with pytest.raises(loka.InputError, match="the loss reads a tensor of the last training step, as one that a hook"):
        guard.step(X)
    guard = loka.Guard(model, patch, loss=loss, every=1, hooks=True)
    guard.step(X)
    assert guard.events == ()


def test_a_compiled_model_with_hooks_is_not_compiled_again(compilations):
    model = models.Blocks()
    patch = sample.apply(model, sample.BLOCKS)
    model.layers[1].register_forward_hook(lambda module, args, out: None)
    model.head.register_forward_hook(doubled)
    compiled = torch.compile(model, backend=compilations)
    loss(compiled, X).backward()
    frames = compilations.frame_count
    guard = loka.Guard(compiled, patch, loss=loss, every=1)
    guard.step(X)
    loss(compiled, X).backward()
    assert compilations.frame_count == frames


def test_a_copy_of_a_model_keeps_its_hooks_through_a_check(model, patch):
    model.head.register_forward_hook(doubled)
    copied = copy.deepcopy(model)
    loka.Guard(model, patch, loss=loss, every=1).step(X)
    assert torch.equal(model(X), copied(X))
