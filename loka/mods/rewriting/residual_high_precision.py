"""residual_high_precision: the modules whose residual sums are widened, and the children inlined into each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from loka.graph.ir import ForwardIR
from loka.graph.patterns.owners import parents
from loka.graph.source import functions_of, has_operators, is_block_norm, names_in
from loka.mods.adaptation import Setting
from loka.mods.protocols import OwnerMod, UnplannedModel
from loka.mods.rewriting.residual_sums import NAME, NO_SUM, widen_residual_sums
from loka.mods.rewriting.rewriting_tracer import OwnerScope, RewrittenOwner, is_under

_LISTS = (nn.ModuleList, nn.ModuleDict)  # without a forward
_CONTAINERS = (*_LISTS, nn.Sequential)
_NORMS = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, slots=True)
class ResidualHighPrecisionMod:
    """Widens the residual sums of the outermost matched modules that contain one."""

    name: str = NAME
    exact: bool = True
    description: str = "residual sums add, and stay for the next sum and for norms, in a wider dtype"
    nothing: str = NO_SUM

    def scopes(self, model: nn.Module, wants: Callable[[str], bool]) -> tuple[OwnerScope, ...]:
        """The outermost of the wanted modules with a sum in their own forward or below."""
        modules = dict(model.named_modules())
        writers = [name for name, module in modules.items() if _writes_sums(module)]
        found: list[OwnerScope] = []
        for name, module in modules.items():  # a module comes before its children
            if wants(name) and not isinstance(module, _LISTS) and not any(is_under(name, each.owner) for each in found):
                inside = [writer for writer in writers if is_under(writer, name)]
                if inside:
                    found.append(_stream(name, inside, modules))
        return tuple(found)

    def inner(self, scope: OwnerScope, model: nn.Module) -> tuple[OwnerScope, ...]:
        """The scopes inside a module whose own forward cannot be traced."""
        modules = dict(model.named_modules())
        below = [writer for writer in scope.writers if writer != scope.owner]
        outer = [name for name in below if not any(other != name and is_under(name, other) for other in below)]
        return tuple(_stream(name, [each for each in below if is_under(each, name)], modules) for name in outer)

    def rewrite(
        self, forward: ForwardIR, means: Callable[[str], bool], settings: Mapping[str, Setting]
    ) -> RewrittenOwner | str:
        """The forward with its residual sums in the wider dtype."""
        return widen_residual_sums(forward, str(settings["dtype"]), means)

    def describe(self, count: int, settings: Mapping[str, Setting]) -> str:
        """Description of `count` residual sums."""
        return f"{count} residual sum{'s' if count > 1 else ''} in {settings['dtype']}"

    def proposal(self, model: UnplannedModel) -> str | None:
        """None: it costs memory, so users have to ask for it."""
        return None


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


MOD: OwnerMod = ResidualHighPrecisionMod()
