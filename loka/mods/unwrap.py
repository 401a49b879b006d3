"""Access to a model through the wrappers that training puts around its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
_ADDED = frozenset(_INSIDE.values()) - {"module"}  # a model may have a child of that name itself


def class_names(module: nn.Module) -> list[str]:
    """Qualified names of a module's class and its bases."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]


def inside(module: nn.Module) -> nn.Module | None:
    """The module in a wrapper that training puts around a model (DDP, torch.compile, ...); None in any other module."""
    attribute = next((_INSIDE[name] for name in class_names(module) if name in _INSIDE), None)
    return None if attribute is None else getattr(module, attribute)


def plain_name(name: str) -> str:
    """A qualified name without the parts added by wrappers."""
    return ".".join(part for part in name.split(".") if part not in _ADDED)


@contextmanager
def unwrapped(model: nn.Module, unwrap: Callable[[nn.Module], nn.Module]) -> Iterator[nn.Module]:
    """Context manager: the model with its wrappers replaced by the modules inside them.

    `unwrap` returns the module inside a wrapper, and any other module unchanged.
    """
    root = unwrap(model)
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        for module in list(root.modules()):
            for name, child in module._modules.items():
                inner = unwrap(child) if child is not None else None
                if child is not None and inner is not child:
                    swapped.append((module, name, child))
                    module._modules[name] = inner
        yield root
    finally:
        for module, name, child in swapped:
            module._modules[name] = child
