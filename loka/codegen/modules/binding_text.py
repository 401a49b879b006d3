"""BINDINGS of a generated package: modules and their generated classes, as Python that stays short for many layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loka.codegen.modules.module_classes import BoundView
from loka.codegen.text.layout import call, literal, tuple_of
from loka.graph.reads import Reads
from loka.templating.wrap import WIDTH

_INDENT = 8
_PLAIN = re.compile(r"[A-Za-z0-9_.]*")
_FEWEST = 8  # modules from which a range is easier to read than a list


@dataclass(frozen=True, slots=True)
class BindingText:
    """One binding, each field as the text of `field=value`."""

    fields: tuple[str, ...]


def binding_text(view: BoundView) -> BindingText:
    """The fields of one `dispatch.Binding` as text."""
    binding = view.binding
    forward = binding.forward
    plain: list[tuple[str, object]] = [
        ("replaces", binding.module_type),
        ("source_hash", forward.source_hash if forward is not None else ""),
        ("inlined", forward.inlined if forward is not None else ()),
    ]
    fields = [f"        train=modules.{view.train.name},"]
    fields.append(f"        infer=modules.{view.infer.name}," if view.infer is not None else "        infer=None,")
    fields += [field_text(name, value) for name, value in plain]
    fields.append(_names_field("modules", binding.modules))
    fields.append(_sites_field(binding.sites))
    fields += [field_text("gemms", view.gemms), field_text("shapes", binding.shapes)]
    fields += [field_text("kernels", view.kernels)] if view.kernels else []
    if forward is not None and forward.reads:
        fields.append(f"        reads={tuple_of(list(map(_reads_text, forward.reads)))},")
    if forward is not None and forward.called:
        fields.append(f"        called={_paths_text(forward.called)},")
    if forward is not None and forward.constants:
        fields.append(field_text("constants", forward.constants))
    return BindingText(tuple(fields))


def _reads_text(reads: Reads) -> str:
    """`dispatch.Reads(("fmb",), "torch.nn.modules.container.Sequential", holds=7)`."""
    items = [_paths_text(reads.modules), literal(reads.type)]
    items += [f"holds={literal(reads.holds)}"] if reads.holds is not None else []
    items += [f"values={_values_text(reads.values)}"] if reads.values else []
    return call("dispatch.Reads", items)


def _values_text(values: tuple[tuple[str, str], ...]) -> str:
    """Attributes and their values; many equal items become `tuple((f"{i}", "...") for i in range(24))`."""
    names, texts = [name for name, _ in values], {text for _, text in values}
    ranged = numbered([(name,) for name in sorted(names, key=int)]) if all(map(str.isdecimal, names)) else None
    if len(values) < _FEWEST or len(texts) > 1 or ranged is None:
        return literal(values)
    return f"tuple(({ranged[0][0]}, {literal(texts.pop())}) for i in {ranged[1]})"


def _paths_text(paths: Sequence[str]) -> str:
    """A tuple of paths; many that differ only in a number become `*(f"layers.{i}.norm" for i in range(24))`."""
    if len(paths) < _FEWEST:
        return literal(tuple(paths))
    patterns = min((_by_number(paths, place) for place in range(max(path.count(".") for path in paths) + 1)), key=len)
    items: list[str] = []
    for alike in patterns:
        ranged = numbered([(path,) for path in alike]) if len(alike) >= 3 else None
        if ranged is None:
            items += [literal(path) for path in alike]
        else:
            ((template,), numbers) = ranged
            items.append(f"*({template} for i in {numbers})")
    return f"tuple{items[0][1:]}" if len(items) == 1 and items[0].startswith("*(") else tuple_of(items)


def _by_number(paths: Sequence[str], place: int) -> list[list[str]]:
    """Groups of paths that differ only in the number at one position, sorted by that number."""
    found: dict[tuple[str | None, ...], list[str]] = {}
    for path in paths:
        parts: list[str | None] = [*path.split(".")]
        if place < len(parts) and path.split(".")[place].isdecimal():
            parts[place] = None
        found.setdefault(tuple(parts), []).append(path)
    return [
        sorted(each, key=lambda path: int(path.split(".")[place])) if key[place : place + 1] == (None,) else each
        for key, each in found.items()
    ]


def field_text(name: str, value: object) -> str:
    """`name=value,` in a call."""
    return " " * _INDENT + f"{name}={literal(value)},"


def fits(name: str, value: object) -> bool:
    """True if `name=value,` fits on one line."""
    return len(field_text(name, value)) <= WIDTH


def _names_field(name: str, names: tuple[str, ...]) -> str:
    """`modules=(...)`, or for many layers `modules=tuple(f"layers.{i}.fmb.0" for i in range(12))`."""
    ranged = None if len(names) < _FEWEST or fits(name, names) else numbered([(item,) for item in names])
    if ranged is None:
        return field_text(name, names)
    (template,), numbers = ranged
    return " " * _INDENT + f"{name}=tuple({template} for i in {numbers}),"


def _sites_field(sites: tuple[tuple[str, ...], ...]) -> str:
    """`sites=(...)`, or for many layers `sites=tuple((f"layers.{i}.fmb.0",) for i in range(12))`."""
    ranged = None if len(sites) < _FEWEST or fits("sites", sites) else numbered(sites)
    if ranged is None:
        return field_text("sites", sites)
    templates, numbers = ranged
    line = " " * _INDENT + f"sites=tuple({tuple_of(templates)} for i in {numbers}),"
    return line if len(line) <= WIDTH else field_text("sites", sites)


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
