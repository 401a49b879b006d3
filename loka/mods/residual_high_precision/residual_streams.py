"""The modules whose forwards `residual_high_precision` rewrites, and the children inlined into each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from loka.graph.patterns.owners import parents
from loka.graph.source import functions_of, has_operators, is_block_norm, names_in
from loka.mods.residual_high_precision.residual_high_precision import NAME
from loka.mods.rewriting.rewriting_tracer import OwnerScope, is_under

_LISTS = (nn.ModuleList, nn.ModuleDict)  # without a forward
_CONTAINERS = (*_LISTS, nn.Sequential)
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def residual_streams(model: nn.Module, wants: Callable[[str], bool]) -> tuple[OwnerScope, ...]:
    """The outermost of the wanted modules with a sum in their forward or below; the model is not run."""
    modules = dict(model.named_modules())
    writers = [name for name, module in modules.items() if _writes_sums(module)]
    found: list[OwnerScope] = []
    for name, module in modules.items():  # a module comes before its children
        if wants(name) and not isinstance(module, _LISTS) and not any(is_under(name, each.owner) for each in found):
            inside = [writer for writer in writers if is_under(writer, name)]
            if inside:
                found.append(_stream(name, inside, modules))
    return tuple(found)


def inner(stream: OwnerScope, model: nn.Module) -> tuple[OwnerScope, ...]:
    """The scopes inside a module whose own forward cannot be traced."""
    modules = dict(model.named_modules())
    below = [writer for writer in stream.writers if writer != stream.owner]
    outer = [name for name in below if not any(other != name and is_under(name, other) for other in below)]
    return tuple(_stream(name, [each for each in below if is_under(each, name)], modules) for name in outer)


def _stream(owner: str, writers: Sequence[str], modules: Mapping[str, nn.Module]) -> OwnerScope:
    inline = [name for name in writers if name != owner]
    forwards = {owner, *inline, *(around for name in inline for around in parents(name) if is_under(around, owner))}
    return OwnerScope(NAME, owner, tuple(writers), (*inline, *_listed_norms(forwards, modules)))


def _listed_norms(forwards: set[str], modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The norms in module lists of inlined forwards; norms outside lists are inlined anyway."""
    for name, module in modules.items():
        above, _, _ = name.rpartition(".")
        if not isinstance(modules[above], _LISTS) or not (isinstance(module, _NORMS) or is_block_norm(module)):
            continue
        holder = next((around for around in parents(name) if not isinstance(modules[around], _LISTS)), "")
        if holder in forwards:
            yield name


def _writes_sums(module: nn.Module) -> bool:
    """True if a hand-written forward may add: it has an infix operator, or names `add`."""
    if type(module).__module__.startswith("torch.") or isinstance(module, _CONTAINERS) or is_block_norm(module):
        return False
    return has_operators(module) or any("add" in names_in(function) for function in functions_of(module))
