"""Refusal of tensors that row kernels cannot read, where torch's own layers would take them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loka.errors import InputError

_KEEP = "or send its sites back to the model's own forward with patch.keep(SITE, ...)"


def refuse_unusual(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Raise InputError unless `x` is a plain dense tensor, and the same kind as `weights`; () for frozen weights.

    A few attribute reads in each call: what comes after would raise an error that does not name the cause.
    """
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else f"{x.layout}".removeprefix("torch.")
        raise InputError(
            f"a generated kernel reads dense tensors, and its input is {kind}: give it one tensor of all rows, {_KEEP}"
        )
    for weight in weights:
        if type(weight).__name__ == "DTensor" and type(x).__name__ != "DTensor":  # importing its class takes long
            raise InputError(
                f"a weight of shape {tuple(weight.shape)} is sharded and its input is not: a module that belongs to a "
                "generated forward became an FSDP unit of its own after apply (patch.verify() names it): shard the "
                "module around it instead"
            )
    if weights and not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise InputError(
            "generated kernels have no rules for torch.func (vmap, grad, vjp, jvp, jacrev): use torch.autograd, call "
            f"patch.remove() before, {_KEEP}"
        )
