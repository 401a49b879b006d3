"""Which mods could be asked for around a site: findings propose those that the model can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from loka.errors import InputError
from loka.mods.dataflow import analyse_dataflow
from loka.mods.registry import MODEL_MODS
from loka.mods.selection import selected_for_all
from loka.sites.build_model import BuiltModel
from loka.sites.neighbours import Node
from loka.sites.watched_forward import undisturbed, watch_fake

NORMS = frozenset(("layer_norm", "rms_norm"))
ACTIVATIONS = frozenset(("silu", "sigmoid"))
_DEPTH = 6  # operations from a GEMM to what stands beside it, views among them


@dataclass(frozen=True, slots=True)
class Suggestible:
    """What a policy could write in `match` of a mod to change something about one site; None where it cannot."""

    no_bias: str | None = None  # the site itself
    norm_first: str | None = None  # the site itself
    block_norm_after: str | None = None  # the norm that reads its product
    block_norm_before: str | None = None  # the norm that makes its input
    hard_swish: str | None = None  # the activation that makes its input


def suggestible_mods(built: BuiltModel) -> dict[str, Suggestible]:
    """What mods could change about each site of a model, by the site's name; {} where the model cannot be watched.

    The model stays as it is. A copy of it runs on fake tensors.
    """
    try:
        model = analyse_dataflow(built)
    except InputError:
        return {}
    takes = {}
    for name, mod in MODEL_MODS.items():
        found = mod.find(model, selected_for_all(name)).adaptations
        takes[name] = frozenset(module for adaptation in found for module in adaptation.modules)
    linears = _firsts(built, takes["norm_first"])
    around: dict[str, Suggestible] = {}
    for site, before, after in _around(built):
        around[site] = Suggestible(
            no_bias=site if site in takes["no_bias"] else None,
            norm_first=site if site in linears else None,
            block_norm_after=_one(after, NORMS, takes["block_norm"]),
            block_norm_before=_one(before, NORMS, takes["block_norm"]),
            hard_swish=_one(before, ACTIVATIONS, takes["hard_swish"]),
        )
    return around


def _firsts(built: BuiltModel, norms: Iterable[str]) -> frozenset[str]:
    """The linears right before norms that could come first: policies name the linear, adaptations the norm."""
    found = set()
    for norm in norms:
        parent, _, own = norm.rpartition(".")
        keys = list(built.module.get_submodule(parent)._modules)
        found.add(f"{parent}.{keys[keys.index(own) - 1]}" if parent else keys[keys.index(own) - 1])
    return frozenset(found)


def _around(built: BuiltModel) -> Iterator[tuple[str, Mapping[str, str], Mapping[str, str]]]:
    """Each site on a Parameter with the modules of the nearest functions before and after it, by operation."""
    with undisturbed():
        try:
            watched = watch_fake(built, built.batch_size, evaluate=False)
        except Exception:  # noqa: BLE001 - a user's forward can raise anything on fake tensors
            return
    owners = {function.result: (function.op, function.owner) for function in watched.functions}
    for call in watched.training:
        site = call.module or call.weight
        if site is not None:
            before = _nearest([call.source] if call.source is not None else [], owners, forward=False)
            yield site, before, _nearest(call.result.children, owners, forward=True)


def _nearest(start: Iterable[Node], owners: Mapping[Node, tuple[str, str]], forward: bool) -> dict[str, str]:
    """The first function of each operation on the way from a GEMM to the next ones, as operation -> its module."""
    found: dict[str, str] = {}
    level = list(start)
    for _ in range(_DEPTH):
        further: list[Node] = []
        for node in level:
            if node in owners:
                found.setdefault(*owners[node])
            if not node.gemm:
                further += node.children if forward else node.parents
        level = list(dict.fromkeys(further))
    return found


def _one(found: Mapping[str, str], ops: frozenset[str], takes: frozenset[str]) -> str | None:
    return next((owner for op, owner in found.items() if op in ops and owner in takes), None)
