"""Children whose forwards are part of a generated one: what is put around one, as LoRA is, would never be called.

It is refused where it is put there: torch calls a hook for each module that becomes another's child.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn
from torch.nn.modules import module as torch_modules

from loka.dispatch.bind.bound import Bound
from loka.dispatch.dispatch_errors import BindError
from loka.errors import Code

# By the id of a module that holds such children, while it lives: their names, each with the bound module.
_HOLDERS: dict[int, dict[str, weakref.ref[nn.Module]]] = {}


def watch_children(bound: nn.Module, inlined: Iterable[str]) -> None:
    """Nothing may be put around these children of a module, given by their paths, while it is bound."""
    if inlined and _refuse_around not in torch_modules._global_module_registration_hooks.values():
        torch_modules.register_module_module_registration_hook(_refuse_around)
    for path in inlined:
        place, _, name = path.rpartition(".")
        holder = bound.get_submodule(place)
        if id(holder) not in _HOLDERS:
            weakref.finalize(holder, _HOLDERS.pop, id(holder), None)
        _HOLDERS.setdefault(id(holder), {})[name] = weakref.ref(bound)


def _refuse_around(holder: nn.Module, name: str, module: nn.Module | None) -> None:
    """Raise BindError for a module that holds the child whose place it takes.

    A child may be set again to itself, as torchrec's DistributedModelParallel does with what it does not shard.
    """
    owner = _HOLDERS.get(id(holder), {}).get(name, lambda: None)()
    child = holder._modules.get(name)
    if not isinstance(owner, Bound) or module is None or module is child:
        return
    if all(each is not child for each in module.modules()):
        return
    raise BindError(
        f"{type(module).__name__} cannot be put around {name!r} of a {type(holder).__name__}: its forward is part of a "
        f"generated one ({', '.join(owner.loka.sites)}), which would not call it: remove the patch (patch.remove()) or "
        "send these sites back (patch.keep) first; or change the model, then generate, then apply",
        Code.BOUND_MODULE,
    )
