"""The modules of the user's own that an owner's forward is traced through: those between what kernels take."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn

from loka.graph.source import functions_of, has_hooks

_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, slots=True)
class OwnModules:
    """Decides which modules below an owner are inlined although no site asks for it.

    These are modules with a forward of the user's own, and nn.Sequentials, that hold nothing but Parameters, other such
    modules, the owner's linears, and modules of torch that have no Parameters or are norms. So whatever has embedding
    tables, or GEMMs of another owner, stays a call. Tracing shows what the forwards do; one that cannot be traced is
    `closed`.
    """

    kernels: tuple[type[nn.Module], ...]  # modules of torch that are inlined: norms, activations, views
    linears: Collection[str]  # qualified names of the owner's linears
    others: Collection[str]  # modules with sites of other owners, and all that are around these
    closed: Collection[str]  # modules that are not inlined

    def below(self, name: str, module: nn.Module, inline: Collection[str]) -> Iterator[str]:
        """Qualified names of the modules to inline inside one that is; `inline` are those that a site asks for."""
        for path, child in _children(name, module):
            if path in inline:
                yield from self.below(path, child, inline)
            elif self._is_inlined(path, child):
                yield path
                yield from self.below(path, child, inline)

    def _is_inlined(self, name: str, module: nn.Module) -> bool:
        """True for a module whose forward is traced through, by itself or as a part of another."""
        if name in self.closed or name in self.others or has_hooks(module):
            return False
        if type(module) in self.kernels:
            return True
        if not _is_own(module) and not (isinstance(module, nn.Sequential) and not module._parameters):
            return False
        return all(
            self._is_inlined(path, child) or self._is_plain(path, child) for path, child in _children(name, module)
        )

    def _is_plain(self, name: str, module: nn.Module) -> bool:
        """True for a linear of the owner, and for a module that stays a call inside of an inlined one: a dropout."""
        if name in self.linears:
            return True
        return not _is_own(module) and not module._parameters and not module._modules and name not in self.others


def _is_own(module: nn.Module) -> bool:
    """True for a module with a forward of the user's own."""
    return not type(module).forward.__module__.startswith("torch.") and bool(functions_of(module))


def _children(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module by qualified name, with lists and dicts of modules replaced by their content."""
    for key, child in module.named_children():
        path = f"{name}.{key}".lstrip(".")
        if isinstance(child, _LISTS) and not _is_own(child):
            yield from _children(path, child)
        else:
            yield path, child
