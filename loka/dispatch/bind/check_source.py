"""Check by the hash in the plan that a traced forward has not changed since."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from loka.dispatch.bind.binding import Binding
from loka.dispatch.bind.bound import unsharded_class
from loka.graph.source import forward_source_hash

# Attributes that data parallelism and Module.compile() add to modules. The hash covers a module's plain attributes.
_ADDED = ("_fsdp", "_is_fsdp", "_ddp", "_compiled_call_impl")


def source_problems(module: nn.Module, binding: Binding) -> Iterator[str]:
    """Reasons why the forward of `module`, with its inlined children, does not match the hash of the plan."""
    view = _as_planned(module)
    try:
        found = forward_source_hash(view, binding.inlined, binding.script())
    except OSError as error:
        yield f"the source of its forward cannot be read, so that it cannot be compared with the plan: {error}"
        return
    if found != binding.source_hash:
        what = "the source of its forward, or of an inlined child's, or an int, bool or str attribute that it may read,"
        yield f"{what} has changed since: run loka generate again"


def _as_planned(module: nn.Module) -> nn.Module:
    """A view of a module and its children without the classes and attributes of DDP, FSDP2 and Module.compile()."""
    view: nn.Module = object.__new__(unsharded_class(type(module)))
    view.__dict__ = {name: value for name, value in vars(module).items() if not name.startswith(_ADDED)}
    view.__dict__["_modules"] = {
        name: None if child is None else _as_planned(child) for name, child in module._modules.items()
    }
    return view
