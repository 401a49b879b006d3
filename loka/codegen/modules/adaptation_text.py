"""ADAPTATIONS of a generated package: the mods' changes to the model, as Python that stays short for many layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from loka.codegen.modules.binding_text import BindingText, field_text, fits, numbered
from loka.codegen.text.layout import quoted
from loka.mods.adaptation import Adaptation
from loka.templating.wrap import WIDTH

_INDENT = 12
_LONGEST = 8  # most names in a group that repeats from layer to layer
_FEWEST = 6  # names from which a range is easier to read than a list


def adaptation_text(adaptation: Adaptation) -> BindingText:
    """The fields of one `dispatch.Adaptation` as text."""
    fields = [field_text("mod", adaptation.mod), _modules_text(adaptation.modules)]
    fields.append(field_text("replaces", adaptation.replaces))
    fields += [field_text("settings", adaptation.settings)] if adaptation.settings else []
    return BindingText(tuple(fields))


def _modules_text(names: tuple[str, ...]) -> str:
    """`modules=(...)`; names that repeat from layer to layer become a comprehension over a range."""
    if fits("modules", names):
        return field_text("modules", names)
    margin = " " * (_INDENT - 4)
    return "\n".join([f"{margin}modules=(", *_lines(names), f"{margin}),"])


def _lines(names: Sequence[str]) -> Iterator[str]:
    margin = " " * _INDENT
    place = 0
    while place < len(names):
        taken, text = _repeated(names[place:])
        if taken:
            yield f"{margin}{text},"
        else:
            taken = 1
            yield f"{margin}{quoted(names[place])},"
        place += taken


def _repeated(names: Sequence[str]) -> tuple[int, str]:
    """Number of leading names that repeat with one running number, and their text; 0 if too few do.

    >>> _repeated([f"layers.{i}.{name}" for i in range(4) for name in "ab"])
    (8, '*(name for i in range(4) for name in (f"layers.{i}.a", f"layers.{i}.b"))')
    """
    best, text = 0, ""
    for together in range(1, min(_LONGEST, len(names) // 3) + 1):
        rows = [tuple(names[start : start + together]) for start in range(0, len(names) - together + 1, together)]
        count = next((count for count in range(len(rows), 2, -1) if numbered(rows[:count]) is not None), 0)
        found = numbered(rows[:count]) if count else None
        if found is None or count * together < max(_FEWEST, best + 1):
            continue
        templates, numbers = found
        each = templates[0] if together == 1 else f"name for i in {numbers} for name in ({', '.join(templates)})"
        line = f"*({each} for i in {numbers})" if together == 1 else f"*({each})"
        if _INDENT + len(line) + 1 <= WIDTH:
            best, text = count * together, line
    return best, text
