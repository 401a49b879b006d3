"""Names of generated functions, after the layers of the user's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from loka.codegen.text.identifiers import variable_name, words


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers that one function computes, in each module that calls it."""

    name: str  # head_mlp
    longer: str  # head_mlp_0_to_6, used if another function has that name
    paths: tuple[str, ...]  # head.mlp, as in the model


def layers(sites: Sequence[Sequence[str]], fallback: str, around: Sequence[str] = ()) -> Layers:
    """Names for the layers of `sites`: for each module, the paths of the sites that the function computes, in order.

    >>> layers([("layers.0.fmb.0", "layers.0.fmb.3"), ("layers.1.fmb.0", "layers.1.fmb.3")], "model")
    Layers(name='layers_fmb', longer='layers_fmb_0_to_3', paths=('layers.0.fmb', 'layers.1.fmb'))

    Parts of the paths that differ between modules are left out. `around`: all sites of the first module; if others of
    them have the same prefix, the longer name is used. `fallback`: name of layers that have nothing in common.
    """
    columns = [_shared([path.split(".") for path in column]) for column in zip(*sites, strict=True)]
    stem, path = _common(columns), _common([site.split(".") for site in sites[0]])
    span = [columns[0][len(stem) :], ["to"], columns[-1][len(stem) :]] if len(columns) > 1 else []
    short, longer = (_name(".".join(parts), fallback) for parts in (stem, sum(span, stem)))
    others = any(site.split(".")[: len(path)] == path for site in set(around) - set(sites[0]))
    return Layers(longer if others else short, longer, tuple(map(_path, sites)))


def _name(path: str, fallback: str) -> str:
    """A path as an identifier: "0.mlp" -> layer_0_mlp."""
    return variable_name(path, "layer") if words(path) else fallback


def _shared(paths: Sequence[Sequence[str]]) -> list[str]:
    """The parts that all paths share at the same position; all of the first path if lengths differ."""
    if len({len(path) for path in paths}) > 1:
        return list(paths[0])
    return [parts[0] for parts in zip(*paths, strict=True) if len(set(parts)) == 1]


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """The common prefix of the paths, in parts."""
    alike = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return [parts[0] for parts in alike]


def _path(sites: Sequence[str]) -> str:
    """Path of one module's layers: their common prefix, or "first to last"."""
    stem = ".".join(_common([site.split(".") for site in sites]))
    return stem if stem or len(sites) == 1 else f"{sites[0]} to {sites[-1]}"
