"""The function that runs every chain of a package: forward and backward are loops over its stages.

What a stage is, and the names of its tensors, is in `loka.kernels.chain_values`. Kernels are those of the package's
`fused`, by name. A chain is one function to autograd, so it frees the tensors of each stage itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from loka.dispatch import batch_norm
from loka.dispatch.chain_modules import Mode, Module, mask_of, mode_of, tensors_of
from loka.dispatch.chain_stages import (
    MOST_REDUCED,
    Partial,
    Values,
    keep,
    launch,
    of_argument,
    partial_sums,
    product,
    quantize_weights,
    reduce_some,
    stage_backward,
    to_next,
)
from loka.dispatch.runtime import Weight, is_empty, output_dtype, saved_tensors, without_rows
from loka.dispatch.shard.gathered_weight import GatheredWeight
from loka.errors import Code, InputError
from loka.kernels.chain_values import Chain, Stage

CounterIds = tuple[int, ...]  # of the fprop of each FP8 linear
# Of a norm; or of a linear and what follows, its weight first. A BatchNorm or a dropout is its module.
Tensors = Sequence[Weight | Module]

_BEFORE = 4  # arguments of the autograd function before x


def run(
    get: Callable[..., Chain],
    fused: Any,
    matrices: Sequence[Tensor],
    norm: Tensors,
    linears: Sequence[Tensors],
    counter_ids: CounterIds = (),
) -> Tensor:
    """The result (..., N) of a chain for x (..., K), the first of `matrices`; it multiplies by or adds the others.

    `norm`: parameters of the norm before the first linear; `linears`: tensors of each stage, its weight first, either
    all Parameters or all frozen; FSDP may have gathered some in FP8 (GatheredWeight). Without gradients it launches
    what inference needs. An FP8 GEMM counts under its counter id, or for a gradient under the next two. BatchNorms in
    training move their running statistics. Raises DtypeError and InputError as `output_dtype`, and InputError for an x
    without rows of another width, and for a BatchNorm that changed or has no rows to compute statistics of.
    """
    x, weights = matrices[0], [group[0] for group in linears]
    frozen = isinstance(weights[0], tuple)
    gathered = tuple([isinstance(weight, GatheredWeight) for weight in weights])
    chain = get(gathered) if True in gathered else get()
    parts = [*norm, *[part for group in linears for part in group]]
    norms = [part for part in parts if isinstance(part, nn.BatchNorm1d)]
    modes = tuple([mode_of(part) for part in parts if isinstance(part, nn.Module)])
    if norms and x.dim() != 2:
        raise InputError(
            f"a BatchNorm of a chain takes rows (M, {chain.k}), and its input is {tuple(x.shape)}", Code.CALL
        )
    tensors: list[Tensor] = [each for part in parts for each in _tensors(part)]
    dtype = output_dtype(x, *(() if frozen else weights))
    if is_empty(x):
        return without_rows(chain.k, chain.n, dtype, matrices, tensors)
    rows = [matrix if matrix.dim() == 2 else matrix.reshape(-1, matrix.shape[-1]) for matrix in matrices]
    in_training = batch_norm.counted(norms, rows[0].shape[0])
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*rows, *tensors)):
        made = ChainFunction.apply(chain, fused, dtype, modes, *rows, *tensors, *counter_ids)  # type: ignore[no-untyped-call]
        outputs: tuple[Tensor, ...] = made if isinstance(made, tuple) else (made,)
    else:
        values = _by_name(chain.frozen_names if frozen else chain.names, (*rows, *tensors))
        outputs = _forward(chain, fused, dtype, modes, values, counter_ids, inference=True)
    y, *statistics = outputs
    batch_norm.update(in_training, statistics, rows[0].shape[0])
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], chain.n)


def _tensors(part: Weight | Module) -> tuple[Tensor, ...]:
    """The tensors of an argument: FP8 values and their scales, those of a module, or the tensor itself."""
    if isinstance(part, nn.Module):
        return tensors_of(part)
    if isinstance(part, GatheredWeight):
        return part, part.fp8, part.scale
    return part if isinstance(part, tuple) else (part,)


def _by_name(groups: Sequence[Sequence[str]], tensors: Sequence[Any]) -> list[Values]:
    """Tensors by name, those of the head and of each stage, which come one after the other."""
    found, start = [], 0
    for names in groups:
        found.append(dict(zip(names, tensors[start : start + len(names)], strict=True)))
        start += len(names)
    return found


class ChainFunction(torch.autograd.Function):
    """A chain as one function of x and the other matrices, the norm's parameters, and the tensors of its stages."""

    @staticmethod
    def forward(
        ctx: Any, chain: Chain, fused: Any, dtype: torch.dtype, modes: tuple[Mode, ...], *arguments: Any
    ) -> Tensor | tuple[Tensor, ...]:
        counter_ids = arguments[chain.arguments :]
        values = _by_name(chain.names, arguments[: chain.arguments])
        ctx.chain, ctx.fused, ctx.dtype, ctx.modes, ctx.counter_ids = chain, fused, dtype, modes, counter_ids
        ctx.dtypes = [matrix.dtype for matrix in arguments[: 1 + len(chain.others)]]
        ctx.overflow_stats = [own.get("dy_overflow_stats") for own in values]  # not saved: backward writes into them
        y, *statistics = _forward(chain, fused, dtype, modes, values, counter_ids, inference=False)
        saved = [own[name] for own, names in zip(values, chain.saved_names, strict=True) for name in names]
        ctx.save_for_backward(*saved)
        if not statistics:
            return y
        ctx.mark_non_differentiable(*statistics)
        return y, *statistics

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        chain, fused, dtypes, needed = ctx.chain, ctx.fused, ctx.dtypes, ctx.needs_input_grad
        values = _restored(ctx)
        head, *stages = values
        of_others = dict(zip(("x", *chain.others), needed[_BEFORE:], strict=False))
        needs_dx = bool(chain.head.names) or of_others["x"] or of_others.get(chain.head.multiplier, False)
        gradients: list[Values] = [{} for _ in stages]
        of_head: Values = {}
        partial: list[Partial] = []
        position = len(needed) - len(ctx.counter_ids)
        stages[-1]["grad"] = grad
        del grad
        modes = list(ctx.modes)
        for number in reversed(range(len(stages))):
            stage, own, reader = chain.stages[number], stages[number], chain.readers[number]
            position -= len(stage.names)
            if reader is not None:
                own["residual_grad"] = stages[reader]["dsum"][0]
            dtype = dtypes[0] if number == 0 and chain.dx_is_plain else ctx.dtype
            counter_id = ctx.counter_ids[number] if ctx.counter_ids else 0
            needs = (number > 0 or needs_dx, needed[position])
            if stage.dropout:
                modes.pop()
            if stage.norm_sums is not None:
                training, _ = modes.pop()
                batch_norm.sum_gradients(fused, stage.norm_sums, own, gradients[number], training)
            partial += stage_backward(fused, stage, own, gradients[number], needs, dtype, counter_id)
            if reader is not None and chain.stages[reader].times is None:
                del stages[reader]["dsum"]
            if len(partial) >= MOST_REDUCED:
                partial = reduce_some(fused, partial)
            if needs[0]:
                (stages[number - 1] if number else head)["grad"] = own.pop("grad")
        dx = None
        if needs_dx and chain.head.backward is not None:
            head["residual_grad"] = of_argument(chain, fused, values, "x", dtypes[0])
            launch(fused, chain.head.backward, head, head)
            dx = head["dx"].to(dtypes[0])
            partial += partial_sums(chain.head, head, of_head)
        while partial:
            partial = reduce_some(fused, partial)
        if needs_dx and chain.head.backward is None:
            dx = of_argument(chain, fused, values, "x", dtypes[0], head["grad"])
        others = []
        for name, dtype in zip(chain.others, dtypes[1:], strict=True):
            found = of_argument(chain, fused, values, name, dtype) if of_others[name] else None
            others.append(None if found is None else found.to(dtype))
        vectors = [of_head.get(name) for name in chain.head.names]
        for stage, own in zip(chain.stages, gradients, strict=True):
            vectors += [own.get(name) for name in stage.names]
        return (*[None] * _BEFORE, dx, *others, *vectors, *[None] * len(ctx.counter_ids))


def _restored(ctx: Any) -> list[Values]:
    """What forward saved, by name, released by `ctx`."""
    values = _by_name(ctx.chain.saved_names, saved_tensors(ctx))
    for stage, own, overflow_stats in zip((ctx.chain.head, *ctx.chain.stages), values, ctx.overflow_stats, strict=True):
        own["dy_overflow_stats"] = overflow_stats
        _put_factors(stage, own, values[0])
    return values


def _put_factors(stage: Stage, own: Values, arguments: Values) -> None:
    """Give a stage the matrices that it multiplies by, under its own names for them."""
    for name, argument in (("times", stage.times), ("multiplier", stage.multiplier)):
        if argument is not None:
            own[name] = arguments[argument]


def _forward(
    chain: Chain,
    fused: Any,
    dtype: torch.dtype,
    modes: Sequence[Mode],
    values: list[Values],
    counter_ids: CounterIds,
    inference: bool,
) -> tuple[Tensor, ...]:
    """The result of a chain, then means and variances of BatchNorms in training, one after the other.

    What backward reads stays in `values`, those of the head and of each stage.
    """
    head, *stages = values
    statistics: list[Tensor] = []
    waiting = list(reversed(modes))
    frozen = "weight" not in stages[0]
    sums_dtype = dtype
    for name in chain.summed:
        sums_dtype = torch.promote_types(sums_dtype, head[name].dtype)
    for own in () if frozen else stages:
        if "weight_fp8" in own:  # gathered; any maxima of all scales do
            own["weight_scale_max"] = own["weight_scale"].view(-1)
    for weights in () if frozen else chain.weights:
        quantize_weights(fused, [stages[number] for number in weights])
    casts = chain.stages[0].gemms.fprop is None and chain.head.forward is None
    head["dtype"], head["y"] = dtype, head["x"].to(dtype) if casts else head["x"]
    _put_factors(chain.head, head, head)
    to_next(fused, chain.head, head, chain.stages[0], stages[0], inference)
    for number, (stage, own) in enumerate(zip(chain.stages, stages, strict=True)):
        for kernel in () if frozen else stage.weight:
            launch(fused, kernel, own, own)
        own["y"] = product(stage, own, dtype, counter_ids[number] if counter_ids else 0)
        last = number + 1 == len(stages)
        own["dtype"] = sums_dtype if "dsum" in stage.kept_names or (last and stage.multiplier is not None) else dtype
        if stage.norm_sums is not None:
            statistics += batch_norm.normalise(own, *waiting.pop())
        if stage.dropout:
            own["mask"] = mask_of(own["y"], *waiting.pop(), stage.dropout)
        _put_factors(stage, own, head)
        if stage.residual is not None:
            own["residual"] = head[stage.residual] if isinstance(stage.residual, str) else stages[stage.residual]["sum"]
        if last:
            to_next(fused, stage, own, None, own, inference)
        else:
            to_next(fused, stage, own, chain.stages[number + 1], stages[number + 1], inference)
            saved = () if inference else stage.saved_names
            keep(own, saved if chain.readers[number] is None else (*saved, "sum"))
        if isinstance(stage.residual, int):
            keep(stages[stage.residual], () if inference else chain.stages[stage.residual].saved_names)
    out: Tensor = own["out"] if "out" in own else own["y"]
    return out, *statistics
