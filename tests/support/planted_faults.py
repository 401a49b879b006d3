"""Faults in the FP8 of one site of `dispatch_sample`: what a broken kernel, scale or operand does."""

from __future__ import annotations

import torch

from tests.support.dispatch_sample import kernels


class _Backward(torch.autograd.Function):
    """The identity, whose gradient is changed."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad), None


def clipped(x):
    """Values beyond an eighth of the largest are cut off."""
    bound = x.detach().abs().max() / 8
    return x.clamp(-bound, bound)


def on_gradient(change):
    """A fault of a gradient that passes through."""
    return lambda tensor: _Backward.apply(tensor, change)


def same(x):
    return x


class StuckScale:
    """A scale that stays at what fits the first weight: what grows beyond saturates."""

    def __init__(self):
        self.largest = None

    def __call__(self, weight):
        if self.largest is None:
            self.largest = weight.detach().abs().max()
        return weight.clamp(-self.largest, self.largest)


# Name -> faults of input, weight and output; `StuckScale` is made anew for each use.
FAULTS = {
    "output is NaN": (same, same, lambda y: torch.where(torch.arange(y.shape[-1]) == 0, torch.nan, y)),
    "output has its rows exchanged": (same, same, lambda y: y.flip(0)),
    "output is a half more": (same, same, lambda y: y * 1.5),
    "input is clipped": (clipped, same, same),
    "weight is clipped": (same, clipped, same),
    "scale of the weight is stuck": (same, StuckScale, same),
    "wgrad is zero": (same, on_gradient(torch.zeros_like), same),
    "wgrad is infinite": (same, on_gradient(lambda grad: grad / 0), same),
    "dgrad is wrong": (on_gradient(lambda grad: grad.flip(0)), same, same),
    "gradient of the output is clipped": (same, same, on_gradient(clipped)),
}


def plant(monkeypatch, counter_id, name):
    """Put a fault into the site with this counter id; returns a function that takes it out."""
    right = kernels.linear_e4m3_rowwise
    on_input, on_weight, on_output = FAULTS[name]
    on_weight = on_weight() if on_weight is StuckScale else on_weight

    def linear(x, weight, bias, site):
        if site != counter_id:
            return right(x, weight, bias, site)
        return on_output(right(on_input(x), on_weight(weight), bias, site))

    monkeypatch.setattr(kernels, "linear_e4m3_rowwise", linear)
    return lambda: monkeypatch.setattr(kernels, "linear_e4m3_rowwise", right)
