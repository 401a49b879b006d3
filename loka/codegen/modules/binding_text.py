"""BINDINGS and ADAPTATIONS of a generated package, as Python that stays short for many layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from loka.codegen.layout import call, literal, quoted, tuple_of
from loka.codegen.modules.module_classes import BoundView
from loka.graph.fingerprint import Fingerprint
from loka.mods.adaptation import Adaptation
from loka.templating.wrap import WIDTH

_PLAIN = re.compile(r"[A-Za-z0-9_.]*")
_FEWEST = 8  # modules from which a range is easier to read than a list


def binding_text(view: BoundView) -> tuple[str, ...]:
    """The fields of one `dispatch.Binding` as text."""
    binding = view.binding
    forward = binding.forward
    fields = [
        f"        bound=modules.{view.module.name},",
        field_text("replaces", binding.module_type),
        field_text("inlined", forward.inlined if forward is not None else ()),
        _ranged_field("modules", tuple((name,) for name in binding.modules), binding.modules),
        _ranged_field("sites", binding.sites, binding.sites),
        field_text("gemms", view.gemms),
        field_text("shapes", binding.shapes),
    ]
    fields += [field_text("kernels", view.kernels)] if view.kernels else []
    if forward is not None and forward.fingerprint is not None:
        fields.append(f"        fingerprint={_fingerprint_text(forward.fingerprint)},")
    fields += [] if view.infer else ["        infer=False,"]
    return tuple(fields)


def _fingerprint_text(planned: Fingerprint) -> str:
    """`dispatch.Fingerprint((dispatch.PlannedCall("...", ("v0 = ...", "return v0")),), "float32")`."""
    calls = []
    for each in planned.calls:
        texts = [literal(each.inputs), literal(each.training)]
        texts += [literal(each.evaluation)] if each.evaluation else []
        texts += [f"results={literal(each.results)}"] if each.results else []
        calls.append(call("dispatch.PlannedCall", texts))
    return call("dispatch.Fingerprint", [tuple_of(calls), literal(planned.dtype)])


def field_text(name: str, value: object) -> str:
    """`name=value,` in a call."""
    return f"        {name}={literal(value)},"


def fits(name: str, value: object) -> bool:
    """True if `name=value,` fits on one line."""
    return len(field_text(name, value)) <= WIDTH


def _ranged_field(name: str, rows: tuple[tuple[str, ...], ...], value: tuple[object, ...]) -> str:
    """`name=value,`, or for the rows of many layers `sites=tuple((f"layers.{i}.fmb.0",) for i in range(12)),`."""
    ranged = None if len(rows) < _FEWEST or fits(name, value) else numbered(rows)
    if ranged is None:
        return field_text(name, value)
    templates, numbers = ranged
    row = tuple_of(templates) if value is rows else templates[0]
    line = f"        {name}=tuple({row} for i in {numbers}),"
    return line if len(line) <= WIDTH else field_text(name, value)


def numbered(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], str] | None:
    """F-strings over `i` and its range, for rows of names that differ only in one number; None for other rows.

    >>> numbered([("layers.0.up",), ("layers.1.up",), ("layers.2.up",)])
    (('f"layers.{i}.up"',), 'range(3)')
    """
    if len(rows) < 3 or len({len(row) for row in rows}) != 1 or not rows[0]:
        return None
    if not all(_PLAIN.fullmatch(name) for row in rows for name in row):
        return None
    parts = [name.split(".") for name in rows[0]]
    others = [name.split(".") for name in rows[1]]
    varying = [
        (column, place)
        for column, (one, other) in enumerate(zip(parts, others, strict=True))
        for place, (a, b) in enumerate(zip(one, other, strict=False))
        if a != b
    ]
    if not varying or any(not others[c][p].isdecimal() or not parts[c][p].isdecimal() for c, p in varying):
        return None
    first = int(parts[varying[0][0]][varying[0][1]])
    step = int(others[varying[0][0]][varying[0][1]]) - first
    if step < 1:
        return None
    for column, place in varying:
        parts[column][place] = "{i}"
    templates = [".".join(part) for part in parts]
    for number, row in enumerate(rows):
        if any(t.replace("{i}", str(first + number * step)) != name for t, name in zip(templates, row, strict=True)):
            return None
    texts = tuple(f'f"{t}"' if "{i}" in t else f'"{t}"' for t in templates)
    return texts, _range(first, first + (len(rows) - 1) * step + 1, step)


def _range(first: int, stop: int, step: int) -> str:
    if step > 1:
        return f"range({first}, {stop}, {step})"
    return f"range({first}, {stop})" if first else f"range({stop})"


_ITEM_INDENT = 12
_LONGEST_GROUP = 8  # most names in a group that repeats from layer to layer
_FEWEST_REPEATED = 6  # names from which a range is easier to read than a list


def adaptation_text(adaptation: Adaptation) -> tuple[str, ...]:
    """The fields of one `dispatch.Adaptation` as text."""
    fields = [field_text("mod", adaptation.mod), _modules_text(adaptation.modules)]
    fields.append(field_text("replaces", adaptation.replaces))
    fields += [field_text("settings", adaptation.settings)] if adaptation.settings else []
    return tuple(fields)


def _modules_text(names: tuple[str, ...]) -> str:
    """`modules=(...)`; names that repeat from layer to layer become a comprehension over a range."""
    if fits("modules", names):
        return field_text("modules", names)
    items, place = [], 0
    while place < len(names):
        taken, text = _repeated(names[place:])
        items.append(text if taken else quoted(names[place]))
        place += taken or 1
    return f"        modules={tuple_of(items)},"


def _repeated(names: Sequence[str]) -> tuple[int, str]:
    """Number of leading names that repeat with one running number, and their text; 0 if too few do.

    >>> _repeated([f"layers.{i}.{name}" for i in range(4) for name in "ab"])
    (8, '*(name for i in range(4) for name in (f"layers.{i}.a", f"layers.{i}.b"))')
    """
    best, text = 0, ""
    for together in range(1, min(_LONGEST_GROUP, len(names) // 3) + 1):
        rows = [tuple(names[start : start + together]) for start in range(0, len(names) - together + 1, together)]
        count = next((count for count in range(len(rows), 2, -1) if numbered(rows[:count]) is not None), 0)
        found = numbered(rows[:count]) if count else None
        if found is None or count * together < max(_FEWEST_REPEATED, best + 1):
            continue
        templates, numbers = found
        each = templates[0] if together == 1 else f"name for i in {numbers} for name in ({', '.join(templates)})"
        line = f"*({each} for i in {numbers})" if together == 1 else f"*({each})"
        if _ITEM_INDENT + len(line) + 1 <= WIDTH:
            best, text = count * together, line
    return best, text
