"""Lookup of modules by their names in the plan, through the wrappers that training adds."""

from __future__ import annotations

from torch import nn

from loka.dispatch.bind.bound import type_name

# Wrapper class -> attribute with the wrapped module. The plan was made without wrappers.
_INSIDE = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
    "torchrec.distributed.model_parallel.DistributedModelParallel": "_dmp_wrapped_module",  # DDP inside, by default
}
# These flatten or move the parameters of the wrapped module.
_CLOSED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FullyShardedDataParallel",
    "torch.jit._script.ScriptModule": "torch.jit.script or torch.jit.trace",
}
_ADDED = frozenset(_INSIDE.values()) - {"module"}  # a model may have a child of that name itself


class ClosedWrapperError(Exception):
    """A module is in a wrapper that cannot be opened; `str` names the wrapper."""


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside any number of the wrappers in `_INSIDE` (torch.compile, DDP, torchrec's DMP, ...).

    Raises ClosedWrapperError for a wrapper that changes the wrapped module.
    """
    while True:
        names = [type_name(base) for base in type(module).__mro__]
        closed = next((_CLOSED[name] for name in names if name in _CLOSED), None)
        if closed is not None:
            raise ClosedWrapperError(closed)
        attribute = next((_INSIDE[name] for name in names if name in _INSIDE), None)
        if attribute is None:
            return module
        module = getattr(module, attribute)


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


def plain_name(name: str) -> str:
    """A qualified name without the parts added by wrappers."""
    return ".".join(part for part in name.split(".") if part not in _ADDED)
