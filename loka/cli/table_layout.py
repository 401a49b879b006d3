"""Layout of a table in a terminal: cells wrapped between words, or, where that is too narrow, one paragraph a row."""

from __future__ import annotations

from collections.abc import Sequence

SPACES, TIGHT = 3, 2  # columns of a terminal between two of a table
COMFORT = 20  # a cell of text is wrapped to no less
_FIELDS = "   "  # between the fields of a paragraph
_INDENT = "    "


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str], tight: bool, room: int
) -> list[str]:
    """Lines of a table, or of one paragraph a row where `room` is too narrow for it; `numbers` are right-aligned."""
    widths = _fitted_widths(columns, rows, numbers, TIGHT if tight else SPACES, room)
    if widths is None:
        return [line for row in rows for line in _paragraph(columns, row, room)]
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold", collapse_padding=tight)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(width=sum(widths) + SPACES * len(widths), highlight=False, markup=False, emoji=False)
    with console.capture() as capture:
        console.print(table)
    # Strip padding to the full width and the box's empty edges, which would end up in files.
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).strip("\n").split("\n")


def _fitted_widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str], spaces: int, room: int
) -> list[int] | None:
    """Widths of columns so that a table fits into `room` without a broken word; None if it cannot.

    Numbers and the first column, which has the names, keep one line unless the names alone take half the room.
    """
    room -= spaces * (len(columns) - 1)
    longest = [max((_width(row[place]) for row in rows), default=0) for place in range(len(columns))]
    wide = [max(_width(column), text) for column, text in zip(columns, longest, strict=True)]
    if sum(wide) <= room:
        return wide
    least = []
    for place, column in enumerate(columns):
        text = longest[place]
        if column not in numbers and (place > 0 or text > room // 2):
            text = max([min(text, COMFORT), *(_longest_word(row[place]) for row in rows)])
        least.append(max(_longest_word(column), text))
    if sum(least) > room:
        return None
    while sum(wide) > room:
        widest = max((place for place in range(len(wide)) if wide[place] > least[place]), key=wide.__getitem__)
        wide[widest] -= 1
    return wide


def _paragraph(columns: Sequence[str], row: Sequence[str], room: int) -> list[str]:
    """Lines of `column: cell` for the cells of a row that are not empty, as many in a line as fit into `room`."""
    lines: list[str] = []
    for column, cell in zip(columns, row, strict=True):
        if not cell:
            continue
        field = f"{column}: {cell}" if column else cell
        if lines and _width(lines[-1]) + len(_FIELDS) + _width(field) <= room:
            lines[-1] += _FIELDS + field
        else:
            lines += wrapped(_INDENT + field if lines else field, room)
    return lines


def wrapped(line: str, room: int) -> list[str]:
    """A line broken between words, what follows indented by four more. Spaces within a line that fits stay."""
    if _width(line) <= room:
        return [line]
    indent = " " * (len(line) - len(line.lstrip(" ")))
    first, *words = line.split()
    lines, follows = [indent + first], indent + _INDENT
    for word in words:
        if _width(lines[-1]) + 1 + _width(word) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(follows + word)
    return lines


def _longest_word(text: str) -> int:
    return max(map(_width, text.split()), default=0)


def _width(text: str) -> int:
    """Columns of a terminal that a text takes."""
    from rich.cells import cell_len

    return cell_len(text)
