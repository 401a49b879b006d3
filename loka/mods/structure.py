"""What stands where in a model: names of modules, why one cannot be exchanged, and the exchange itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from loka.graph.source import qualified
from loka.mods.adaptation import Adaptation, Setting

_INTERNAL = frozenset(vars(nn.Module()))


def type_of(module: nn.Module) -> str:
    """The module's own class as an `Adaptation` names it: "torch.nn.modules.linear.Linear"."""
    return qualified(_own_class(type(module)))


def _own_class(kind: type) -> type:
    """The class that the module was made with: kernels bound to it, and FSDP2, have put another in front since.

    Both derive from their own class and, last, from what the module was.
    """
    while "loka_original" in vars(kind) or any(_is_fsdp(base) for base in kind.__bases__):
        kind = kind.__bases__[-1]
    return kind


def _is_fsdp(kind: type) -> bool:
    # By name: importing torch.distributed.fsdp takes long, and who uses it has imported it.
    return kind.__name__ == "FSDPModule" and kind.__module__.startswith("torch.distributed")


def short(module: nn.Module) -> str:
    """The class as a person names it: "nn.Linear" of torch, the name alone of any other."""
    kind = type(module)
    return f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def every_name(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """All qualified names of each module, by its id, in model order: more than one where a module is shared."""
    names: dict[int, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names[id(module)] = (*names.get(id(module), ()), name)
    return names


def parent_of(model: nn.Module, name: str) -> nn.Module:
    """The module that holds the one of that qualified name. Raises AttributeError where it is not there."""
    return model.get_submodule(name.rpartition(".")[0])


def exchange(model: nn.Module, made: Mapping[str, nn.Module]) -> None:
    """Put modules in the places of others, in the mode that those are in."""
    for name, module in made.items():
        module.train(model.get_submodule(name).training)
    for name, module in made.items():
        parent_of(model, name)._modules[name.rpartition(".")[2]] = module


def held_elsewhere(model: nn.Module) -> dict[int, str]:
    """Modules that an attribute other than a child holds, directly or in a list, by id: an exchange would miss it."""
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
    """Why a module cannot give its place to another: it does more than its class says, or something else holds it."""
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
    """What a live module that is to be exchanged is, where that is not what was planned, to stand after its name."""
    kind = type_of(module)
    if kind != replaces:
        return f"is a {kind}, not a {replaces}"
    reason = unsupported_exchange(module, {})
    return None if reason is None else f"cannot be exchanged: {reason}"


def inside_encoder_layer(model: nn.Module, name: str) -> bool:
    """Whether a module is a part of an nn.TransformerEncoderLayer, whose fused evaluation reads it, uncalled."""
    return bool(name) and isinstance(parent_of(model, name), nn.TransformerEncoderLayer)


def grouped(mod: str, found: Iterable[tuple[str, str, tuple[tuple[str, Setting], ...]]]) -> tuple[Adaptation, ...]:
    """Adaptations of (name, type, settings): modules that are changed in one way stand together, in model order."""
    groups: dict[tuple[str, tuple[tuple[str, Setting], ...]], list[str]] = {}
    for name, kind, settings in found:
        groups.setdefault((kind, settings), []).append(name)
    return tuple(Adaptation(mod, tuple(names), kind, settings) for (kind, settings), names in groups.items())
