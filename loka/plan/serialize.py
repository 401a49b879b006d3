"""plan.json: a plan as text, the same bytes on every machine, and back.

Ten thousand sites share few decisions and few histories. The file has each of them once, in a table, and sites refer to
them by index; reading restores the sharing. Each row of a table is one line, so that a diff of a plan shows the sites
that changed.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import isfinite
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from loka.devices.targets import TargetDevice
from loka.errors import InputError
from loka.plan.empty_fields import without_empty
from loka.plan.json_values import each_key_once, is_number, read_infinities
from loka.plan.older_plans import FIRST_WITH_TODAYS_MIXES, FIRST_WITH_TODAYS_NAMES, upgraded
from loka.plan.plan import (
    Candidate,
    GemmPlan,
    InteractionPlan,
    ModPlan,
    Plan,
    PlannedBinding,
    SitePlan,
    SiteTiming,
    Skipped,
    TunedStep,
)
from loka.policy.policy import ExecutionSpec
from loka.policy.settings import Assignment
from loka.sites.site import GemmKind, Site

FORMAT = "loka.plan"
# 2: measurements, and kernels by rows; 3: mods; 4: interactions; 5: current names (`older_plans`); 6: execution; 7:
# changes of NE; 8: FM interactions in any spelling; 9: guards, and convolutions as sites; 10: measured steps. A
# plan is written in the first version that can represent it.
VERSION = 10
_BUDGET = ("budget.mere", "budget.sqnr_db", "budget.min_speedup")

Row = TypeVar("Row", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _SiteRow:
    """A site with indices of its decisions and history in the tables."""

    site: Site
    gemms: tuple[int, ...]
    history: int
    region: tuple[str, ...] = ()
    region_note: str = ""
    timing: int | None = None
    gains_by_fusing: bool = False


@dataclass(frozen=True, slots=True)
class _TimingRow:
    """Times shared by sites that are alike."""

    timing: SiteTiming
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True)
class _PlanFile:
    """The layout of plan.json."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # of all rows too

    format: Literal["loka.plan"]
    version: Literal[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    name: str
    target: TargetDevice
    batch_size: int
    loka_version: str
    policy_files: tuple[tuple[str, str], ...]
    assignments: tuple[Assignment, ...]
    histories: tuple[dict[str, tuple[int, ...]], ...]
    decisions: tuple[GemmPlan, ...]
    sites: tuple[_SiteRow, ...]
    bindings: tuple[PlannedBinding, ...]
    skipped: tuple[Skipped, ...]
    rule_notes: tuple[tuple[str, str], ...]
    profile: tuple[str, str] | None = None
    measurements: tuple[str, str] | None = None
    timings: tuple[_TimingRow, ...] = ()
    mods: tuple[ModPlan, ...] = ()
    interactions: tuple[InteractionPlan, ...] = ()
    execution: ExecutionSpec | None = None
    ne_budget: float | None = None
    tuned: TunedStep | None = None


class _Table(Generic[Row]):
    """Table of unique rows. Known objects are found by identity, which avoids hashing deep values again."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._by_value: dict[Row, int] = {}
        self._by_identity: dict[int, tuple[Row, int]] = {}

    def number(self, row: Row) -> int:
        """Index of a row, which is added if it is new."""
        seen = self._by_identity.get(id(row))
        if seen is not None:
            return seen[1]
        number = self._by_value.setdefault(row, len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        self._by_identity[id(row)] = (row, number)  # keeps the row alive, so that its identity stays unique
        return number


class _Timings:
    """The table of times; sites that are alike share objects."""

    def __init__(self) -> None:
        self.table: _Table[_TimingRow] = _Table()
        self._rows: dict[tuple[int, int], _TimingRow] = {}

    def number(self, site: SitePlan) -> int | None:
        """Index of a site's row; None where it has no times."""
        if site.timing is None:
            return None
        key = (id(site.timing), id(site.candidates))  # kept alive by the plan
        if key not in self._rows:
            self._rows[key] = _TimingRow(site.timing, site.candidates)
        return self.table.number(self._rows[key])


@cache
def _adapter() -> TypeAdapter[_PlanFile]:
    return TypeAdapter(_PlanFile)


def to_json(plan: Plan) -> str:
    """The text of plan.json: keys sorted, one row per line, a newline at the end."""
    data: dict[str, Any] = _adapter().dump_python(_to_file(plan), mode="json")
    without_empty(data)
    return "{\n" + ",\n".join(f" {_dump(key)}: {_value(data[key])}" for key in sorted(data)) + "\n}\n"


def plan_sha256(plan: Plan) -> str:
    """Names a plan by what it decides: sha256 of its text without the mods' gains, which not every verb looks up."""
    bare = replace(plan, mods=tuple(replace(mod, gain=None) for mod in plan.mods))
    return hashlib.sha256(to_json(bare).encode()).hexdigest()


def from_json(text: str, name: str = "plan.json") -> Plan:
    """Reads a plan from the text of `to_json`. `name` is the file's, for messages.

    Raises InputError for text that is truncated, is no plan, or was written by a newer LoKA.
    """
    try:
        data = json.loads(text, object_pairs_hook=each_key_once)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{name}:{error.lineno}:{error.colno}: not a whole JSON file ({error.msg}); it may have been cut short: "
            "make it again with `loka generate`"
        ) from error
    except ValueError as error:  # a key twice, or a number with more digits than Python reads
        raise InputError(f"{name}: damaged: {error}; make the plan again with `loka generate`") from error
    except RecursionError as error:
        raise InputError(f"{name}: nested too deeply to be a plan; name a plan.json of `loka generate`") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f"{name}: not a plan of LoKA; name a plan.json of `loka generate`, or a policy (.yaml)")
    version = data.get("version")
    if type(version) is not int or version > VERSION:
        raise InputError(
            f"{name}: the plan has version {version!r} and this LoKA reads up to {VERSION}: upgrade LoKA, or make the "
            "plan again with `loka generate`"
        )
    try:
        infinite = read_infinities(data)
        mixes = version < FIRST_WITH_TODAYS_MIXES and '"mixes"' in text
        if version < FIRST_WITH_TODAYS_NAMES or mixes or '"by_rows"' in text or infinite:
            text = json.dumps(upgraded(data))
        file = _adapter().validate_json(text, strict=True)
        _refuse_nonsense(file, name)
        return _from_file(file)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        what = "is no field of a plan" if first["type"] == "unexpected_keyword_argument" else first["msg"]
        raise InputError(f"{name}: damaged at {place}: {what}; make the plan again with `loka generate`") from error
    except IndexError as error:
        raise InputError(
            f"{name}: damaged: a site names a row that the file lacks; make the plan again with `loka generate`"
        ) from error


def _refuse_nonsense(file: _PlanFile, name: str) -> None:
    """Raises InputError for well-formed data that is no valid plan, for example after a manual edit."""
    wrong = ""
    if file.batch_size < 1:
        wrong = f"batch_size is {file.batch_size}, and has to be 1 or more"
    if not file.sites and (file.decisions or file.histories):
        wrong = "it has no sites, but decisions for them"
    for each in (row.site for row in file.sites):
        if min(each.k, each.n, each.calls, each.rows.at(file.batch_size)) < 0 or not 0 <= each.share <= 1:
            wrong = f"a size or the share of site {reprlib.repr(each.name)} cannot be"
    counts = Counter(row.site.name for row in file.sites)
    for site, count in counts.items():
        if count > 1:
            wrong = f"site {site!r} is there {count} times"
    times = [each.time for row in file.timings for each in row.candidates]
    times += [time for row in file.timings for time in (row.timing.chosen, row.timing.as_is)]
    times += [time for each in file.interactions for time in (each.chosen, each.as_is) if time is not None]
    hosts = [time.host_us for time in times if time.host_us is not None]
    if file.execution is not None:
        hosts += [file.execution.host_ms, file.execution.gpu_ms]
    if not all(isfinite(each) and each >= 0 for each in hosts):
        wrong = "a time of the host is negative or not finite"
    if not all(isfinite(time.us) and min(time.forward, time.backward) >= 0 and time.us > 0 for time in times):
        wrong = "a time is zero, negative or not finite"
    figures = [row.site.share for row in file.sites] + [each.share for each in file.skipped]
    figures += [each for mod in file.mods if mod.gain is not None for each in (mod.gain.us, mod.gain.share)]
    for time in (time for decision in file.decisions for time in decision.times):
        figures += [time.us, time.spread, *(each for each in (time.mere, time.sqnr_db) if each is not None)]
    figures += [each.amax for decision in file.decisions for each in decision.operands or () if each.amax is not None]
    errors = [error for row in file.timings for each in row.candidates for error in (each.mere, each.sqnr_db)]
    figures += [error for error in errors if error is not None]
    numbers = {number for each in file.histories for path in _BUDGET for number in each.get(path, ())}
    for number in numbers & set(range(len(file.assignments))):
        if not is_number(file.assignments[number].value):
            wrong = f"a budget is {file.assignments[number].value!r}"
    figures += [file.ne_budget] if file.ne_budget is not None else []
    if file.tuned is not None:
        steps = (file.tuned.step_ms, file.tuned.bf16_ms, *filter(None, (file.tuned.best_fp8_ms,)))
        if not all(isfinite(step) and step > 0 for step in steps):
            wrong = "a measured step is zero, negative or not finite"
    if not all(map(isfinite, figures)):
        wrong = "a number is not finite"
    if wrong:
        raise InputError(f"{name}: damaged: {wrong}; make the plan again with `loka generate`")


def _to_file(plan: Plan) -> _PlanFile:
    assignments: _Table[Assignment] = _Table()
    decisions: _Table[GemmPlan] = _Table()
    histories: _Table[tuple[tuple[str, tuple[int, ...]], ...]] = _Table()
    timings = _Timings()
    numbers: dict[int, int] = {}  # of histories, by identity: `plan` keeps them alive
    rows = []
    for site in plan.sites:
        history = numbers.get(id(site.history))
        if history is None:
            entries = sorted(site.history.items())
            history = histories.number(tuple((path, tuple(map(assignments.number, field))) for path, field in entries))
            numbers[id(site.history)] = history
        gemms = tuple(map(decisions.number, site.gemms))
        around = (site.region, site.region_note, timings.number(site), site.gains_by_fusing)
        rows.append(_SiteRow(site.site, gemms, history, *around))
    return _PlanFile(
        format="loka.plan",
        version=_version(plan, decisions.rows),
        name=plan.name,
        target=plan.target,
        batch_size=plan.batch_size,
        loka_version=plan.loka_version,
        policy_files=plan.policy_files,
        assignments=tuple(assignments.rows),
        histories=tuple(dict(entries) for entries in histories.rows),
        decisions=tuple(decisions.rows),
        sites=tuple(rows),
        bindings=plan.bindings,
        skipped=plan.skipped,
        rule_notes=plan.rule_notes,
        profile=plan.profile,
        measurements=plan.measurements,
        timings=tuple(timings.table.rows),
        mods=plan.mods,
        interactions=plan.interactions,
        execution=plan.execution,
        ne_budget=plan.ne_budget,
        tuned=plan.tuned,
    )


def _version(plan: Plan, decisions: Sequence[GemmPlan]) -> Literal[1, 2, 3, 5, 6, 7, 8, 9, 10]:
    if plan.tuned is not None:
        return 10
    forwards = [each.forward for each in plan.bindings if each.forward is not None]
    if any(site.site.kind is GemmKind.CONVOLUTION for site in plan.sites):
        return 9
    if any(each.guards or any(step.op == "checked_branch" for step in each.statements) for each in forwards):
        return 9
    if any(each.mixes for each in forwards):
        return 8
    if plan.ne_budget is not None or any(each.evidence and each.evidence.ne_percent for each in decisions):
        return 7
    if plan.execution is not None:
        return 6
    if plan.interactions or any(site.recipe.transposed_operands for site in plan.sites):
        return 5
    if plan.mods:
        return 3
    return 2 if plan.measurements or any(decision.m_buckets for decision in decisions) else 1


def _from_file(file: _PlanFile) -> Plan:
    histories = [
        {path: tuple(_row(file.assignments, number) for number in field) for path, field in history.items()}
        for history in file.histories
    ]
    return Plan(
        name=file.name,
        target=file.target,
        batch_size=file.batch_size,
        policy_files=file.policy_files,
        sites=tuple(_site(file, row, _row(histories, row.history)) for row in file.sites),
        bindings=file.bindings,
        skipped=file.skipped,
        loka_version=file.loka_version,
        rule_notes=file.rule_notes,
        profile=file.profile,
        measurements=file.measurements,
        mods=file.mods,
        interactions=file.interactions,
        execution=file.execution,
        ne_budget=file.ne_budget,
        tuned=file.tuned,
    )


def _site(file: _PlanFile, row: _SiteRow, history: dict[str, tuple[Assignment, ...]]) -> SitePlan:
    timed = _row(file.timings, row.timing) if row.timing is not None else None
    return SitePlan(
        site=row.site,
        gemms=tuple(_row(file.decisions, number) for number in row.gemms),
        history=history,
        region=row.region,
        region_note=row.region_note,
        timing=timed.timing if timed is not None else None,
        candidates=timed.candidates if timed is not None else (),
        gains_by_fusing=row.gains_by_fusing,
    )


_Item = TypeVar("_Item")


def _row(table: tuple[_Item, ...] | list[_Item], number: int) -> _Item:
    """A row by its index; unlike plain indexing, rejects negative indices."""
    if number < 0:
        raise IndexError(number)
    return table[number]


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[\n" + ",\n".join(_lines(value)) + "\n ]"
    return _dump(value)


def _lines(rows: Iterable[Any]) -> Iterable[str]:
    return (f"  {_dump(row)}" for row in rows)


def _dump(value: Any) -> str:
    # Python writes a float as the shortest text that reads back the same, on every machine.
    return json.dumps(value, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(", ", ": "))
