"""BatchNorm in a chain: the statistics of columns, and what kernels are given of them.

A kernel has some of the rows, and a BatchNorm is over all of them. With n = y - mean and scale = weight * rstd, a
kernel computes n * scale + bias from two vectors (`shift` is -mean). Its gradient takes two kernels: one sums dz and
dz * n over the rows, dz being the gradient of n * scale + bias; from these follow the means of columns that the other
subtracts (Ioffe and Szegedy, arXiv 1502.03167, section 3).

Statistics are float32. In evaluation they are the running ones, which the linear's bias counts for; in training it
cancels, and its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from loka.dispatch.chain_stages import Values, launch
from loka.errors import Code, InputError
from loka.kernels.chain_values import Launch


def normalise(own: Values, training: bool, eps: float) -> tuple[Tensor, ...]:
    """Put into a stage what its kernels read, from y (M, N); in training returns its mean and biased variance (N,)."""
    y = own["y"]
    if training:
        var, mean = torch.var_mean(y.float(), dim=0, correction=0)
    else:
        var, mean = own["running_var"].float(), own["running_mean"].float()
        mean = mean - own["bias"].float() if "bias" in own else mean  # y is without it
    rstd = torch.rsqrt(var + eps)
    own["norm_shift"], own["norm_rstd"] = -mean, rstd
    own["norm_scale"] = rstd * own["norm_weight"].float() if "norm_weight" in own else rstd
    if not training:
        return ()
    return (mean + own["bias"].float() if "bias" in own else mean), var


def sum_gradients(fused: Any, sums: Launch, own: Values, gradients: Values, training: bool) -> None:
    """The gradients of a stage's vectors from own["grad"], and the means of columns that its backward subtracts.

    These are zeros where the statistics are the running ones, which do not depend on y.
    """
    launch(fused, sums, own, own)
    dscale, dbias = fused.reduce([own.pop("norm_scale_sums"), own.pop("norm_bias_sums")], torch.float32)
    scale, rstd, m = own["norm_scale"], own["norm_rstd"], own["y"].shape[0]
    if "norm_weight" in own:
        gradients["norm_weight"] = (dscale * rstd).to(own["norm_weight"].dtype)
    if "norm_bias" in own:
        gradients["norm_bias"] = dbias.to(own["norm_bias"].dtype)
    if "bias" in own:
        gradients["bias"] = torch.zeros_like(own["bias"]) if training else (scale * dbias).to(own["bias"].dtype)
    own["norm_mean_dn"] = scale * dbias / m if training else torch.zeros_like(scale)
    own["norm_mean_dn_n"] = scale * rstd * rstd * dscale / m if training else own["norm_mean_dn"]


def counted(modules: Sequence[nn.BatchNorm1d], rows: int) -> list[nn.BatchNorm1d]:
    """The modules in training, each of which has counted a batch of `rows`.

    Raises InputError for a single row, which has no variance, once the first has counted it, as torch does.
    """
    in_training = [module for module in modules if module.training]
    for module in in_training:
        cast(Tensor, module.num_batches_tracked).add_(1)
        if rows == 1:
            raise InputError(
                "a BatchNorm in training needs more than one row: its statistics are those of the batch", Code.CALL
            )
    return in_training


def update(in_training: Sequence[nn.BatchNorm1d], statistics: Sequence[Tensor], rows: int) -> None:
    """Move the running statistics of modules in training towards those of a batch of `rows`, as torch does.

    `statistics`: the mean and the biased variance (N,) of each, one after the other.
    """
    with torch.no_grad():
        for place, module in enumerate(in_training):
            mean, var = statistics[2 * place], statistics[2 * place + 1] * (rows / (rows - 1))
            momentum = cast(float, module.momentum)  # `mode_of` has refused modules without
            for held, new in ((module.running_mean, mean), (module.running_var, var)):
                running = cast(Tensor, held)
                running.mul_(1.0 - momentum).add_((momentum * new).to(running.dtype))
