"""Identifiers made from names of the user: module paths, attribute paths, operation names, argument names.

The input is not trusted. The result is plain ASCII, starts with a letter, and is neither a keyword nor a builtin nor a
name that generated code uses itself.
"""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata
from collections.abc import Iterable, Sequence

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
    }
)
_CLASS = re.compile(r"[A-Z][A-Za-z0-9]{0,79}")
_VARIABLE = re.compile(r"[a-z_][a-z0-9_]*")
_LONGEST = 60  # most characters of a derived name, before a number makes it unique


class Names:
    """Names taken in one scope; `unique` returns each only once."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*RESERVED, *taken}

    def first_free(self, wanted: Sequence[str], also: Sequence[str] = ()) -> str:
        """The first of these names that is free, also with each suffix of `also`; else the last made `unique`."""
        for name in wanted[:-1]:
            if not any(name + suffix in self._taken for suffix in ("", *also)):
                return self.unique(name, also)
        return self.unique(wanted[-1], also)

    def unique(self, wanted: str, also: Sequence[str] = ()) -> str:
        """`wanted`, or `wanted_2`, `wanted_3`, ...: the first that is free, also with each suffix of `also`."""
        name, number = wanted, 1
        while any(name + suffix in self._taken for suffix in ("", *also)):
            number += 1
            name = f"{wanted}_{number}" if wanted.islower() else f"{wanted}X{number}"
        self._taken.update(name + suffix for suffix in ("", *also))
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


def class_of(function: str) -> str:
    """Name of a wrapper's autograd function: head_mlp_0 -> HeadMlp0Function."""
    return f"{_camel(function)}Function"


def snake(name: str) -> str:
    """A class name in snake case: LayersFmb0 -> layers_fmb0."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
