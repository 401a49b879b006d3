"""plan.json: a plan as text, the same bytes on every machine, and back.

Ten thousand sites share few decisions and few histories. The file has each of them once, in a table, and sites refer to
them by index; reading restores the sharing. Each row of a table is one line, so that a diff of a plan shows the sites
that changed. What a field has by default is left out.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import fields, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import NonNegativeInt, TypeAdapter
from pydantic.dataclasses import dataclass

from loka.devices.targets import DEVICES
from loka.errors import Code, InputError
from loka.graph.sites.site import Site
from loka.paths import open_plain
from loka.plan.json_file import JsonFormat, dump
from loka.plan.plan import MODEL, GemmPlan, Plan, PlanHead, SitePlan, SiteTiming
from loka.policy.settings import Assignment

VERSION: Literal[16] = 16
_MANIFEST, _PACKAGE_FORMAT = "manifest.json", "loka.package"
_BUDGET = ("budget.mere", "budget.sqnr_db", "budget.min_speedup")

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True, config=MODEL)
class _SiteRow:
    """A site with the indices of its rows in the tables."""

    site: Site
    gemms: tuple[NonNegativeInt, ...]
    history: NonNegativeInt
    region: tuple[str, ...] = ()
    region_note: str = ""
    timing: NonNegativeInt | None = None
    gains_by_fusing: bool = False


@dataclass(frozen=True, slots=True, config=MODEL, kw_only=True)
class _PlanFile(PlanHead):
    """The layout of plan.json."""

    format: Literal["loka.plan"]
    version: Literal[16]
    histories: tuple[dict[str, tuple[Assignment, ...]], ...]
    decisions: tuple[GemmPlan, ...]
    timings: tuple[SiteTiming, ...] = ()
    sites: tuple[_SiteRow, ...]


class _Table(Generic[Row]):
    """Table of unique rows. Known objects are found by identity, which avoids hashing deep values again."""

    def __init__(self, key: Callable[[Row], Hashable]) -> None:
        self.rows: list[Row] = []
        self._key = key
        self._by_value: dict[Hashable, int] = {}
        self._by_identity: dict[int, int] = {}  # the plan keeps the objects alive

    def number(self, row: Row) -> int:
        """Index of a row, which is added if it is new."""
        number = self._by_identity.get(id(row))
        if number is None:
            number = self._by_identity[id(row)] = self._by_value.setdefault(self._key(row), len(self.rows))
            if number == len(self.rows):
                self.rows.append(row)
        return number


@cache
def _format() -> JsonFormat[_PlanFile]:
    foreign = "not a plan of LoKA; name a plan.json of `loka generate`, or a policy (.yaml)"
    again = "make it again with `loka generate POLICY`"
    return JsonFormat("loka.plan", VERSION, TypeAdapter(_PlanFile), "plan", foreign, again)


def to_json(plan: Plan) -> str:
    """The text of plan.json: keys sorted, one row per line, a newline at the end."""
    histories: _Table[dict[str, tuple[Assignment, ...]]] = _Table(lambda history: tuple(sorted(history.items())))
    decisions: _Table[GemmPlan] = _Table(lambda decision: decision)
    timings: _Table[SiteTiming] = _Table(lambda timing: timing)
    sites = tuple(
        _SiteRow(
            site.site,
            tuple(map(decisions.number, site.gemms)),
            histories.number(site.history),
            site.region,
            site.region_note,
            timings.number(site.timing) if site.timing is not None else None,
            site.gains_by_fusing,
        )
        for site in plan.sites
    )
    file = _PlanFile(
        **_head(plan),
        format="loka.plan",
        version=VERSION,
        histories=tuple(histories.rows),
        decisions=tuple(decisions.rows),
        timings=tuple(timings.rows),
        sites=sites,
    )
    data = _format().adapter.dump_python(file, mode="json", exclude_defaults=True)
    return "{\n" + ",\n".join(f" {dump(key)}: {_table(data[key])}" for key in sorted(data)) + "\n}\n"


def plan_sha256(plan: Plan) -> str:
    """Names a plan by what it decides: sha256 of its text without the mods' gains, which not every verb looks up."""
    bare = replace(plan, mods=tuple(replace(mod, gain=None) for mod in plan.mods))
    return hashlib.sha256(to_json(bare).encode()).hexdigest()


def from_json(text: str, name: str = "plan.json") -> Plan:
    """Reads a plan from the text of `to_json`. `name` is the file's, for messages.

    Raises InputError for text that is truncated, is no plan, or was written by another LoKA.
    """
    file = _format().parse(text, name)
    wrong = _nonsense(file)
    if wrong:
        raise _format().damaged(name, wrong)
    alike: dict[tuple[int, ...], tuple[GemmPlan, ...]] = {}
    try:
        return Plan(**_head(file), sites=tuple(_site(file, row, alike) for row in file.sites))
    except IndexError as error:
        raise _format().damaged(name, "a site names a row that the file lacks") from error


def read_plan_file(name: str) -> Plan:
    """The plan in a file. Raises InputError, also if a file in a generated package has changed since."""
    path = Path(name)
    recorded = _recorded_hash(path)
    try:
        if recorded is not None and hashlib.sha256(path.read_bytes()).hexdigest() != recorded:
            raise InputError(
                f"{name}: changed since it was generated with its package (edited, or damaged): run loka generate "
                "again",
                Code.PLAN_FILE,
            )
        return from_json(_format().text_of(path), name)
    except FileNotFoundError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror}); check the path", Code.PLAN_FILE) from error


def _recorded_hash(path: Path) -> object:
    """The hash of a file in the manifest beside it; None without a manifest of a package, or if it has none."""
    try:
        with open_plain(path.with_name(_MANIFEST)) as file:
            manifest = json.loads(file.read().decode())
        return manifest["outputs"].get(path.name) if manifest["format"] == _PACKAGE_FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _nonsense(file: _PlanFile) -> str:
    """Why well-formed data is no plan; "" if it is one."""
    if file.target not in DEVICES:
        return f"at target: there is no {file.target!r}"
    for each in (row.site for row in file.sites):
        if min(each.k, each.n, each.calls, each.rows.at(file.batch_size)) < 0 or not 0 <= each.share <= 1:
            return f"a size or the share of site {each.name!r} cannot be"
    for opaque in file.opaque:
        if min(opaque.calls, opaque.share, opaque.share_eval) < 0 or max(opaque.share, opaque.share_eval) > 1:
            return f"the number or the share of {opaque.what!r} cannot be"
    (site, count), *_ = Counter(row.site.name for row in file.sites).most_common(1) or [("", 0)]
    if count > 1:
        return f"site {site!r} is there {count} times"
    for value in (each.value for history in file.histories for path in _BUDGET for each in history.get(path, ())):
        if not _is_number(value):
            return f"a budget is {value!r}"
    return ""


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _head(plan: PlanHead) -> dict[str, Any]:
    """What a plan and its file have in common."""
    return {each.name: getattr(plan, each.name) for each in fields(PlanHead)}


def _site(file: _PlanFile, row: _SiteRow, alike: dict[tuple[int, ...], tuple[GemmPlan, ...]]) -> SitePlan:
    """The site of a row; those with the same decisions share the tuple of these, too."""
    return SitePlan(
        row.site,
        alike.setdefault(row.gemms, tuple(file.decisions[number] for number in row.gemms)),
        file.histories[row.history],
        row.region,
        row.region_note,
        file.timings[row.timing] if row.timing is not None else None,
        row.gains_by_fusing,
    )


def _table(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return "[\n" + ",\n".join(f"  {dump(row)}" for row in value) + "\n ]"
    return dump(value)
