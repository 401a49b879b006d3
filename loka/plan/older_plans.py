"""Upgrades plan.json of earlier versions: old names and forms of fields to current ones."""

from __future__ import annotations

import re
from typing import Any

FIRST_WITH_TODAYS_NAMES = 5
FIRST_WITH_TODAYS_MIXES = 8
_TABLES = ("decisions", "bindings")  # with keys that are only names of fields
_KEYS = {"turned": "transposed", "by_rows": "m_buckets"}  # the latter in files of every version
_PATHS = {"turned": "requantize_transpose"}  # last part of a policy path


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a plan.json of any version with current names; data that is no plan is unchanged."""
    found = dict(data)
    for name in _TABLES:
        if name in found:
            found[name] = _renamed(found[name])
    if isinstance(found.get("bindings"), list):
        found["bindings"] = [_binding(each) for each in found["bindings"]]
    if isinstance(found.get("assignments"), list):
        found["assignments"] = [_assignment(each) for each in found["assignments"]]
    if isinstance(found.get("histories"), list):
        found["histories"] = [_history(each) for each in found["histories"]]
    return found


def _renamed(value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if isinstance(value, dict):
        return {_KEYS.get(key, key): _renamed(item) for key, item in value.items()}
    return value


def _binding(row: Any) -> Any:
    """FM interactions of before version 8 named their statements `transpose` and `inner`, and had no expressions."""
    forward = row.get("forward") if isinstance(row, dict) else None
    if not isinstance(forward, dict):
        return row
    mixes = forward.get("mixes")
    if not isinstance(mixes, list) or not any(isinstance(mix, dict) and "inner" in mix for mix in mixes):
        return row
    try:
        upgraded_mixes = [_mix(mix, forward["statements"]) if "inner" in mix else mix for mix in mixes]
    except (KeyError, IndexError, TypeError):  # a damaged plan, which is refused where it is read
        return row
    return {**row, "forward": {**forward, "mixes": upgraded_mixes}}


def _mix(mix: Any, statements: Any) -> Any:
    transpose, inner, compress = mix["transpose"], mix["inner"], mix.get("compress")
    kept = {key: value for key, value in mix.items() if key not in ("transpose", "inner")}
    return {
        **kept,
        "skipped": [transpose, inner],
        "gemms": [inner] if compress is None else [inner, compress],
        "rank": statements[inner]["operands"][1]["text"],
        "weights": None if compress is None else statements[compress]["operands"][0]["text"],
        "views": ["{0}"] if compress is None else ["{0}", "{0}"],
    }


def _assignment(row: Any) -> Any:
    if not isinstance(row, dict) or not isinstance(row.get("path"), str) or not isinstance(row.get("source"), str):
        return row
    return {**row, "path": _path(row["path"]), "source": re.sub("^turned from ", "transposed from ", row["source"])}


def _history(row: Any) -> Any:
    return {_path(path): numbers for path, numbers in row.items()} if isinstance(row, dict) else row


def _path(path: str) -> str:
    before, _, last = path.rpartition(".")
    return f"{before}.{_PATHS[last]}" if last in _PATHS else path
