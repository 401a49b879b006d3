"""A bound module: the user's own module whose class has changed to one derived from a generated class and its own.

Its parameters, hooks, name in the model and state_dict keys stay as they were; only `forward` is another.
"""

from __future__ import annotations

import copyreg
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from loka.dispatch.bind.split_weights import is_split
from loka.dispatch.dispatch_errors import BindError, FrozenWeightError
from loka.dispatch.static_scales import StaticScale, drop_static_scales, renew_overflow_stats, set_static_scales
from loka.kernels import call_counters
from loka.kernels.gemm.scaled_mm import KERNEL

if TYPE_CHECKING:
    from loka.dispatch.bind.binding import Binding

# A generated module's forward, and what `quantize` returns: for each site the FP8 weight and its scales, or None.
Frozen = tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]


class CallCounters:
    """The numbers under which one bound module's GEMMs count themselves, and what they stand for.

    Site i counts its fprop under `counter_id(i)`, dgrad under that + 1, wgrad under that + 2. A copy, by `copy`,
    `deepcopy` or pickle, draws numbers of its own, so that a copy that runs does not speak for the original.
    """

    def __init__(
        self,
        sites: tuple[str, ...],
        gemms: tuple[tuple[str, ...], ...],
        inlined: tuple[str, ...] = (),
        kernels: tuple[tuple[tuple[str, ...], ...], ...] = (),  # of each of `gemms`; () where all are torch.scaled_mm
        binding: Binding | None = None,  # what the module was held to when it was bound
    ) -> None:
        self.sites = sites
        self.gemms = gemms
        self.inlined = inlined
        self.kernels = kernels
        self.binding = binding
        self.numbers = tuple(call_counters.new_counters(3) for _ in sites)

    def counter_id(self, index: int) -> int:
        """The number of site `index`'s fprop."""
        return self.numbers[index]

    def planned(self, index: int) -> dict[str, tuple[str, ...]]:
        """Site `index`'s GEMMs, each with the kernels that it may run on."""
        gemms = self.gemms[index]
        return dict(zip(gemms, self.kernels[index] if self.kernels else ((KERNEL,),) * len(gemms), strict=True))

    def copy(self) -> CallCounters:
        """The same with numbers of its own."""
        return CallCounters(self.sites, self.gemms, self.inlined, self.kernels, self.binding)

    def __reduce__(self) -> tuple[Any, ...]:
        return CallCounters, (self.sites, self.gemms, self.inlined, self.kernels, self.binding)


class Bound(nn.Module):
    """Base of every generated module class. It is mixed in front of a module's own class by `derive`.

    A generated class defines `forward`, and for frozen weights `quantize`, which returns for each site, in order, the
    FP8 weight and its scales (or None where a site has none); they become the buffers `loka_weight_i`, `loka_scale_i`.
    """

    loka: CallCounters
    loka_known: tuple[StaticScale, ...] = ()  # operands whose scales are buffers of the module

    # Set on each derived class by `derive`.
    loka_generated: type[Bound]
    loka_original: type[nn.Module]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # In front of FSDPModule.__new__, which takes a fixed place in the method resolution order for the user's class.
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        # Constructed anew, by slicing an nn.Sequential or by type(module)(...): the plan was for the module that was
        # bound, so what comes out is plain.
        if not hasattr(type(self), "loka_original"):
            super().__init__()
            return
        self.__class__ = unsharded_class(derived_class(type(self)).loka_original)
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        derived = derived_class(type(self))
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        if type(self) is not derived:  # wrapped once more (FSDP2): that wrapper decides
            return reduced
        if isinstance(reduced, str) or reduced[0] is not copyreg.__newobj__ or reduced[1] != (derived,):  # type: ignore[attr-defined]
            raise BindError(
                f"{type_name(derived.loka_original)} pickles in a way of its own (__reduce__), which a bound module "
                "cannot follow: remove the patch before copying or saving the whole model, or save its state_dict"
            )
        state = _without_frozen(reduced[2]) if is_frozen_class(derived.loka_generated) else reduced[2]
        return _rebuild, (derived.loka_generated, derived.loka_original), state, *reduced[3:]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        generated = derived_class(type(self)).loka_generated
        if is_frozen_class(generated):
            set_frozen(self, quantize(generated, self))
        renew_overflow_stats(self, generated.loka_known)

    def __copy__(self) -> Self:
        inherited = getattr(super(), "__copy__", None)
        if inherited is not None:
            copied = inherited()
        else:
            rebuild, arguments, state = self.__reduce_ex__(2)[:3]
            copied = rebuild(*arguments)
            copied.__setstate__(state)
        copied.loka = self.loka.copy()
        return copied  # type: ignore[no-any-return]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast the module; frozen weights are quantised anew, since a cast would turn FP8 into another type.

        Where FSDP has split the weights that they are made from, they move as they are.
        Known scales are made anew for the same reason; their records move.
        """
        generated = derived_class(type(self)).loka_generated
        frozen = drop_frozen(self) if is_frozen_class(generated) else {}
        records = drop_static_scales(self, generated.loka_known)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            return self
        finally:
            if frozen and is_split(self):
                device = next(self.parameters()).device
                for name, buffer in frozen.items():
                    self.register_buffer(name, buffer.to(device), persistent=False)
            elif is_frozen_class(generated):
                set_frozen(self, quantize(generated, self))
            set_static_scales(self, generated.loka_known, records)

    def extra_repr(self) -> str:
        bound = "; ".join(
            f"{site}: {' '.join(gemms)}" for site, gemms in zip(self.loka.sites, self.loka.gemms, strict=True)
        )
        kind = ", frozen" if is_frozen_class(derived_class(type(self)).loka_generated) else ""
        return ", ".join(part for part in (super().extra_repr(), f"fp8{kind} [{bound}]") if part)


def derive(generated: type[Bound], original: type[nn.Module]) -> type[Bound]:
    """A class for one module: `generated` in front of `original`, with a forward code object of its own.

    torch.compile keeps its compiled variants by code object. Were it shared, each layer that is compiled on its own
    would count as one recompilation of the first, for its differing counter ids, and run into the limit of eight.
    """
    namespace: dict[str, Any] = {
        "__module__": generated.__module__,
        "__doc__": generated.__doc__,
        "loka_generated": generated,
        "loka_original": original,
    }
    forward = own_function(generated.forward)
    if is_frozen_class(generated):
        namespace["loka_forward"] = forward
        forward = own_function(_forward_without_gradients)
        if hasattr(original, "quantize"):  # the user's method of that name stays the user's
            namespace["quantize"] = original.quantize
    namespace["forward"] = forward
    return type(original.__name__, (generated, original), namespace)


def derived_class(cls: type) -> type[Bound]:
    """The class that `derive` made, in the method resolution order of a bound module's class."""
    for base in cls.__mro__:
        if "loka_original" in vars(base):
            return base
    raise TypeError(f"{type_name(cls)} is not the class of a bound module")


def is_bound(module: nn.Module) -> bool:
    """Whether a module has a generated forward."""
    return isinstance(module, Bound)


def unbound_class(cls: type) -> type:
    """`cls` without what `derive` put in, also where a wrapper (FSDP2, a parametrisation) derived from that."""
    derived = derived_class(cls)
    if cls is derived:
        return derived.loka_original
    bases = tuple(unbound_class(base) if derived in base.__mro__ else base for base in cls.__bases__)
    namespace = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, namespace)


def unsharded_class(cls: type) -> type:
    """The user's class under the one that FSDP2's `fully_shard` puts in front, or `cls` where it did not."""
    for index, base in enumerate(cls.__mro__):
        # By name: importing torch.distributed.fsdp takes long, and who uses it has imported it.
        if base.__name__ == "FSDPModule" and base.__module__.startswith("torch.distributed"):
            return cls.__mro__[index + 1]
    return cls


def plain_class(cls: type) -> type:
    """The user's class under what binding and `fully_shard` put in front."""
    while True:
        below = unsharded_class(cls)
        below = derived_class(below).loka_original if issubclass(below, Bound) else below
        if below is cls:
            return cls
        cls = below


def type_name(cls: type) -> str:
    """The qualified name, as `package.module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_frozen_class(generated: type[Bound]) -> bool:
    """Whether a generated class works on weights that were quantised once."""
    return hasattr(generated, "quantize")


def quantize(generated: type[Bound], module: nn.Module) -> Frozen:
    """The frozen weights of `module` by a generated class's `quantize`; nothing is stored."""
    with torch.inference_mode(False), torch.no_grad():
        frozen: Frozen = generated.quantize(module)  # type: ignore[attr-defined]
    return frozen


def frozen_names(index: int) -> tuple[str, str]:
    """The buffers of site `index`: its FP8 weight and its scales."""
    return f"loka_weight_{index}", f"loka_scale_{index}"


def set_frozen(module: nn.Module, frozen: Frozen) -> None:
    """Store frozen weights as non-persistent buffers; in place where they are there, since CUDA graphs read them."""
    for index, pair in enumerate(frozen):
        if pair is None:
            continue
        for name, value in zip(frozen_names(index), pair, strict=True):
            buffer = module._buffers.get(name)
            if buffer is not None and same_kind(buffer, value):
                with torch.inference_mode(False), torch.no_grad():
                    buffer.copy_(value)
            else:
                module.register_buffer(name, value, persistent=False)


def same_kind(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and device."""
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def drop_frozen(module: Bound) -> dict[str, torch.Tensor]:
    """Remove the buffers of `set_frozen`; returns them."""
    frozen = {}
    for index in range(len(module.loka.sites)):
        for name in frozen_names(index):
            buffer = module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
            if buffer is not None:
                frozen[name] = buffer
    return frozen


def _without_frozen(state: Any) -> Any:
    """A module's state less its frozen weights: plain pickle cannot load FP8, and they follow from the rest."""
    if not isinstance(state, dict) or "_buffers" not in state:
        return state
    names = {name for index in range(len(state["loka"].sites)) for name in frozen_names(index)}
    buffers = {name: buffer for name, buffer in state["_buffers"].items() if name not in names}
    return {**state, "_buffers": buffers, "_non_persistent_buffers_set": state["_non_persistent_buffers_set"] - names}


def own_function(function: Any) -> Any:
    """The same function with a code object of its own."""
    copied = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__annotations__ = function.__annotations__
    copied.__qualname__ = function.__qualname__
    copied.__module__ = function.__module__
    copied.__doc__ = function.__doc__
    return copied


def _forward_without_gradients(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a frozen module: the generated one, unless a gradient would be lost by it."""
    if torch.is_grad_enabled():
        _refuse_gradients(self, args, kwargs)
    return self.loka_forward(*args, **kwargs)


def _refuse_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where autograd would record this call: frozen FP8 weights have no backward."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        wanted = "its parameters"
    elif any(tensor.requires_grad for tensor in _tensors((args, kwargs))):
        wanted = "its input"
    else:
        return
    raise FrozenWeightError(
        f"a module bound with mode='infer' was called while {wanted} need gradients, and frozen FP8 weights give none: "
        "call the model under torch.no_grad() or torch.inference_mode(), or apply the package with mode='train'"
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)


def _rebuild(generated: type[Bound], original: type[nn.Module]) -> Bound:
    """An empty bound module, for pickle and copy to fill; it calls no user code."""
    return object.__new__(derive(generated, original))
