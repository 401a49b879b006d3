"""A weight that FSDP2 has gathered in FP8: the leaf that autograd knows, with the values that kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from loka.errors import Code, InputError

_aten = torch.ops.aten
_ALIASES = frozenset({_aten.detach.default, _aten.alias.default, _aten.as_strided.default, _aten.view_as.default})
_LIKE = frozenset({_aten.zeros_like.default, _aten.empty_like.default, _aten.ones_like.default})


class GatheredWeight(Tensor):
    """A weight (N, K) of the model's dtype that has no numbers in it, but those of its FP8 copy.

    `fp8`: e4m3 (N, columns), K and zeros behind; `scale`: float32 (N, 1). Gradients are dense and of the model's dtype.
    What reads it in any other way raises InputError.
    """

    fp8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, fp8: Tensor, scale: Tensor, size: Sequence[int], dtype: torch.dtype) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=fp8.device, requires_grad=False)
        made.fp8, made.scale = fp8, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["fp8", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Self:
        return cls(inner["fp8"], inner["scale"], size, dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad})"
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        weight = args[0]
        if func in _ALIASES and isinstance(weight, cls):
            return cls(weight.fp8, weight.scale, weight.shape, weight.dtype)
        if func in _LIKE and isinstance(weight, cls):
            asked = dict(kwargs or {})
            asked = {"dtype": asked.get("dtype") or weight.dtype, "device": asked.get("device") or weight.device}
            return func(torch.empty((), **asked).expand(weight.shape), memory_format=torch.contiguous_format)
        raise InputError(
            f"{func} reads a weight that FSDP has gathered in FP8 (patch.gather_fp8()), which generated kernels alone "
            "do: a module's own forward, and anything else that reads the weight in the forward or the backward, needs "
            "it in the model's dtype: do not call gather_fp8, or keep its sites in the policy (compute: keep)",
            Code.GATHER,
        )
