"""Bound modules: a user's module whose class is replaced by one derived from a generated class and its own.

Parameters, hooks, the name in the model and state_dict keys are unchanged; only `forward` differs.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from loka.dispatch.bind.frozen import (
    Frozen,
    FrozenSource,
    Mark,
    drop_frozen,
    frozen_names,
    has_changed,
    quantize,
    same_kind,
    set_frozen,
    set_sources,
    without_frozen,
)
from loka.dispatch.bind.frozen_guard import guard_weights, parameter_at
from loka.dispatch.dispatch_errors import BindError, FrozenWeightError
from loka.dispatch.static_scales import StaticScale, drop_static_scales, renew_overflow_stats, set_static_scales
from loka.errors import Code
from loka.graph.fingerprint import Fingerprint
from loka.graph.source import in_script, script_file
from loka.graph.wrappers import unsharded_class
from loka.kernels import call_counters
from loka.kernels.gemm.scaled_mm import KERNEL


@dataclass(slots=True, eq=False)
class Gathered:
    """A weight that FSDP gathers in FP8, by hooks on this rank's part of it."""

    site: str
    fsdp_param: Any  # FSDP's own view of the parameter
    hooked: Any  # the part

    @property
    def is_lost(self) -> bool:
        """True if the parameter got another part since, which has no hooks: it was cast, moved or assigned."""
        return self.fsdp_param.sharded_param._local_tensor is not self.hooked

    def hook_again(self) -> bool:
        """Put the hooks on another tensor of the same numbers, which a cast to the same dtype makes; False if moved."""
        now, before = self.fsdp_param.sharded_param._local_tensor, self.hooked
        if now is not before and (now.data_ptr() != before.data_ptr() or not same_kind(now, before)):
            return False
        now.fsdp_pre_all_gather, now.fsdp_post_all_gather = before.fsdp_pre_all_gather, before.fsdp_post_all_gather
        self.hooked = now
        return True


class CallCounters:
    """Counter ids of a bound module's GEMMs, and the sites and GEMMs that they count.

    Site i counts fprop under `counter_id(i)`, dgrad under the next id and wgrad under the one after. A copy, by `copy`,
    `deepcopy` or pickle, gets new ids, so that its runs do not count for the original.
    """

    def __init__(self, sites: tuple[str, ...], binding: Binding, mode: str) -> None:
        self.sites = sites
        self.binding = binding  # the conditions checked when the module was bound
        self.numbers = tuple(call_counters.new_counters(3) for _ in sites)
        self.mode = mode
        self._planned = binding.in_mode(mode)
        self.gemms = tuple(map(tuple, self._planned))  # for each site, its FP8 GEMMs in this mode; Probe reads them
        # The Parameters that frozen weights were quantized from; what a call compares; and what compiled code has.
        self.frozen_from: tuple[FrozenSource, ...] = ()
        self.frozen_marks: tuple[Mark, ...] = ()
        self.frozen_paths: tuple[tuple[str, ...], ...] = ()
        self.gathered: tuple[Gathered, ...] = ()  # the weights that FSDP gathers in FP8

    def counter_id(self, index: int) -> int:
        """The counter id of the fprop of site `index`."""
        return self.numbers[index]

    def counter_ids(self, *indices: int) -> tuple[int, ...]:
        """The counter ids of the fprops of several sites."""
        return tuple([self.numbers[index] for index in indices])

    def planned(self, index: int) -> dict[str, tuple[str, ...]]:
        """FP8 GEMMs of site `index`, each with its permitted kernels."""
        return self._planned[index]

    def copy(self) -> CallCounters:
        """A copy with new counter ids."""
        return CallCounters(self.sites, self.binding, self.mode)

    def __reduce__(self) -> tuple[Any, ...]:
        return CallCounters, (self.sites, self.binding, self.mode)


class Bound(nn.Module):
    """Base of every generated module class. `derive` puts it in front of a module's own class.

    A generated class defines `forward`, and if mode "infer" freezes weights `loka_quantized`, which returns the FP8
    weight and its scales by site; they become the buffers `loka_weight_i` and `loka_scale_i`.
    """

    loka: CallCounters
    loka_known: tuple[StaticScale, ...] = ()  # operands with static scales, which are buffers of the module
    # Site, path of its weight, and the kernel of `fused` that makes the one FP8 copy that its forward reads.
    loka_gatherable: tuple[tuple[int, str, str], ...] = ()

    # Set on each derived class by `derive`.
    loka_generated: type[Bound]
    loka_original: type[nn.Module]
    loka_is_frozen: bool  # its weights are frozen

    def loka_frozen(self, site: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The FP8 weight of a site and its scales if weights are frozen; None if each call quantizes the Parameter."""
        if not self.loka_is_frozen:
            return None
        weight, scale = frozen_names(site)
        return getattr(self, weight), getattr(self, scale)

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Overrides FSDPModule.__new__, which expects the user's class at a fixed position in the MRO.
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        # A new instance, by slicing an nn.Sequential or by type(module)(...), is not bound: the plan was for the
        # original module.
        if not hasattr(type(self), "loka_original"):
            super().__init__()
            return
        self.__class__ = unsharded_class(derived_class(type(self)).loka_original)
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        derived = derived_class(type(self))
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        if type(self) is not derived:  # wrapped again (FSDP2): the wrapper decides
            return reduced
        if isinstance(reduced, str) or reduced[0] is not copyreg.__newobj__ or reduced[1] != (derived,):  # type: ignore[attr-defined]
            raise BindError(
                f"{type_name(derived.loka_original)} pickles in a way of its own (__reduce__), which a bound module "
                "cannot follow: remove the patch before copying or saving the whole model, or save its state_dict",
                Code.BOUND_MODULE,
            )
        state = without_frozen(reduced[2]) if derived.loka_is_frozen else reduced[2]
        return _rebuild, (derived.loka_generated, derived.loka_original, derived.loka_is_frozen), state, *reduced[3:]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        freeze(self)
        renew_overflow_stats(self, self.loka_known)

    def __copy__(self) -> Self:
        inherited = getattr(super(), "__copy__", None)
        if inherited is not None:
            copied = inherited()
        else:
            rebuild, arguments, state = self.__reduce_ex__(2)[:3]
            copied = rebuild(*arguments)
            copied.__setstate__({**state, "loka": self.loka.copy()})
        if copied.loka is self.loka:
            copied.loka = self.loka.copy()
            freeze(copied)
        return copied  # type: ignore[no-any-return]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast the module; frozen weights are quantized again, since a cast would convert their FP8 dtype.

        If FSDP has split the weights that they were made from, they are moved unchanged.
        Static scales are created again for the same reason; overflow statistics are moved.
        """
        frozen = drop_frozen(self)
        records = drop_static_scales(self, self.loka_known)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
            if lost := [each.site for each in self.loka.gathered if not each.hook_again()]:
                raise BindError(
                    f"{', '.join(lost)}: the model was moved or cast after gather_fp8, which the hooks on its weights "
                    "do not survive: move and cast it before",
                    Code.GATHER,
                )
            return self
        finally:
            if frozen and is_split(self):
                device = next(self.parameters()).device
                for name, buffer in frozen.items():
                    self.register_buffer(name, buffer.to(device), persistent=False)
            else:
                freeze(self)
            set_static_scales(self, self.loka_known, records)

    def extra_repr(self) -> str:
        bound = "; ".join(f"{site}: {' '.join(self.loka.planned(index))}" for index, site in enumerate(self.loka.sites))
        kind = ", frozen" if self.loka_is_frozen else ""
        return ", ".join(part for part in (super().extra_repr(), f"fp8{kind} [{bound}]") if part)


def derive(generated: type[Bound], original: type[nn.Module], frozen: bool) -> type[Bound]:
    """A class for one module: `generated` in front of `original`, with its own copy of forward's code object.

    `frozen`: weights that the generated class can freeze are frozen.

    torch.compile caches by code object. With a shared one, layers that are compiled one by one would count as
    recompilations of the first, because their counter ids differ, and hit the limit of eight.
    """
    namespace: dict[str, Any] = {
        "__module__": generated.__module__,
        "__doc__": generated.__doc__,
        "loka_generated": generated,
        "loka_original": original,
        "loka_is_frozen": frozen and hasattr(generated, "loka_quantized"),
    }
    forward = own_function(generated.forward)
    if namespace["loka_is_frozen"]:
        namespace["loka_forward"] = forward
        forward = own_function(_frozen_forward)
        forward.__signature__ = inspect.signature(generated.forward)
    namespace["forward"] = forward
    return type(original.__name__, (generated, original), namespace)


def derived_class(cls: type) -> type[Bound]:
    """The class made by `derive` in the MRO of a bound module's class. Raises TypeError if there is none."""
    for base in cls.__mro__:
        if "loka_original" in vars(base):
            return base
    raise TypeError(f"{type_name(cls)} is not the class of a bound module")


def unbound_class(cls: type) -> type:
    """`cls` without the class made by `derive`, also if a wrapper (FSDP2, a parametrisation) was derived from it."""
    derived = derived_class(cls)
    if cls is derived:
        return derived.loka_original
    bases = tuple(unbound_class(base) if derived in base.__mro__ else base for base in cls.__bases__)
    namespace = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, namespace)


def type_name(cls: type) -> str:
    """Qualified name of a class: `package.module.Class`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def shown_type(cls: type) -> str:
    """A class's qualified name in messages, with the file of a class that the script that runs defines."""
    if not in_script(cls.__module__):
        return type_name(cls)
    return f"{cls.__qualname__} defined in the script that runs, {script_file() or 'which is no file'}"


def frozen(bound: type, module: nn.Module) -> Frozen | None:
    """The weights of a module, quantized as the class made by `derive` keeps them; None if it does not."""
    derived = derived_class(bound)
    return quantize(derived.loka_quantized, module) if derived.loka_is_frozen else None  # type: ignore[attr-defined]


def freeze(module: Bound) -> None:
    """Quantize the weights of a module, and keep them; no effect if they are not frozen."""
    made = frozen(type(module), module)
    if made is not None:
        set_frozen(module, made)


def refresh(module: Bound) -> None:
    """Quantize one module's frozen weights again. Raises BindError if this process has only a part of them."""
    if module.loka_is_frozen:
        if is_split(module):
            raise BindError(
                f"{', '.join(module.loka.sites)}: FSDP has split the weights since apply, so that they "
                "cannot be quantized again, and the frozen ones stay as they are: load the weights, apply with "
                "mode='infer', then shard (fully_shard), in this order",
                Code.FROZEN,
            )
        freeze(module)


def stale_sites(module: Bound) -> tuple[str, ...]:
    """The sites of a module whose frozen weight no longer equals the quantized parameter.

    () if FSDP has split the parameters: to compare, all processes would have to gather them. Waits for the device.
    """
    made = None if is_split(module) else frozen(type(module), module)
    stale = []
    for site, pair in made.pairs.items() if made is not None else ():
        kept = [module._buffers[name] for name in frozen_names(site)]
        if not all(_same_bits(now, then) for now, then in zip(pair, kept, strict=True)):
            stale.append(module.loka.sites[site])
    return tuple(stale)


def _same_bits(now: torch.Tensor, then: torch.Tensor | None) -> bool:
    if then is None or not same_kind(now, then):
        return False
    if now.device.type == "meta":
        return True
    return torch.equal(now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8))


def own_function(function: Any) -> Any:
    """A copy of the function with its own code object."""
    copied: Any = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copied, function)
    del copied.__wrapped__
    return copied


def _frozen_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Forward of a frozen module: the generated one, with weights that are not stale.

    A changed Parameter is quantized anew, in a compiled call by a guard. Raises FrozenWeightError where a gradient
    would be lost. An exported program has the weights that there were.
    """
    if torch.is_grad_enabled():
        _refuse_gradients(self, args, kwargs)
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            raise FrozenWeightError(
                f"{', '.join(self.loka.sites)}: frozen FP8 weights have no rules for torch.func (vmap, grad, jvp): "
                "call the model outside, or apply the package with mode='train'",
                Code.FROZEN,
            )
        # Calls nothing written in Python: of a frame that Dynamo skips it compiles those.
        for parameters, name, address, version in self.loka.frozen_marks:
            now = parameters.get(name)
            if now is None or now.data_ptr() != address or (version is not None and now._version != version):
                torch.compiler.disable(_refresh_if_changed)(self)  # type: ignore[no-untyped-call]
                break
    elif self.loka.frozen_paths and not torch.compiler._is_exporting_flag:  # is_exporting() is always true in 2.11
        from torch._dynamo.comptime import comptime  # takes half a second to import

        weights = [parameter_at(self, path) for path in self.loka.frozen_paths]  # noqa: F841 - `_keep_fresh` reads it
        comptime(_keep_fresh)
    return self.loka_forward(*args, **kwargs)


def _refresh_if_changed(module: Bound) -> None:
    """Quantize a module's weights anew if a Parameter has changed, as far as torch knows."""
    if has_changed(module):
        refresh(module)
    else:  # FSDP gathered it somewhere else
        set_sources(module, module.loka.frozen_from)


def _keep_fresh(trace: Any) -> None:
    """Runs while Dynamo traces `_frozen_forward`: adds a guard that quantizes changed weights anew."""

    def refresh_here(module: Bound) -> None:
        if not is_split(module):
            _refresh_if_changed(module)

    guard_weights(trace, refresh_here)


def _refuse_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise FrozenWeightError if autograd would record this call: frozen FP8 weights have no backward."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        wanted = "its parameters"
    elif any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs))):
        wanted = "its input"
    else:
        return
    raise FrozenWeightError(
        f"a module bound with mode='infer' was called while {wanted} need gradients, and frozen FP8 weights give none: "
        "call the model under torch.no_grad() or torch.inference_mode(), or apply the package with mode='train'",
        Code.FROZEN,
    )


def _rebuild(generated: type[Bound], original: type[nn.Module], frozen: bool) -> Bound:
    """An empty bound module, for pickle and copy to fill; calls no user code."""
    return object.__new__(derive(generated, original, frozen))


@dataclass(frozen=True, slots=True)
class Binding:
    """A generated class and its modules, which share type, shapes and recipes."""

    bound: type[Bound]
    replaces: str  # type of the modules: "torch.nn.modules.linear.Linear"
    inlined: tuple[str, ...]  # children, relative to each module, whose forward is part of the generated one
    modules: tuple[str, ...]  # qualified names; "" is the model itself
    sites: tuple[tuple[str, ...], ...]  # names of the sites of each module
    gemms: tuple[tuple[str, ...], ...]  # for each site of a module, its FP8 GEMMs: ("fprop", "wgrad")
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # parameters, relative to each module, and their shapes
    # For each site of a module and each of its `gemms`, the permitted kernels; () if all are torch.scaled_mm.
    kernels: tuple[tuple[tuple[str, ...], ...], ...] = ()
    fingerprint: Fingerprint | None = None  # of the module's own forward; None for a plain nn.Linear
    infer: bool = True  # False: the modules stay unchanged for inference, in which nothing would be in FP8 or fused

    def in_mode(self, mode: str) -> tuple[dict[str, tuple[str, ...]], ...]:
        """For each site of a module: FP8 GEMM in this mode -> planned kernels."""
        planned = self.kernels or tuple(((KERNEL,),) * len(gemms) for gemms in self.gemms)
        return tuple(
            {gemm: names for gemm, names in zip(*site, strict=True) if mode == "train" or gemm == "fprop"}
            for site in zip(self.gemms, planned, strict=True)
        )


def is_sharded(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a DTensor, of which this process has but a part."""
    # By name: importing torch.distributed.tensor takes long, and who uses it has imported it.
    return type(parameter.data).__name__ == "DTensor"


def is_flat(tensor: torch.Tensor) -> bool:
    """True for a tensor that FullyShardedDataParallel keeps as a piece of a flat one between forwards."""
    return getattr(tensor, "_fsdp_flattened", False)


def is_split(module: Bound) -> bool:
    """Whether this process lacks numbers of a parameter that a bound module's generated forward was made for."""
    found = [parameter_of(module, name) for name, _ in module.loka.binding.shapes]
    return any(is_sharded(each) or is_flat(each) for each in found if each is not None)


def parameter_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """The parameter of a qualified name; None where it went, which is said elsewhere."""
    try:
        return module.get_parameter(name)
    except AttributeError:
        return None
