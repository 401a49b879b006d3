"""Table of `loka plan`: full cells for files and wide terminals, short ones with a legend for narrow terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from loka.cli.output import percent, print_line, print_table, terminal_width
from loka.cli.table_layout import SPACES, TIGHT

if TYPE_CHECKING:
    from loka.plan.report.plan_rows import InteractionRow, PlanRow

COUNT, REGION = "count", "region"
TIMES = ("us", "BF16 us", "gain")  # of a training step, planned and native
EVIDENCE = ("MERE", "SQNR dB", "steps")  # the worst of a line's sites; steps: sampled of all
COLUMNS = (
    *("site", COUNT, "kind", "M", "K", "N", "FLOPs", "fprop", "dgrad", "wgrad", REGION),
    *TIMES,
    *EVIDENCE,
    "reason",
)
NUMBERS = (COUNT, "M", "K", "N", "FLOPs", *TIMES)
_SHORT = ("site", COUNT, "M", "K", "N", "FLOPs", "fprop", "dgrad", "wgrad", *TIMES, "MERE", "why")
# In a terminal that is too narrow for these as well, columns go in this order, until names fit.
_GOING = ("BF16 us", "M", "MERE", "us", "K", "N", COUNT, "FLOPs")
_REASON = 40  # least width for a reason in the full table
_KEPT = len("as-is")  # a recipe of up to this length needs no letter


def show_rows(rows: Sequence[PlanRow], hidden: frozenset[str]) -> None:
    """Print the rows of a plan without the columns in `hidden`."""
    cells = [_cells(row) for row in rows]
    columns = [column for column in COLUMNS if column not in hidden]
    widths = [max(len(column), *(len(each[column]) for each in cells), 0) for column in columns[:-1]]
    room = terminal_width()
    if room is not None and sum(widths) + SPACES * len(widths) + _REASON > room:
        _show_short(cells, hidden)
    else:
        print_table(columns, [[each[column] for column in columns] for each in cells], NUMBERS)


def show_interactions(rows: Sequence[InteractionRow]) -> None:
    """Print the interactions that have their own kernels, if there are any."""
    if not rows:
        return
    columns = ("interaction", "in", "count", "samples", "us", "compiled us", "gain", "time")
    cells = [
        (row.what, row.owner, str(row.count), str(row.samples), row.us, row.as_is_us, row.speedup, row.source)
        for row in rows
    ]
    print()
    print_table(columns, cells, ("count", "samples", "us", "compiled us", "gain"))


def _cells(row: PlanRow) -> dict[str, str]:
    cells = (
        *(row.pattern, str(row.count), row.kind, row.rows, str(row.k), str(row.n), percent(row.share)),
        *(*row.runs_in, " ".join(row.region), row.us, row.as_is_us, row.speedup),
        *(row.mere, row.sqnr_db, row.steps, row.reason),
    )
    return dict(zip(COLUMNS, cells, strict=True))


def _show_short(rows: Sequence[dict[str, str]], hidden: frozenset[str]) -> None:
    """Print recipes as letters and reasons as numbers, with a legend below."""
    words = [each[gemm] for each in rows for gemm in ("fprop", "dgrad", "wgrad")]
    letters = {text: _letter(place) for text, place in _numbered(text for text in words if len(text) > _KEPT).items()}
    reasons = _numbered(each["reason"] for each in rows)
    columns = [column for column in _SHORT if column not in hidden]
    table = []
    for each in rows:
        short = each | {gemm: letters.get(each[gemm], each[gemm]) for gemm in ("fprop", "dgrad", "wgrad")}
        short |= {"MERE": _without_interval(each["MERE"]), "why": str(reasons[each["reason"]])}
        table.append([short[column] for column in columns])
    left_out = _too_wide(columns, table, terminal_width())
    shown = [place for place, column in enumerate(columns) if column not in left_out]
    table = [[row[place] for place in shown] for row in table]
    print_table([columns[place] for place in shown], table, (*NUMBERS, "why"), tight=True)
    if left_out:
        print_line(f"left out here, and shown by a wider terminal or in a file: {', '.join(left_out)}")
    for text, letter in letters.items():
        print_line(f"{letter}: {text}")
    for reason, number in reasons.items():
        print_line(f"{number}: {reason}")


def _too_wide(columns: Sequence[str], table: Sequence[Sequence[str]], room: int | None) -> tuple[str, ...]:
    """The columns to leave out so that no cell has to be broken, in the order of the table."""
    widths = {
        column: max([len(column), *(len(row[place]) for row in table)]) + TIGHT for place, column in enumerate(columns)
    }
    gone: set[str] = set()
    for column in _GOING:
        if room is None or sum(widths.values()) - TIGHT <= room:
            break
        if widths.pop(column, None) is not None:
            gone.add(column)
    return tuple(column for column in columns if column in gone)


def _numbered(texts: Iterable[str]) -> dict[str, int]:
    """Distinct text -> running number from 1."""
    return {text: number for number, text in enumerate(dict.fromkeys(texts), start=1)}


def _letter(number: int) -> str:
    """a, b, ..., z, a2, b2, ..."""
    again, place = divmod(number - 1, 26)
    return chr(ord("a") + place) + (str(again + 1) if again else "")


def _without_interval(mere: str) -> str:
    """ "0.26 [0.25, 0.27] dgrad" -> "0.26 dgrad"."""
    start, _, rest = mere.partition(" [")
    return f"{start} {rest.partition('] ')[2]}" if rest else mere
