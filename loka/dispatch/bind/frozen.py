"""Frozen weights: FP8 copies of Parameters in the buffers of a bound module, and what tells that one is stale.

A Parameter is another one, or has changed, if its storage, its place in it or its version differs. Reading these waits
for no device. Writes through `.data`, and to tensors made under `torch.inference_mode`, change none of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

Pairs = dict[int, tuple[Tensor, Tensor]]
# What an eager call compares for one Parameter, in a microsecond for three: where it is, its address and its version.
Mark = tuple[dict[str, nn.Parameter | None], str, int, int | None]

_MODULES: weakref.WeakSet[Any] = weakref.WeakSet()  # those with frozen weights


@dataclass(frozen=True, slots=True, eq=False)
class FrozenSource:
    """A Parameter from which a frozen weight was quantized, as it was then."""

    path: tuple[str, ...]  # from the bound module: ("fmb", "0", "weight")
    holder: nn.Module
    storage: torch.UntypedStorage = field(repr=False)  # held, so that no other one gets its address
    offset: int | torch.SymInt
    version: int | None  # None for an inference tensor

    @property
    def mark(self) -> Mark:
        """What to compare first: FSDP moves a storage, so that another address need not be another Parameter."""
        return self.holder._parameters, self.path[-1], self.now.data_ptr(), self.version

    @property
    def now(self) -> Tensor:
        """What is in the Parameter's place now."""
        held: Tensor | None = self.holder._parameters.get(self.path[-1])
        return getattr(self.holder, self.path[-1]) if held is None else held

    def is_at(self, tensor: Tensor) -> bool:
        """True if the tensor is the Parameter, whatever its numbers."""
        return (tensor.untyped_storage()._cdata, tensor.storage_offset()) == (self.storage._cdata, self.offset)

    def is_of(self, tensor: Tensor) -> bool:
        """True if the tensor is the Parameter, unchanged as far as torch knows."""
        return self.is_at(tensor) and _version(tensor) == self.version


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """The quantized weights of a module: by site the FP8 weight and its scales."""

    pairs: Pairs
    sources: tuple[FrozenSource, ...]


def quantize(method: Callable[[nn.Module], Pairs], module: nn.Module) -> Frozen:
    """Quantize the weights of `module` by a generated class's `loka_quantized`, without storing them."""
    seen = _ParametersRead(module)
    # In guards, where compiled calls quantize anew, Dynamo has switched torch functions off.
    with torch._C._EnableTorchFunction(), torch.inference_mode(False), torch.no_grad(), seen:
        pairs = method(module)
    return Frozen(pairs, tuple(seen.sources()))


class _ParametersRead(TorchFunctionMode):
    """Keeps which Parameters of a module operations read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._read: dict[int, nn.Parameter] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for each in tree_leaves((args, kwargs or {})):
            if id(each) in self._names:
                self._read[id(each)] = each
        return func(*args, **(kwargs or {}))

    def sources(self) -> Iterable[FrozenSource]:
        for key, parameter in self._read.items():
            path = tuple(self._names[key].split("."))
            holder = self._module.get_submodule(".".join(path[:-1]))
            offset = parameter.storage_offset()
            yield FrozenSource(path, holder, parameter.untyped_storage(), offset, _version(parameter))


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def frozen_names(index: int) -> tuple[str, str]:
    """Names of the buffers of site `index`: FP8 weight and scales."""
    return f"loka_weight_{index}", f"loka_scale_{index}"


def set_frozen(module: Any, frozen: Frozen) -> None:
    """Store frozen weights as non-persistent buffers, in existing ones if possible, since CUDA graphs read them."""
    for site, pair in frozen.pairs.items():
        for name, value in zip(frozen_names(site), pair, strict=True):
            buffer = module._buffers.get(name)
            if buffer is not None and same_kind(buffer, value):
                with torch.inference_mode(False), torch.no_grad():
                    buffer.copy_(value)
            else:
                module.register_buffer(name, value, persistent=False)
    set_sources(module, frozen.sources)
    _MODULES.add(module)


def set_sources(module: Any, sources: tuple[FrozenSource, ...]) -> None:
    """Keep from which Parameters the frozen weights are."""
    module.loka.frozen_from = sources
    module.loka.frozen_marks = tuple(each.mark for each in sources)
    module.loka.frozen_paths = tuple(each.path for each in sources)


def drop_frozen(module: Any) -> dict[str, Tensor]:
    """Remove the buffers of `set_frozen`; returns them."""
    frozen = {}
    for index in range(len(module.loka.sites)):
        for name in frozen_names(index):
            buffer = module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
            if buffer is not None:
                frozen[name] = buffer
    return frozen


def without_frozen(state: Any) -> Any:
    """A module's state without frozen weights: pickle cannot load FP8, and they are derived from the rest."""
    if not isinstance(state, dict) or "_buffers" not in state:
        return state
    names = {name for index in range(len(state["loka"].sites)) for name in frozen_names(index)}
    buffers = {name: buffer for name, buffer in state["_buffers"].items() if name not in names}
    return {**state, "_buffers": buffers, "_non_persistent_buffers_set": state["_non_persistent_buffers_set"] - names}


def same_kind(one: Tensor, other: Tensor) -> bool:
    """True if two tensors agree in shape, dtype and device."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def has_changed(module: Any) -> bool:
    """True if a Parameter of a module's frozen weights is another one or has changed, as far as torch knows."""
    return not all(source.is_of(source.now) for source in module.loka.frozen_from)


def is_replaced(module: Any) -> bool:
    """True if other Parameters are in the places of some, which the next call notices, compiled or not."""
    return not all(source.is_at(source.now) for source in module.loka.frozen_from)


def owners_of(holder: nn.Module) -> list[Any]:
    """The modules with frozen weights that are this one, or were quantized from its Parameters."""
    return [each for each in _MODULES if each is holder or any(s.holder is holder for s in each.loka.frozen_from)]
