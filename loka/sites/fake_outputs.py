"""Outputs of linear layers and pointwise functions on fake tensors, made from shapes alone.

Running F.linear or F.relu on a fake tensor with a symbolic batch takes up to two milliseconds. For the functions here
the output's shape is known, so a fake tensor over a shared meta tensor is made instead, in some tens of microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from loka.sites.products.matrix_product import size_of
from loka.sites.symbolic_inputs import Size

# The function, and the position of its `inplace` argument if it has one.
_POINTWISE: dict[Callable[..., Any], int | None] = {
    F.relu: 1,
    F.silu: 1,
    F.hardswish: 1,
    F.leaky_relu: 2,
    F.dropout: 3,
    F.gelu: None,
    F.sigmoid: None,
    F.tanh: None,
    torch.relu: None,
    torch.sigmoid: None,
    torch.tanh: None,
    torch.Tensor.relu: None,
    torch.Tensor.sigmoid: None,
    torch.Tensor.tanh: None,
}


_PAIRWISE: frozenset[Callable[..., object]] = frozenset(  # residual streams and gates
    (torch.add, torch.mul, torch.sub, torch.Tensor.add, torch.Tensor.mul, torch.Tensor.sub)
)

VIEWS = frozenset((torch.Tensor.unflatten, torch.Tensor.flatten))  # changes of view with a known layout

_NORMS: dict[Callable[..., Any], tuple[str, ...]] = {
    F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
    F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
}


@dataclass(frozen=True, slots=True, eq=False)
class FakeLayout:
    """Shape, dtype and device of a contiguous floating-point fake tensor."""

    meta: Tensor
    rows: Size  # product of all dimensions but the last
    last: int
    dtype: torch.dtype
    device: torch.device
    widths: dict[int, FakeLayout]  # layouts that differ only in the last dimension; shared by all of them
    blocks: dict[int, FakeLayout] = field(default_factory=dict)  # the same elements with the last dimension in blocks
    whole: FakeLayout | None = None  # of a layout in blocks: the layout that was split


class _FakeOutput(torch.autograd.Function):
    """Adds a fake tensor to the autograd graph, so that it inherits requires_grad and is not a leaf."""

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], source: Tensor) -> Tensor:
        return make()


class FakeOutputs:
    """Makes fake tensors in one FakeTensorMode."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._statics: dict[tuple[Any, ...], Tensor] = {}

    def static(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The fake of a parameter or buffer, on `device`, with its requires_grad and static sizes."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return self.mode.from_tensor(tensor, static_shapes=True)
        key = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
        meta = self._statics.get(key)
        if meta is None:
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            self._statics[key] = meta.requires_grad_(tensor.requires_grad)
        fake = self._fake(meta, device)  # has the requires_grad of `meta`
        if isinstance(tensor, torch.nn.Parameter):
            fake._is_param = True  # checked by isinstance(fake, nn.Parameter)
        return fake

    def layout_of(self, tensor: Tensor) -> FakeLayout | None:
        """The layout of a tensor; None if torch must compute its outputs."""
        if type(tensor) is not FakeTensor or tensor.layout != torch.strided or not tensor.dtype.is_floating_point:
            return None
        if tensor.dim() < 1 or not isinstance(tensor.shape[-1], int) or not tensor.is_contiguous():
            return None
        with unset_fake_temporarily():
            meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        layout = FakeLayout(meta, size_of(tensor.shape[:-1]), tensor.shape[-1], tensor.dtype, tensor.device, {})
        layout.widths[layout.last] = layout
        return layout

    def widened(self, layout: FakeLayout, n: int) -> FakeLayout:
        """The same layout with another last dimension."""
        found = layout.widths.get(n)
        if found is None:
            with unset_fake_temporarily():
                meta = torch.empty((*layout.meta.shape[:-1], n), dtype=layout.dtype, device="meta")
            found = layout.widths[n] = FakeLayout(meta, layout.rows, n, layout.dtype, layout.device, layout.widths)
        return found

    def viewed(self, func: Callable[..., Any], args: tuple[Any, ...], layout: FakeLayout) -> FakeLayout | None:
        """The layout after a change of view: a norm over blocks splits rows into blocks, and joins them again."""
        if func is torch.Tensor.flatten:
            return layout.whole if args[1:] in ((-2,), (-2, -1)) else None
        if func is not torch.Tensor.unflatten or len(args) != 3 or args[1] != -1 or len(args[2]) != 2:
            return None
        count, block = args[2]
        if type(block) is not int or block < 1 or layout.last % block or count not in (-1, layout.last // block):
            return None
        found = layout.blocks.get(block)
        if found is None:
            with unset_fake_temporarily():
                shape = (*layout.meta.shape[:-1], layout.last // block, block)
                meta = torch.empty(shape, dtype=layout.dtype, device="meta")
            rows = layout.rows * (layout.last // block)
            found = FakeLayout(meta, rows, block, layout.dtype, layout.device, {}, whole=layout)
            found.widths[block] = layout.blocks[block] = found
        return found

    def make(self, layout: FakeLayout, sources: tuple[Tensor, ...]) -> Tensor:
        """A tensor with a layout that was computed from `sources`."""
        if torch.is_grad_enabled():
            for source in sources:
                if source.requires_grad:  # one is enough for the output to require it too
                    made: Tensor = _FakeOutput.apply(  # type: ignore[no-untyped-call]
                        lambda: self._fake(layout.meta, layout.device), source
                    )
                    return made
        return self._fake(layout.meta, layout.device)

    def _fake(self, meta: Tensor, device: torch.device) -> Tensor:
        return FakeTensor(self.mode, meta, device)


def keeps_layout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """The tensors that a call reads, if its output is a new tensor with the layout of the first one; otherwise ()."""
    if not args or not isinstance(args[0], Tensor):
        return ()
    if func in _POINTWISE:
        place = _POINTWISE[func]
        inplace = kwargs.get("inplace") or (place is not None and place < len(args) and args[place])
        return () if inplace or "out" in kwargs else (args[0],)
    if func in _NORMS:
        names = _NORMS[func]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        x, shape = given["input"], tuple(given.get("normalized_shape", ()))
        affine = [given[n] for n in ("weight", "bias") if given.get(n) is not None]
        if shape == tuple(x.shape[-1:]) and all(p.dtype == x.dtype and tuple(p.shape) == shape for p in affine):
            return (x, *affine)
    return ()


def joins_two(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call computes from two tensors element by element: where these have one layout, its output has it."""
    return func in _PAIRWISE and not kwargs and len(args) == 2 and all(isinstance(each, Tensor) for each in args)


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
