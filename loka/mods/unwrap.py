"""Access to a model through the wrappers that training puts around its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn


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
