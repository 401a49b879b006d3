"""Structure of a model: names of modules, the wrappers that training puts around them, and their replacement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from loka.graph.source import qualified, same_type
from loka.graph.wrappers import ADDED_NAMES, own_class
from loka.mods.adaptation import Adaptation, Setting

Found = tuple[str, str, tuple[tuple[str, Setting], ...]]  # a module to change: name, type, settings of the change
_INTERNAL = frozenset(vars(nn.Module()))


def type_of(module: nn.Module) -> str:
    """The module's original class as an `Adaptation` names it: "torch.nn.modules.linear.Linear"."""
    return qualified(own_class(type(module)))


def short(module: nn.Module) -> str:
    """Short name of the class: "nn.Linear" for torch's, only the name for any other."""
    kind = type(module)
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def every_name(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """All qualified names of each module, by its id, in model order: several for a shared module."""
    names: dict[int, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names[id(module)] = (*names.get(id(module), ()), name)
    return names


def parent_of(model: nn.Module, name: str) -> nn.Module:
    """The parent of the module with that qualified name. Raises AttributeError where it is missing."""
    return model.get_submodule(name.rpartition(".")[0])


def exchange(model: nn.Module, names: Iterable[str], make: Callable[[], nn.Module]) -> None:
    """Replace modules by new ones, in the same training mode; a module with several names by one under all of them."""
    old = {name: model.get_submodule(name) for name in names}
    made = {id(module): make().train(module.training) for module in old.values()}
    for name, module in old.items():
        parent_of(model, name)._modules[name.rpartition(".")[2]] = made[id(module)]


def held_elsewhere(model: nn.Module) -> dict[int, str]:
    """Modules held by an attribute other than a child, directly or in a list, by id: a replacement would miss it."""
    found: dict[int, str] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _INTERNAL:
                continue
            for part in _flat(value):
                found.setdefault(id(part), f"{name}.{key}".lstrip("."))
    return found


def _flat(value: object) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from (_flat(part) if isinstance(part, nn.Module | list | tuple | dict) else ())


def unsupported_exchange(module: nn.Module, held: Mapping[int, str]) -> str | None:
    """Reason why a module cannot be replaced: it does more than its class, or is held elsewhere. Else None."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks):
        return "it has hooks, which would no longer run; add them after the mods"
    if parametrize.is_parametrized(module):
        return "it is parametrised"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    if isinstance(module, LazyModuleMixin):
        return "its sizes are not known yet; run the model once in the factory"
    if id(module) in held:
        return f"'{held[id(module)]}' holds it too, and would still call it"
    return None


def why_another(module: nn.Module, replaces: str) -> str | None:
    """Reason why a live module is not the planned one, to follow its name; None where it is."""
    if not same_type(own_class(type(module)), replaces):
        return f"is a {type_of(module)}, not a {replaces}"
    reason = unsupported_exchange(module, {})
    return None if reason is None else f"cannot be exchanged: {reason}"


def inside_encoder_layer(model: nn.Module, name: str) -> bool:
    """True if a module is part of an nn.TransformerEncoderLayer, whose fused evaluation reads it without calling it."""
    return bool(name) and isinstance(parent_of(model, name), nn.TransformerEncoderLayer)


def grouped(mod: str, found: Iterable[Found]) -> tuple[Adaptation, ...]:
    """Adaptations from (name, type, settings): modules with the same change are grouped, in model order."""
    groups: dict[tuple[str, tuple[tuple[str, Setting], ...]], list[str]] = {}
    for name, kind, settings in found:
        groups.setdefault((kind, settings), []).append(name)
    return tuple(Adaptation(mod, tuple(names), kind, settings) for (kind, settings), names in groups.items())


def plain_name(name: str) -> str:
    """A qualified name without the parts added by wrappers."""
    return ".".join(part for part in name.split(".") if part not in ADDED_NAMES)


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
