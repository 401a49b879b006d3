"""A plan in a terminal: its table, full or with a legend where the terminal is narrow, and what stands below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from loka.cli.output import note, print_line, print_table, terminal_width
from loka.cli.table_layout import SPACES, TIGHT
from loka.devices.targets import DEVICES
from loka.plan.format import describe_tuned, format_figure, format_ne, format_share, format_speedup
from loka.plan.mod_words import describe_mod, describe_unchanged
from loka.plan.ne import planned_ne
from loka.plan.plan import Plan
from loka.plan.totals import format_host, format_summed, format_time_sources, format_total, total_time
from loka.plan.view.coverage import coverage_of
from loka.plan.view.table import (
    EVIDENCE,
    INTERACTIONS,
    RECIPES,
    SIZES,
    TIMES,
    WITHOUT_FP8,
    PlanRow,
    budget_lines,
    group_sites,
    interaction_rows,
    slowed_lines,
    uncalled_lines,
)

if TYPE_CHECKING:
    from loka.bench.quality.training import PairResult
    from loka.cli.train_and_compare import ComparisonLabels

MANY = 60  # sites; with more, those that are alike share a line
COLUMNS = (*SIZES[:2], "kind", *SIZES[2:], *RECIPES, "region", *TIMES, *EVIDENCE, "reason")
NUMBERS = (*SIZES[1:], *TIMES)
_SHORT = (*SIZES, *RECIPES, *TIMES, "MERE", "why")
# In a terminal that is too narrow for these as well, columns go in this order, until names fit.
_GOING = ("BF16 us", WITHOUT_FP8, "M", "MERE", "us", "K", "N", "count", "FLOPs")
_REASON = 40  # least width for a reason in the full table
_KEPT = len("as-is")  # a recipe of up to this length needs no letter
_UNCHANGED = 5  # most reasons shown for a mod
_SLOWED = 10  # most lines of sites that FP8 makes slower


def show_plan(plan: Plan, all_sites: bool, notes: Sequence[str] = ()) -> None:
    """Print the table, notes, what could not be patched, mods, budgets, coverage, the summary and times."""
    grouped = len(plan.called) > MANY and not all_sites
    rows = group_sites(plan, grouped)
    show_rows(rows, _hidden(plan, grouped))
    if plan.interactions:
        print()
        print_table(INTERACTIONS, interaction_rows(plan), INTERACTIONS[2:-1])
    _print_lines(uncalled_lines(plan))
    _print_lines(f"note: {each}" for each in notes)
    show_skipped(plan)
    _show_mods(plan)
    if grouped:
        print_line(f"{len(plan.called)} sites in {len(rows)} groups; --all shows each.")
    if plan.profile is not None or plan.measurements is not None:
        _print_lines(budget_lines(plan))
    _show_ne(plan)
    if any(site.site.calls for site in plan.sites):
        _show_coverage(plan)
    print_line(summary_line(plan))
    slowed = slowed_lines(plan)
    _print_lines(slowed[:_SLOWED])
    if len(slowed) > _SLOWED:
        print_line(f"and {len(slowed) - _SLOWED} more that FP8 makes slower: see the column {WITHOUT_FP8}")
    _show_times(plan)
    if plan.tuned is not None:
        print_line(f"{describe_tuned(plan.tuned)} ({plan.tuned.file}: {plan.tuned.choice}).")


def show_rows(rows: Sequence[PlanRow], hidden: frozenset[str]) -> None:
    """Print the rows of a plan without the columns in `hidden`."""
    cells = [row.cells for row in rows]
    columns = [column for column in COLUMNS if column not in hidden]
    widths = [max(len(column), *(len(each[column]) for each in cells), 0) for column in columns[:-1]]
    room = terminal_width()
    if room is not None and sum(widths) + SPACES * len(widths) + _REASON > room:
        _show_short(cells, hidden)
    else:
        print_table(columns, [[each[column] for column in columns] for each in cells], NUMBERS)


def show_skipped(plan: Plan) -> None:
    """Print a line for each module whose forward could not be rewritten."""
    for skipped in plan.skipped:
        name = f"region {skipped.owner!r}" if skipped.owner else "the model itself"
        share = f" ({format_share(skipped.share)} of FLOPs)" if skipped.share else ""
        rest = "" if skipped.share else "; its sites are patched in smaller modules, or one by one"
        print_line(f"NOT PATCHED {name}{share}: {skipped.reason}{rest}")


def summary_line(plan: Plan) -> str:
    """Summary of a plan: the share of the model in FP8."""
    count = sum(site.fp8 for site in plan.sites)
    classes = "class" if len(plan.bindings) == 1 else "classes"
    return (
        f"{plan.name} for {plan.target.value} at batch size {plan.batch_size}: {format_share(plan.share_fp8)} of the "
        f"training GEMM FLOPs in FP8, {count} of {len(plan.called)} sites, {len(plan.bindings)} generated {classes}."
    )


def measurements_note(plan: Plan) -> str:
    """That there are no measurements for the plan's target, with what to do; "" if there are, or none are needed."""
    reference = DEVICES[plan.target].is_reference
    priced = plan.execution is not None and not plan.execution.mode.replays
    if plan.measurements is not None or (reference and not priced):
        return ""
    start = f"execution: {plan.execution.mode.value}: " if plan.execution is not None and priced else ""
    decided = "neither time nor the host decided anything" if start else "time decided nothing"
    advice = "" if reference else "; record them on that device: loka bench kernels --record FILE"
    return f"{start}no measurements for {plan.target.value} ship or are named, so {decided}{advice}"


def show_speed(plan: Plan, device: str, pairs: Sequence[PairResult], labels: ComparisonLabels) -> None:
    """Print the planned time of a step, if measurements decided the plan, and the mean rate of the pairs' training."""
    rows, total = [], total_time(plan)
    if total is not None:
        planned, native = f"planned on {plan.target.value}", format_figure(total.as_is_us)
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
        hidden.add(WITHOUT_FP8)
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
    rest = f"; the forward GEMMs of {len(found.unknown)} more were not measured" if found.unknown else ""
    gemms = "1 GEMM" if found.known == 1 else f"{found.known} GEMMs"
    limit = "" if plan.ne_budget is None else f", budget {plan.ne_budget:g} %"
    print_line(f"predicted change of NE: {format_ne(found.ne_percent)} by {gemms} in FP8{rest}{limit}.")


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


def _show_times(plan: Plan) -> None:
    """Print the total time of sites and interactions and its sources, or that there is none."""
    total = total_time(plan)
    if plan.measurements is None or total is None:
        if plan.measurements is not None:
            print_line(f"{plan.measurements[0]} has no times for what may run here: none decided.")
        lacking = measurements_note(plan)
        if lacking:
            print_line(f"{lacking}.")
        return
    print_line(f"{format_total(total)}, by {plan.measurements[0]} ({format_time_sources(total)}).")
    host = format_host(plan, total)
    if host:
        print_line(f"{host}.")


def _show_short(rows: Sequence[dict[str, str]], hidden: frozenset[str]) -> None:
    """Print recipes as letters and reasons as numbers, with a legend below."""
    words = [each[gemm] for each in rows for gemm in RECIPES]
    letters = {text: _letter(place) for text, place in _numbered(text for text in words if len(text) > _KEPT).items()}
    reasons = _numbered(each["reason"] for each in rows)
    columns = [column for column in _SHORT if column not in hidden]
    table = []
    for each in rows:
        short = each | {gemm: letters.get(each[gemm], each[gemm]) for gemm in RECIPES}
        short |= {"MERE": _without_interval(each["MERE"]), "why": str(reasons[each["reason"]])}
        table.append([short[column] for column in columns])
    left_out = _too_wide(columns, table, terminal_width())
    shown = [place for place, column in enumerate(columns) if column not in left_out]
    table = [[row[place] for place in shown] for row in table]
    print_table([columns[place] for place in shown], table, (*NUMBERS, "why"), tight=True)
    if left_out:
        print_line(f"left out here, and shown by a wider terminal or in a file: {', '.join(left_out)}")
    _print_lines(f"{letter}: {text}" for text, letter in letters.items())
    _print_lines(f"{number}: {reason}" for reason, number in reasons.items())


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
