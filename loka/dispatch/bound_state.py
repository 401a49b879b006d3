"""The state that binding gives a module: its class, counters, static scales and frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loka.dispatch.bind.bound import (
    Bound,
    CallCounters,
    Frozen,
    derived_class,
    drop_frozen,
    frozen_names,
    is_frozen_class,
    is_split,
    quantize,
    same_kind,
    set_frozen,
    unbound_class,
)
from loka.dispatch.dispatch_errors import BindError
from loka.dispatch.static_scales import drop_static_scales, set_static_scales


@dataclass(frozen=True, slots=True)
class BoundModule:
    """A module of a patch. `counters`: from its binding; they stay valid if another patch removes it."""

    name: str
    module: nn.Module
    counters: CallCounters

    @property
    def is_bound(self) -> bool:
        """True unless the binding was undone; it may have been bound again since, by another patch."""
        return vars(self.module).get("loka") is self.counters


@dataclass(frozen=True, slots=True, eq=False)
class KeptModule:
    """A module that `keep` sent back, and what `restore` gives it again."""

    bound: BoundModule
    bound_class: type
    records: dict[str, Tensor]  # overflow statistics


def bind(
    module: Any, bound: type, counters: CallCounters, frozen: Frozen, records: Mapping[str, Tensor] | None = None
) -> None:
    """Give a module a class made by `derive`, and its state; overflow statistics are `records`, or start at zero."""
    module.__class__ = bound
    module.loka = counters
    set_static_scales(module, module.loka_known, records)
    if frozen:
        set_frozen(module, frozen)
        module.register_load_state_dict_post_hook(refresh_after_load)


def unbind(module: nn.Module, own: type | None = None) -> dict[str, Tensor]:
    """Restore a module's own class and return its overflow statistics; no effect if it is not bound.

    `own`: that class if it is known. FSDP2's are made anew otherwise, and compiled code is for one class.
    """
    if not isinstance(module, Bound):
        return {}
    records = {}
    if "loka" in vars(module):
        drop_frozen(module)
        records = drop_static_scales(module, module.loka_known)
        del module.loka
    hooks = module._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is refresh_after_load]:
        del hooks[key]
    module.__class__ = own or unbound_class(type(module))
    return records


def frozen_weights(bound: type, module: nn.Module) -> Frozen:
    """The weights of a module, quantized as the class made by `derive` keeps them; () in mode "train"."""
    generated = derived_class(bound).loka_generated
    return quantize(generated, module) if is_frozen_class(generated) else ()


def refresh_module(module: Bound) -> None:
    """Quantize one module's frozen weights again. Raises BindError if this process has only a part of them."""
    generated = derived_class(type(module)).loka_generated
    if is_frozen_class(generated):
        if is_split(module):
            raise BindError(
                f"{', '.join(module.loka.sites)}: FSDP has split the weights since apply, so that they "
                "cannot be quantized again, and the frozen ones stay as they are: load the weights, apply with "
                "mode='infer', then shard (fully_shard), in this order"
            )
        set_frozen(module, quantize(generated, module))


def stale_sites(module: Bound) -> tuple[str, ...]:
    """The sites of a module whose frozen weight no longer equals the quantized parameter.

    () if FSDP has split the parameters: to compare, all processes would have to gather them.
    """
    generated = derived_class(type(module)).loka_generated
    if not is_frozen_class(generated) or is_split(module):
        return ()
    stale = []
    for index, (site, pair) in enumerate(zip(module.loka.sites, quantize(generated, module), strict=True)):
        if pair is not None:
            kept = tuple(module._buffers[name] for name in frozen_names(index))
            if not all(_same_bits(now, then) for now, then in zip(pair, kept, strict=True)):
                stale.append(site)
    return tuple(stale)


def refresh_after_load(module: nn.Module, incompatible_keys: Any) -> None:
    """load_state_dict post hook that quantizes frozen weights again."""
    if isinstance(module, Bound):
        refresh_module(module)


def _same_bits(now: torch.Tensor, then: torch.Tensor | None) -> bool:
    if then is None or not same_kind(now, then):
        return False
    if now.device.type == "meta":
        return True
    return torch.equal(now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8))
