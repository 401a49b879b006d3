"""FP8 operands of generated functions, and how their forwards hand them to their backwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from loka.dispatch.runtime.saved_tensors import saved_tensors


class Quantized(NamedTuple):
    """A matrix (R, C) in FP8, `data * scale`, as kernels of chains return it and read it."""

    data: Tensor  # (R, C) e4m3
    scale: Tensor  # (R, 1) float32
    scale_max: Tensor  # (P,) float32: the largest of them is the largest scale

    @classmethod
    def first(cls, results: Sequence[Tensor]) -> tuple[Any, ...]:
        """A kernel's results, the first three of them as one operand."""
        return cls(*results[:3]), *results[3:]

    @classmethod
    def each(cls, results: Sequence[Tensor]) -> list[Quantized]:
        """A kernel's results as operands, three for each."""
        return [cls(*results[first : first + 3]) for first in range(0, len(results), 3)]


def save_for_backward(ctx: Any, *items: Any) -> None:
    """`ctx.save_for_backward` of tensors, operands and tuples of these."""
    tensors: list[Tensor] = []
    ctx.saved_form = _flattened(items, tensors)
    ctx.save_for_backward(*tensors)


def saved(ctx: Any) -> tuple[Any, ...]:
    """What `save_for_backward` was given, operands as plain tuples; `ctx` releases them as in `saved_tensors`."""
    return _as_given(ctx.saved_form, saved_tensors(ctx))


def _flattened(items: Sequence[Any], tensors: list[Tensor]) -> list[Any]:
    """Append the tensors of `items`; returns their form: the place of each tensor, the slice of each operand."""
    form: list[Any] = []
    for item in items:
        place = len(tensors)
        if type(item) is Quantized:
            tensors.extend((item.data, item.scale, item.scale_max))  # Dynamo of torch 2.11 extends by no NamedTuple
            form.append(slice(place, place + 3))
        elif type(item) is tuple:
            form.append(_flattened(item, tensors))
        else:
            tensors.append(item)
            form.append(place)
    return form


def _as_given(form: list[Any], tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """Items of this form."""
    return tuple([_as_given(each, tensors) if type(each) is list else tensors[each] for each in form])
