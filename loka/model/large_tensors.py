"""Tensors without memory: what is too large to build, and what has no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

_SIZED: frozenset[Callable[..., object]] = frozenset(
    (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full, torch.randint)
)
_MOVES: frozenset[Callable[..., object]] = frozenset((torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda))


LARGE = 1 << 30  # bytes: larger tensors are built on the meta device, so that planning needs no memory for them


def without_numbers(tensor: torch.Tensor) -> str | None:
    """Description of a tensor without values ("a FakeTensor", "on the meta device"); None for any other."""
    if isinstance(tensor, FakeTensor):
        return "a FakeTensor"
    return "on the meta device" if tensor.is_meta else None


class LargeToMeta(TorchFunctionMode):
    """Creates tensors of more than `above` bytes on "meta" if made from a size (torch.empty, zeros, randn, ...).

    A tensor on "meta" stays there when it is moved, so that `model.to("cpu")` in a factory works.
    """

    def __init__(self, above: int) -> None:
        super().__init__()
        self.above = above
        self.sent = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the call unchanged, or with device="meta"."""
        named = dict(kwargs or {})
        if func in _SIZED and self._bytes(func, args, named) > self.above:
            self.sent += 1
            named.pop("pin_memory", None)
            named.pop("generator", None)
            named["device"] = "meta"
        elif func in _MOVES and args[0].device.type == "meta":
            dtype = named.get("dtype") or next((a for a in args[1:] if isinstance(a, torch.dtype)), None)
            return args[0] if dtype is None else func(args[0], dtype=dtype)
        return func(*args, **named)

    @staticmethod
    def _bytes(func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if "out" in kwargs:
            return 0
        if "size" in kwargs:
            size = kwargs["size"]
        elif func is torch.randint:
            size = next((a for a in args if isinstance(a, tuple | list)), ())
        elif args and isinstance(args[0], tuple | list):
            size = args[0]
        else:
            size = [a for a in args if isinstance(a, int)] if func is not torch.full else ()
        dtype = kwargs.get("dtype") or (torch.int64 if func is torch.randint else torch.get_default_dtype())
        return math.prod(int(s) for s in size) * dtype.itemsize
