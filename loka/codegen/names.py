"""Names in generated code, made from names of the user: identifiers, functions after layers, and text of comments.

The input is not trusted. An identifier is plain ASCII, starts with a letter, and is neither a keyword nor a builtin nor
a name that generated code uses itself. No name can break out of a comment or a docstring.
"""

from __future__ import annotations

import builtins
import keyword
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from loka.templating.wrap import WIDTH

RESERVED = frozenset(
    {*dir(builtins), *keyword.kwlist, *keyword.softkwlist}
    | {
        "torch",
        "math",
        "operator",
        "dispatch",
        "kernels",
        "fp8_kernels",
        "fused",
        "modules",
        "self",
        "Any",
        "Tensor",
        "STAMP",
        "BINDINGS",
        "apply",
        "ctx",
        "once_differentiable",
        "run",
        "CounterIds",
        "Tensors",
        "constant",
    }
)
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]{0,79}")
_VARIABLE = re.compile(r"[a-z_][a-z0-9_]*")
_LONGEST = 60  # most characters of a derived name, before a number makes it unique


class Names:
    """Names taken in one scope; `unique` returns each only once."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*RESERVED, *taken}

    def first_free(self, wanted: Sequence[str]) -> str:
        """The first of these names that is free; else the last made `unique`."""
        return self.unique(next((name for name in wanted if name not in self._taken), wanted[-1]))

    def unique(self, wanted: str) -> str:
        """`wanted`, or `wanted_2`, `wanted_3`, ...: the first that is free."""
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = f"{wanted}_{number}" if wanted.islower() else f"{wanted}X{number}"
        self._taken.add(name)
        return name


def words(name: str) -> list[str]:
    """Words of ASCII letters and digits in a name: "fmb.0.low_rank" -> fmb, 0, low, rank."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode("ascii")
    return re.findall(r"[A-Za-z0-9]+", plain)


def class_name(modules: Sequence[str], module_type: str, hint: str = "") -> str:
    """A class name for modules that share one forward, from the parts that their paths have in common.

    >>> class_name(("layers.0.fmb.0", "layers.1.fmb.0"), "torch.nn.modules.linear.Linear")
    'LayersFmb0'

    `hint` is used unchanged if it is a plain class name. If the paths have nothing in common, the type gives the name.
    """
    if _CLASS.fullmatch(hint) and hint not in RESERVED:
        return hint
    paths = [path.split(".") for path in modules]
    shared: list[str] = []
    if len({len(path) for path in paths}) == 1:
        shared = [parts[0] for parts in zip(*paths, strict=True) if len(set(parts)) == 1]
    made = _camel(".".join(shared)) or _camel(module_type.rpartition(".")[2]) or "Module"
    return made if made[0].isalpha() else f"Module{made}"


def variable_name(name: str, fallback: str) -> str:
    """A variable name from an attribute path or an operation: "self.tower[0].weight" -> tower_0_weight."""
    parts = [word.lower() for word in words(name.removeprefix("self."))]
    made = "_".join(parts)[:_LONGEST].strip("_") or fallback
    return made if made[0].isalpha() else f"{fallback}_{made}"


def is_plain_variable(name: str) -> bool:
    """True if a name can stay unchanged: lower case, not `l`, and not used by generated code."""
    return bool(_VARIABLE.fullmatch(name)) and name not in RESERVED and name != "l"


def _camel(name: str) -> str:
    made = ""
    for word in words(name):
        # Keeps two numbers apart: "layers.1.2" is Layers1X2.
        joint = "X" if made[-1:].isdigit() and word[0].isdigit() else ""
        made += joint + word[0].upper() + word[1:]
    return made[:_LONGEST]


def snake(name: str) -> str:
    """A class name in snake case: LayersFmb0 -> layers_fmb0."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


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


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-*/]+")
_LONGEST_SHOWN = 72  # most characters of a shown name


def shown(name: str) -> str:
    """A name for prose: unchanged if plain, otherwise quoted and escaped to ASCII; long names are cut.

    The result is safe in a comment and, having no backslash and no double quote, in a docstring.
    """
    if not name:
        return "(the model itself)"
    cut = name if len(name) <= _LONGEST_SHOWN else name[: _LONGEST_SHOWN - 3] + "..."
    if _PLAIN_NAME.fullmatch(cut):
        return cut
    return "'" + ascii(cut)[1:-1].replace("\\", "/").replace('"', "'") + "'"


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first names and the number of all: "a.0, a.1, a.2, ... (12 in all)"."""
    head = ", ".join(shown(name) for name in names[:most])
    return head if len(names) <= most else f"{head}, ... ({len(names)} in all)"


def wrapped(text: str, indent: int, hanging: int = 0, first: int = 0) -> str:
    """`text` wrapped to 120 columns at `indent`; the first line starts `first` columns further right.

    Names in `text` must have passed through `shown`.
    """
    lines = textwrap.wrap(
        text,
        width=WIDTH - indent - first,
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return ("\n" + " " * indent).join(lines)
