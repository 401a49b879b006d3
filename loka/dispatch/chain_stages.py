"""What a chain does in one stage: launches of kernels, GEMMs and gradients, on tensors by name.

The names are those of `loka.kernels.chain_values`; what is no longer read is removed, so that it is freed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.dispatch.runtime import reduced
from loka.kernels.chain_values import Chain, Launch, ScaledGemm, Stage
from loka.kernels.fused.matrix_kernels import LARGEST_COUNT
from loka.kernels.gemm.m_buckets import mm_by_k_bucket, mm_by_m_bucket
from loka.kernels.gemm.scaled_mm import scaled_mm

Values = dict[str, Any]  # the tensors of a stage by name, and dtypes
Partial = tuple[Values, str, Tensor, torch.dtype]  # where the gradient of a vector goes, its name, sums and dtype

MOST_REDUCED = LARGEST_COUNT["reduce"]  # partial sums in one launch
_OF_WGRAD = ("dy_fp8", "dy_scale", "dy_scale_max", "x_fp8", "x_scale", "x_scale_max")
_COPIES_OF_WGRAD = ("dy_fp8_t", "dy_scale_t", "x_fp8_t", "x_scale_t")
_OF_DGRAD = ("weight_fp8", "weight_scale", "weight_scale_max")
_COPIES_OF_DGRAD = ("weight_fp8_t", "weight_scale_t")


def launch(fused: Any, kernel: Launch, own: Values, following: Values) -> None:
    """Run a kernel on tensors of a stage, and in a forward of the one that follows, which get the results."""
    results = getattr(fused, kernel.function)(*[own[name] for name in kernel.reads])
    inputs = len(kernel.writes_next)
    if inputs + len(kernel.writes) == 1:
        results = (results,)
    following.update(zip(kernel.writes_next, results[:inputs], strict=True))
    own.update(zip(kernel.writes, results[inputs:], strict=True))


def keep(own: Values, names: Collection[str]) -> None:
    """Free all tensors of a stage but these."""
    kept = {name: own[name] for name in names if name in own}
    own.clear()
    own.update(kept)


def scaled_product(
    gemm: ScaledGemm, operands: Sequence[Tensor], dtype: torch.dtype, counter_id: int, bias: Tensor | None = None
) -> Tensor:
    """An FP8 GEMM on `a`, its scales, `b`, its scales."""
    a, scale_a, b, scale_b = operands
    scale_a = scale_a[:1] if gemm.first_scale[0] else scale_a
    scale_b = scale_b[:1] if gemm.first_scale[1] else scale_b
    arguments = (a, scale_a, b, scale_b, *gemm.scalings, dtype, gemm.fast, counter_id)
    out: Tensor
    if gemm.m_buckets:
        by_bucket = mm_by_k_bucket if gemm.operator == "mm_by_k_bucket" else mm_by_m_bucket
        out = by_bucket(*arguments, gemm.m_buckets, bias)
    elif gemm.operator == "scaled_mm":
        out = scaled_mm(*arguments, bias)
    else:
        namespace, _, name = gemm.operator.partition("::")
        out = getattr(getattr(torch.ops, namespace), name).default(*arguments, bias)
    return out


def quantize_weights(fused: Any, stages: Sequence[Values]) -> None:
    """Quantize the weights of several stages by one kernel."""
    made = fused.quantize_weights([own["weight"] for own in stages])
    for place, own in enumerate(stages):
        own["weight_fp8"], own["weight_scale"], own["weight_scale_max"] = made[3 * place : 3 * place + 3]


def to_next(
    fused: Any, stage: Stage, own: Values, next_stage: Stage | None, following: Values, inference: bool
) -> None:
    """From a stage's product to the input of the next linear, or to the result."""
    kernel = stage.inference if inference and stage.inference is not None else stage.forward
    if kernel is not None:
        if "x_overflow_stats" in following:
            own["next_scale"], own["next_overflow_stats"] = following["x_scale"], following["x_overflow_stats"]
        launch(fused, kernel, own, following)
    gemms = None if next_stage is None else next_stage.gemms
    if gemms is not None and (gemms.fprop is None or (gemms.keeps_wgrad and not inference)):
        following.setdefault("x_plain", own["sum"] if "sum" in own else own["y"])


def product(stage: Stage, own: Values, dtype: torch.dtype, counter_id: int) -> Tensor:
    """The linear of a stage."""
    bias = own["bias"].to(dtype) if stage.bias_in_gemm else None
    if stage.gemms.fprop is None:
        return F.linear(own["x_plain"], own["weight"].to(dtype), bias)
    operands = (own["x_fp8"], own["x_scale"], own["weight_fp8"], own["weight_scale"])
    return scaled_product(stage.gemms.fprop, operands, dtype, counter_id, bias)


def stage_backward(
    fused: Any,
    stage: Stage,
    own: Values,
    gradients: Values,
    needed: tuple[bool, bool],
    dtype: torch.dtype,
    counter_id: int,
) -> list[Partial]:
    """From own["grad"], the gradient of a stage's result, to that of its input, in `dtype`, in the same place.

    That of the weight is put into `gradients`; `needed`: whether the input's and the weight's are. Returns the partial
    sums of the other gradients.
    """
    gemms = stage.gemms
    if gemms.keeps_wgrad and needed[1]:
        gradients["weight"] = _plain_wgrad(own["grad"], own)
    if stage.backward is not None and (needed[0] or not gemms.keeps_wgrad):
        launch(fused, stage.backward, own, own)
    if "dsum" in stage.kept_names:  # the matrices that add up to the gradient of the sum
        sums = [own.pop("dsum")] if "dsum" in own else [own["grad"], own.get("residual_grad")]
        own["dsum"] = [each for each in sums if each is not None]
        del sums
    partial = partial_sums(stage, own, gradients)
    if gemms.fprop is None:
        _plain_gemms(stage, own, gradients, needed, dtype)
    else:
        del own["grad"]
        _fp8_gemms(fused, stage, own, gradients, needed, dtype, counter_id)
    return partial


def _plain_gemms(stage: Stage, own: Values, gradients: Values, needed: tuple[bool, bool], dtype: torch.dtype) -> None:
    dy = own["grad"] if stage.backward is None else own.pop("dy")
    del own["grad"]
    if stage.bias_in_gemm:
        gradients["bias"] = dy.sum(0).to(own["bias"].dtype)
    if needed[1]:
        gradients["weight"] = _plain_wgrad(dy, own)
    grad = (dy @ own["weight"].to(dy.dtype)).to(dtype) if needed[0] else None
    keep(own, stage.kept_names)
    own["grad"] = grad


def _plain_wgrad(dy: Tensor, own: Values) -> Tensor:
    dweight: Tensor = (dy.t() @ own["x_plain"].to(dy.dtype)).to(own["weight"].dtype)
    return dweight


def _fp8_gemms(
    fused: Any,
    stage: Stage,
    own: Values,
    gradients: Values,
    needed: tuple[bool, bool],
    dtype: torch.dtype,
    counter_id: int,
) -> None:
    """wgrad first: then its operands are freed before the larger result of dgrad."""
    gemms = stage.gemms
    if gemms.static:
        _transpose(fused, own, needed[1] and not gemms.keeps_wgrad)
    else:
        _requantize_transpose(fused, own, not gemms.keeps_wgrad, needed[0])
    if gemms.wgrad is not None and needed[1]:
        operands = (own["dy_fp8_t"], own["dy_scale_t"], own["x_fp8_t"], own["x_scale_t"])
        dweight = scaled_product(gemms.wgrad, operands, own["weight"].dtype, counter_id + 2)
        gradients["weight"] = dweight[:, : stage.unpadded_k] if stage.unpadded_k else dweight
        del operands
    if gemms.dgrad is None or not needed[0]:
        keep(own, stage.kept_names)
        return
    operands = (own["dy_fp8"], own["dy_scale"], own["weight_fp8_t"], own["weight_scale_t"])
    keep(own, stage.kept_names)
    grad = scaled_product(gemms.dgrad, operands, dtype, counter_id + 1)
    own["grad"] = grad[:, : stage.unpadded_k] if stage.unpadded_k else grad


def _requantize_transpose(fused: Any, own: Values, for_wgrad: bool, for_dgrad: bool) -> None:
    """Transposed copies of operands with rowwise scales, each with one scale, the largest."""
    operands = (*(_OF_WGRAD if for_wgrad else ()), *(_OF_DGRAD if for_dgrad else ()))
    if operands:
        copies = (*(_COPIES_OF_WGRAD if for_wgrad else ()), *(_COPIES_OF_DGRAD if for_dgrad else ()))
        own.update(zip(copies, fused.requantize_transpose([own[name] for name in operands]), strict=True))


def _transpose(fused: Any, own: Values, for_wgrad: bool) -> None:
    """Transposed copies of operands with one scale, which they keep, for those that have none."""
    names = [name for name in ("dy", "x") if for_wgrad and f"{name}_fp8_t" not in own]
    if names:
        copies = fused.transpose([own[f"{name}_fp8"] for name in names])
        own.update(zip([f"{name}_fp8_t" for name in names], copies, strict=True))
    own["dy_scale_t"], own["x_scale_t"] = own["dy_scale"], own.get("x_scale")
    own["weight_scale_t"] = own["weight_scale"]


def partial_sums(stage: Stage, own: Values, gradients: Values) -> list[Partial]:
    """Those of a stage's vectors, taken out of `own`."""
    return [(gradients, name, own.pop(sums), own[name].dtype) for name, sums in stage.sums if sums in own]


def reduce_some(fused: Any, partial: list[Partial]) -> list[Partial]:
    """Add up as many partial sums as a launch takes, into the gradients of their vectors; returns the others."""
    ready = partial[:MOST_REDUCED]
    totals = reduced(fused.reduce, [sums for _, _, sums, _ in ready], [dtype for *_, dtype in ready])
    for (gradients, name, *_), total in zip(ready, totals, strict=True):
        gradients[name] = total
    return partial[MOST_REDUCED:]


def of_argument(
    chain: Chain, fused: Any, values: Sequence[Values], name: str, dtype: torch.dtype, *terms: Tensor
) -> Tensor | None:
    """The gradient of an argument: the sum of `terms` and of what each stage that reads it passes on; None without.

    `values` are those of the head and of each stage.
    """
    plain, factors = list(terms), []
    for stage, own in zip((chain.head, *chain.stages), values, strict=True):
        if stage.residual == name:
            plain += own["dsum"]
        if stage.multiplier == name:
            plain.append(own["dmultiplier"])
        if stage.times == name:
            bias = [own["bias"]] if "bias" in own else []
            factors += [tensor for grad in own["dsum"] for tensor in (grad, own["y"], *bias)]
    for argument, kernel in chain.products:
        if argument == name:
            added: Tensor = getattr(fused, kernel)(*plain, *factors, dtype)
            return added
    return plain[0] if plain else None
