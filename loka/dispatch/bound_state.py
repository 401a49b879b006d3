"""The state that binding gives a module: its class, counters, static scales and frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from loka.dispatch.bind.bound import Bound, CallCounters, is_split, refresh, unbound_class
from loka.dispatch.bind.frozen import Frozen, drop_frozen, has_changed, owners_of, set_frozen
from loka.dispatch.inlined_children import watch_children
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
    module: Any, bound: type, counters: CallCounters, frozen: Frozen | None, records: Mapping[str, Tensor] | None = None
) -> None:
    """Give a module a class made by `derive`, and its state; overflow statistics are `records`, or start at zero."""
    module.__class__ = bound
    module.loka = counters
    watch_children(module, counters.binding.inlined)
    set_static_scales(module, module.loka_known, records)
    if frozen is not None:
        set_frozen(module, frozen)
        for loaded in {module, *(source.holder for source in frozen.sources)}:
            loaded.register_load_state_dict_post_hook(refresh_after_load)


def unbind(module: nn.Module, own: type | None = None) -> dict[str, Tensor]:
    """Restore a module's own class and return its overflow statistics; no effect if it is not bound.

    `own`: that class if it is known. FSDP2's are made anew otherwise, and compiled code is for one class.
    """
    if not isinstance(module, Bound):
        return {}
    records = {}
    loaded: set[nn.Module] = {module}
    if "loka" in vars(module):
        loaded |= {source.holder for source in module.loka.frozen_from}
        drop_frozen(module)
        records = drop_static_scales(module, module.loka_known)
        del module.loka
    for hooks in (each._load_state_dict_post_hooks for each in loaded):
        for key in [key for key, hook in hooks.items() if hook is refresh_after_load]:
            del hooks[key]
    module.__class__ = own or unbound_class(type(module))
    return records


def refresh_after_load(module: nn.Module, incompatible_keys: Any) -> None:
    """load_state_dict post hook that quantizes frozen weights again; those of a module may be an inlined child's."""
    for owner in owners_of(module):
        if isinstance(owner, Bound) and (is_split(owner) or has_changed(owner)):
            refresh(owner)
