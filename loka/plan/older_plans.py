"""Upgrades plan.json of earlier versions: old names of fields to current ones."""

from __future__ import annotations

import re
from typing import Any

FIRST_WITH_TODAYS_NAMES = 5
_TABLES = ("decisions", "bindings")  # with keys that are only names of fields
_KEYS = {"turned": "transposed", "by_rows": "m_buckets"}  # the latter in files of every version
_PATHS = {"turned": "requantize_transpose"}  # last part of a policy path


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a plan.json of any version with current names; data that is no plan is unchanged."""
    found = dict(data)
    for name in _TABLES:
        if name in found:
            found[name] = _renamed(found[name])
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


def _assignment(row: Any) -> Any:
    if not isinstance(row, dict) or not isinstance(row.get("path"), str) or not isinstance(row.get("source"), str):
        return row
    return {**row, "path": _path(row["path"]), "source": re.sub("^turned from ", "transposed from ", row["source"])}


def _history(row: Any) -> Any:
    return {_path(path): numbers for path, numbers in row.items()} if isinstance(row, dict) else row


def _path(path: str) -> str:
    before, _, last = path.rpartition(".")
    return f"{before}.{_PATHS[last]}" if last in _PATHS else path
