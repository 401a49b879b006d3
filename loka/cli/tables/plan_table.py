"""A plan in a terminal: the verdict, the times of a step, the table of its sites with a legend, and the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from loka.cli.output import note, print_line, print_table, terminal_width
from loka.cli.table_layout import COMFORT, TIGHT
from loka.plan.communication import GATHERS, communication_lines, gather_rows
from loka.plan.format import format_figure, format_ne, format_share, format_speedup
from loka.plan.mod_words import describe_mod, describe_unchanged
from loka.plan.ne import planned_ne
from loka.plan.plan import NATIVE, Plan
from loka.plan.totals import format_summed, total_time
from loka.plan.view.coverage import coverage_of
from loka.plan.view.table import (
    EVIDENCE,
    INTERACTIONS,
    NOTHING,
    RECIPES,
    SIZES,
    TIMES,
    PlanRow,
    budget_lines,
    group_sites,
    interaction_rows,
    uncalled_lines,
)
from loka.plan.view.verdict import step_sentences, step_table, verdict

if TYPE_CHECKING:
    from loka.bench.quality.training import PairResult
    from loka.cli.train_and_compare import ComparisonLabels
    from loka.plan.prospect import Prospect

COLUMNS = (*SIZES[:2], "kind", *SIZES[2:], "in", "region", *TIMES, *EVIDENCE, "why")
NUMBERS = (*SIZES[1:], *TIMES, "why")
# In a terminal that is too narrow for all, columns go in this order, until names fit.
_GOING = ("steps", "SQNR dB", "kind", "region", "MERE", "M", "FLOPs", "gain", "N", "K", "count", *TIMES[:3])
_UNCHANGED = 5  # most reasons shown for a mod


def show_plan(plan: Plan, all_sites: bool, notes: Sequence[str] = (), prospect: Prospect | None = None) -> None:
    """Print the verdict, a step's times, the sites, notes, what could not be patched, mods, budgets and coverage."""
    print_line(f"{verdict(plan)}.")
    if prospect is not None:
        print_line(f"{prospect.describe(plan.batch_size)}.")
    step = step_table(plan)
    if step is not None:
        print()
        print_table(*step, step[0][1:])
    _print_lines(step_sentences(plan))
    print()
    rows = group_sites(plan, not all_sites)
    show_rows(rows, _hidden(plan, any(row.count > 1 for row in rows)))
    if len(rows) < len(plan.called):
        print_line(f"{len(plan.called)} sites in {len(rows)} rows; --all shows each.")
    if plan.interactions:
        print()
        print_table(INTERACTIONS, interaction_rows(plan), INTERACTIONS[2:-1])
    _print_lines(uncalled_lines(plan))
    _print_lines(f"note: {each}" for each in notes)
    show_skipped(plan)
    _show_mods(plan)
    if plan.profile is not None or plan.measurements is not None:
        _print_lines(budget_lines(plan))
    if plan.gathers:
        print()
        print_table(GATHERS, gather_rows(plan), GATHERS[3:5])
    _print_lines(communication_lines(plan))
    _show_ne(plan)
    if any(site.site.calls for site in plan.sites):
        _show_coverage(plan)


def show_rows(rows: Sequence[PlanRow], hidden: frozenset[str]) -> None:
    """Print the rows of a plan without the columns in `hidden`: recipes as letters and reasons as numbers, said below.

    Where the terminal is too narrow, columns are left out.
    """
    cells = [row.cells for row in rows]
    recipes = [_recipe(each) for each in cells]
    letters = {text: _letter(place) for text, place in _numbered(text for text in recipes if text != NATIVE).items()}
    reasons = _numbered(each["reason"] for each in cells)
    for each, recipe in zip(cells, recipes, strict=True):
        each |= {"in": letters.get(recipe, recipe), "why": str(reasons[each["reason"]])}
    room = terminal_width()
    columns = [column for column in COLUMNS if column not in hidden]
    left_out = _too_wide(columns, cells, room)
    shown = [column for column in columns if column not in left_out]
    print_table(shown, [[each[column] for column in shown] for each in cells], NUMBERS, tight=True)
    if left_out:
        print_line(f"left out here, and shown by a wider terminal or in a file: {', '.join(left_out)}")
    _print_lines(f"{letter}: {text}" for text, letter in letters.items())
    _print_lines(f"{number}: {reason}" for reason, number in reasons.items())


def show_skipped(plan: Plan) -> None:
    """Print a line for each module whose forward could not be rewritten."""
    for skipped in plan.skipped:
        name = f"region {skipped.owner!r}" if skipped.owner else "the model itself"
        share = f" ({format_share(skipped.share)} of FLOPs)" if skipped.share else ""
        rest = "" if skipped.share else "; its sites are patched in smaller modules, or one by one"
        print_line(f"NOT PATCHED {name}{share}: {skipped.reason}{rest}")


def show_speed(plan: Plan, device: str, pairs: Sequence[PairResult], labels: ComparisonLabels) -> None:
    """Print the planned time of a step, if measurements decided the plan, and the mean rate of the pairs' training."""
    rows, total = [], total_time(plan)
    if total is not None:
        planned, native = f"planned on {plan.target}", format_figure(total.as_is_us)
        rows.append((f"{planned}, us of a step", native, format_figure(total.us), format_speedup(total.speedup)))
        if plan.share_fp8 > 0:
            figures = (native, format_figure(total.without_fp8_us), format_speedup(total.by_fusing))
            rows.append((f"{planned}, without FP8", *figures))
    as_is = fmean(pair.as_is.samples_per_second for pair in pairs)
    fp8 = fmean(pair.patched.samples_per_second for pair in pairs)
    emulated = device == "cpu" and any(site.fp8 for site in plan.sites)
    how = "not compiled" if device != "cpu" else "FP8 emulated" if emulated else ""
    where = ", ".join(filter(None, (f"{device} here", how)))
    rows.append((f"{where}, samples/s", f"{as_is:.0f}", f"{fp8:.0f}", format_speedup(fp8 / as_is)))
    columns = ("speed of training", labels.first, labels.second, "speedup")
    print_table(columns, rows, numbers=columns[1:])
    if total is not None:
        print_line(
            f"Planned: {format_summed(total)}, at batch size {plan.batch_size}, by measurements on that GPU; as it is "
            "under torch.compile in BF16."
        )
    if emulated:
        note("note: this machine has no FP8 GPU: its samples/s of FP8 are those of the emulation in torch")
    elif device != "cpu":
        note(
            "note: these runs are for quality: eager, and at the batch size of training, where Python's launches are "
            "what takes the time, the more the kernels; loka bench model measures compiled steps"
        )


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print_line(line)


def _hidden(plan: Plan, grouped: bool) -> frozenset[str]:
    """The columns that would be empty."""
    hidden = set() if grouped else {"count"}
    if not any(site.fp8 for site in plan.sites):
        hidden.add("FP8")
    if not any(site.region for site in plan.sites):
        hidden.add("region")
    if plan.profile is None:
        hidden.update(EVIDENCE)
    if all(site.timing is None for site in plan.sites):
        hidden.update(TIMES)
    return frozenset(hidden)


def _show_mods(plan: Plan) -> None:
    """Print a line for each mod, and one for each reason why something was left unchanged."""
    if plan.mods:
        print_line("Mods:")
    for mod in plan.mods:
        print_line(f"  {describe_mod(plan, mod)}")
        left = describe_unchanged(mod.unchanged)
        _print_lines(f"    left {line}" for line in left[:_UNCHANGED])
        rest = len(left) - _UNCHANGED
        if rest > 0:
            print_line(f"    and {rest} more reason{'s' if rest > 1 else ''}; --json has all of them")


def _show_ne(plan: Plan) -> None:
    """Print the predicted change of NE, if the profile has any."""
    found = planned_ne(plan.sites)
    if found is None:
        return
    gemms = "1 GEMM" if found.known == 1 else f"{found.known} GEMMs"
    limit = "" if plan.ne_budget is None else f", budget {plan.ne_budget:g} %"
    print_line(f"predicted change of NE: {format_ne(found.ne_percent)} by {gemms} in FP8{limit}{found.note}.")


def _show_coverage(plan: Plan) -> None:
    """Print the shares as a table of at most 80 columns, what the time contains, and the largest native pieces."""
    coverage = coverage_of(plan)
    print()
    columns = ("coverage", "share", "us")[: len(coverage.rows[0])]
    print_table(columns, coverage.rows, columns[1:])
    print_line(coverage.step_words)
    if coverage.largest:
        print_line("The largest pieces that stay the compiler's:")
    _print_lines(f"  {piece.words}" for piece in coverage.largest)


def _recipe(cells: Mapping[str, str]) -> str:
    """What the GEMMs of a row run in: `e4m3 rowwise`, or each with its GEMM where they differ; NATIVE without FP8."""
    found = {gemm: cells[gemm] for gemm in RECIPES if cells[gemm] != NOTHING}
    texts = set(found.values())
    return texts.pop() if len(texts) == 1 else "; ".join(f"{gemm} {text}" for gemm, text in found.items())


def _too_wide(columns: Sequence[str], rows: Sequence[Mapping[str, str]], room: int | None) -> tuple[str, ...]:
    """The columns to leave out so that no cell has to be broken, in the order of the table."""
    widths = {column: max([len(column), *(len(row[column]) for row in rows)]) + TIGHT for column in columns}
    if room is not None and widths["site"] > room // 2:  # of several names, between which its cells are wrapped
        widths["site"] = max(COMFORT, *(len(word) for row in rows for word in row["site"].split())) + TIGHT
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
