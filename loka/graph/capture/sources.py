"""Sources of the values in a captured graph, by Dynamo's names for them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

_STEP = re.compile(r"""\.(\w+)(\(\))?|\[('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d+)\]""")
_TABLES = frozenset({"_modules", "_parameters", "_buffers", "__dict__"})


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from: `root` is "self", an argument of the forward, or "" for anything outside of both.

    `steps` lead from there to it, attributes as (".", name) and items as ("[]", key). Outside, `text` is Dynamo's name.
    """

    root: str
    steps: tuple[tuple[str, Any], ...]
    text: str

    @property
    def path(self) -> str | None:
        """The dotted path of what is reached from the module by attributes alone: "layers.0.weight"; None otherwise."""
        return ".".join(str(key) for _, key in self.steps) if self.is_of_module and self._is_dotted else None

    @property
    def is_of_module(self) -> bool:
        """True for what the module holds."""
        return self.root == "self"

    @property
    def _is_dotted(self) -> bool:
        return all(kind == "." for kind, _ in self.steps)

    @property
    def expression(self) -> str:
        """The source as Python on the forward's arguments: "batch['user'].values"; its text for what is outside."""
        if not self.root:
            return self.text
        return self.root + "".join(f".{key}" if kind == "." else f"[{key!r}]" for kind, key in self.steps)


def parsed(name: str) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """Root and steps of a source by Dynamo's name for it; ("", ()) for what is outside of the call.

    >>> parsed("L['self']._modules['a']._parameters['weight']")
    ('self', (('.', 'a'), ('.', 'weight')))
    """
    if not name.startswith("L["):
        return "", ()
    steps: list[tuple[str, Any]] = []
    place, in_table = 1, False
    while place < len(name):
        found = _STEP.match(name, place)
        if found is None:
            return "", ()
        place = found.end()
        attribute, called, item = found.groups()
        if called and attribute == "size":
            attribute = "shape"
        elif called:
            return "", ()
        if attribute in _TABLES:
            in_table = True
            continue
        if attribute is not None:
            steps.append((".", attribute))
        else:
            key = _key(item)
            steps.append((".", key) if in_table else ("[]", key))
        in_table = False
    (_, root), *rest = steps
    return str(root), tuple(rest)


def _key(text: str) -> str | int:
    key: str | int = ast.literal_eval(text)
    return key
