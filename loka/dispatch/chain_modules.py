"""Modules that a chain computes: BatchNorms and dropouts, which training and evaluation change.

A stage is given the module itself, as its mode and its numbers are read in each call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from loka.errors import Code, InputError
from loka.graph.source import has_hooks, has_running

Module = nn.BatchNorm1d | nn.Dropout
Mode = tuple[bool, float]  # whether the module is in training; the eps of a BatchNorm, the p of a dropout

_AGAIN = "generate the package again for the model as it is now, or call patch.remove() before"


def mode_of(module: nn.Module) -> Mode:
    """How a module of the model runs now.

    Raises InputError where it is no longer what the package was generated for: a plain nn.BatchNorm1d or nn.Dropout.
    """
    if not has_hooks(module):
        if type(module) is nn.Dropout:
            return module.training, module.p
        if type(module) is nn.BatchNorm1d and has_running(module):
            return module.training, module.eps
    raise InputError(
        "a generated forward computes an nn.Dropout, or an nn.BatchNorm1d with running statistics, without hooks, and "
        f"found {module!r}: {_AGAIN}",
        Code.CALL,
    )


def tensors_of(module: Module) -> tuple[Tensor, ...]:
    """Its tensors, as a stage names them: of a BatchNorm weight and bias, if any, and the running statistics."""
    if isinstance(module, nn.Dropout):
        return ()
    vectors = (module.weight, module.bias, module.running_mean, module.running_var)
    return tuple([each for each in vectors if each is not None])


def mask_of(y: Tensor, training: bool, p: float, planned: float) -> Tensor | None:
    """What a dropout with the planned p keeps of y (M, N), uint8; None in evaluation, where it keeps all.

    The numbers are those that torch draws for a dropout on a CPU, from the same generator. Raises InputError for
    another p, which is part of the kernels.
    """
    if not training:
        return None
    if p != planned:
        raise InputError(f"a dropout of p = {planned} was planned, and it is {p} now: {_AGAIN}", Code.CALL)
    return torch.empty(y.shape, dtype=torch.uint8, device=y.device).bernoulli_(1.0 - p)
