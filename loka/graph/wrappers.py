"""What training puts around modules and in front of their classes, and the user's own behind it."""

from __future__ import annotations

from torch import nn

# Wrapper class -> attribute with the wrapped module. By name: importing any of them is slow, or needs its library.
_INSIDE = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.optim.swa_utils.AveragedModel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torchrec.distributed.model_parallel.DistributedModelParallel": "_dmp_wrapped_module",  # DDP inside, by default
    "lightning.fabric.wrappers._FabricModule": "_forward_module",  # what its strategy made: DDP, a compiled module
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
}
ADDED_NAMES = frozenset(_INSIDE.values()) - {"module"}  # a model may have a child of that name itself


def class_names(module: nn.Module) -> list[str]:
    """Qualified names of a module's class and its bases."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]


def inside(module: nn.Module) -> nn.Module | None:
    """The module in a wrapper that training puts around a model (DDP, torch.compile, ...); None in any other module."""
    attribute = next((_INSIDE[name] for name in class_names(module) if name in _INSIDE), None)
    return None if attribute is None else getattr(module, attribute)


def innermost(module: nn.Module) -> nn.Module:
    """The module in any number of such wrappers; any other module unchanged."""
    while (found := inside(module)) is not None:
        module = found
    return module


def unsharded_class(cls: type) -> type:
    """The user's class behind the one that FSDP2's `fully_shard`, or `replicate`, adds; `cls` if there is none."""
    for index, base in enumerate(cls.__mro__):
        # By name: importing torch.distributed.fsdp is slow.
        if base.__name__ in ("FSDPModule", "DDP") and base.__module__.startswith("torch.distributed"):
            return cls.__mro__[index + 1]
    return cls


def own_class(cls: type) -> type:
    """The user's class behind those added by binding and `fully_shard`."""
    while True:
        below = unsharded_class(cls)
        below = next((vars(base)["loka_original"] for base in below.__mro__ if "loka_original" in vars(base)), below)
        if below is cls:
            return cls
        cls = below
