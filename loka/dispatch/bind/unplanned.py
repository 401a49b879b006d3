"""What a live model has and its plan has not: GEMMs in modules, or by Parameters, that are new since."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from loka.dispatch.bind.check_model import AGAIN
from loka.dispatch.bind.wrappers import find_module
from loka.graph.planned_model import Part, PlannedModel, parts_of, unknown_parts, without_values
from loka.graph.wrappers import innermost, own_class
from loka.paths import open_plain

PLAN = "plan.json"
NAMED = 4  # most new parts of a kind that are named


def planned_model_of(package: str) -> PlannedModel | None:
    """The parts of the model that a package was planned for, from its plan.json; None where it has none."""
    file = getattr(sys.modules.get(package), "__file__", None)
    try:
        with open_plain(Path(str(file)).with_name(PLAN)) as opened:
            held = json.loads(opened.read().decode())["model"]
        held = {key: tuple(value) if isinstance(value, list) else value for key, value in held.items()}
        return PlannedModel(**held)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def unplanned_products(root: nn.Module, planned: PlannedModel) -> str:
    """The GEMMs of a live model that its plan does not know, in words: how many, their share, where; "" if none.

    They are looked for where modules or Parameters are new, in a forward without values of arguments as planned. Where
    that cannot run, new matrices are told instead, as it is not known what multiplies by them.
    """
    parts = {part.name: part for part in parts_of(root)}
    new = unknown_parts(planned, parts)
    if not new:
        return ""
    from loka.graph.sites.discover import find_sites
    from loka.model.build_model import BuiltModel  # these import for a fifth of a second

    try:
        sites = find_sites(BuiltModel(*without_values(root, planned), planned.batch_size)).sites
    except Exception as error:  # noqa: BLE001 - binding does not depend on it
        return _matrices(list(parts.values()), new, error)
    unknown = unknown_parts(planned, [name for site in sites for name in (site.weight, site.owner) if name])
    found = [(site, unknown.get(site.weight or "", unknown.get(site.owner, ""))) for site in sites if site.called]
    found = [(site, place) for site, place in found if place]
    if not found:
        return ""
    share = sum(site.share for site, _ in found)
    return (
        f"{_counted(len(found), 'GEMM', 'GEMMs')} not in the package, {_percent(share)} of the FLOPs of all GEMMs in a "
        f"forward of {planned.batch_size} samples: {_listed(root, dict.fromkeys(place for _, place in found))}: "
        f"{AGAIN}"
    )


def _matrices(parts: Sequence[Part], new: Iterable[str], error: Exception) -> str:
    """New Parameters of two or more dimensions, but for tables of embeddings, in words; "" without any."""
    sizes = {
        part.name: part.parameter.numel()
        for part in parts
        if part.parameter is not None and part.parameter.ndim > 1
        and not isinstance(part.module, nn.Embedding | nn.EmbeddingBag)
    }  # fmt: skip
    found = [name for name in new if name in sizes]
    if not found:
        return ""
    why = (str(error).splitlines() or [type(error).__name__])[0]
    share = sum(sizes[name] for name in found) / max(sum(sizes.values()), 1)
    return (
        f"{_counted(len(found), 'matrix', 'matrices')} not in the package, {_percent(share)} of the elements of all: "
        f"{few(found)}; which GEMMs they are in was not found ({why}): {AGAIN}"
    )


def _listed(root: nn.Module, places: Iterable[str]) -> str:
    """New modules and Parameters by name, those of one class in one module together: "2 of 8 Expert in 'experts'"."""
    groups: dict[tuple[str, type | None], list[str]] = defaultdict(list)
    for place in places:
        module = find_module(root, place)
        groups[place.rpartition(".")[0], None if module is None else own_class(type(module))].append(place)
    texts = []
    for (parent, kind), names in groups.items():
        holder = find_module(root, parent)
        beside = [] if holder is None or kind is None else [own_class(type(innermost(m))) for m in holder.children()]
        alike = sum(each is kind for each in beside)
        of = f"{len(names)} of {alike} {kind.__name__} in {parent!r} " if parent and kind and alike > len(names) else ""
        texts.append(f"{of}({few(names)})" if of else few(names))
    return ", ".join(texts)


def few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(map(repr, names[:NAMED]))
    return shown if len(names) <= NAMED else f"{shown} and {len(names) - NAMED} more"


def _counted(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several} of the model {'is' if number == 1 else 'are'}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
