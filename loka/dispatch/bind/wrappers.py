"""Lookup of modules by their names in the plan, through the wrappers that training adds."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from loka.dispatch.bind.bound import Binding
from loka.graph.source import same_type
from loka.graph.wrappers import class_names, inside, own_class

# These flatten or move the parameters of the wrapped module.
_CLOSED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FullyShardedDataParallel",
    "torch.jit._script.ScriptModule": "torch.jit.script or torch.jit.trace",
}


class ClosedWrapperError(Exception):
    """A module is in a wrapper that cannot be opened; `str` names the wrapper."""


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any number of wrappers (torch.compile, DDP, torchrec's DMP, ...).

    Raises ClosedWrapperError for a wrapper that changes the wrapped module.
    """
    while True:
        closed = next((_CLOSED[name] for name in class_names(module) if name in _CLOSED), None)
        if closed is not None:
            raise ClosedWrapperError(closed)
        wrapped = inside(module)
        if wrapped is None:
            return module
        module = wrapped


def find_module(root: nn.Module, name: str) -> nn.Module | None:
    """The module of a qualified name ("" is `root`), looking through wrappers; None if there is none.

    Raises ClosedWrapperError as `unwrap` does.
    """
    module = unwrap(root)
    for part in name.split(".") if name else ():
        child = module._modules.get(part)
        if child is None:
            return None
        module = unwrap(child)
    return module


def planned_inside(root: nn.Module, bindings: Iterable[Binding]) -> str:
    """Name of the module below `root`, nearest to it, that has all modules of the bindings.

    "" if none has, or if `root` has some itself. It is for messages: a module of the user's own that holds the model,
    as Lightning's does, is not opened, as its forward may be another than the model's.
    """
    planned = [(name, binding.replaces) for binding in bindings for name in binding.modules]
    if any(_is_there(root, *each) for each in planned):
        return ""
    inner = sorted((name for name, _ in root.named_modules() if name), key=lambda name: name.count("."))
    fits = (name for name in inner if all(_is_there(root.get_submodule(name), *each) for each in planned))
    return next(fits, "")


def _is_there(root: nn.Module, name: str, replaces: str) -> bool:
    try:
        module = find_module(root, name)
    except ClosedWrapperError:
        return False
    return module is not None and same_type(own_class(type(module)), replaces)
