"""Fields of plan.json that are written only where they say something: a plan without them keeps its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from loka.plan.json_values import show_evidence


def without_empty(data: dict[str, Any]) -> None:
    """Remove what is empty from the data of a plan file, and give two fields their form there."""
    _omit([data], "profile", "measurements", "timings", "mods", "interactions", "execution", "ne_budget", "tuned")
    timings, interactions = data.get("timings", ()), data.get("interactions", ())
    times = [row["timing"][name] for row in timings for name in ("chosen", "as_is")]
    times += [candidate["time"] for row in timings for candidate in row["candidates"]]
    times += [each[name] for each in interactions for name in ("chosen", "as_is")]
    _omit((time for time in times if time is not None), "host_us")
    _omit(data.get("mods", ()), "gain")
    _omit(data["sites"], "timing", "gains_by_fusing")
    _omit((row["site"] for row in data["sites"]), "members", "boundaries")
    for decision in data["decisions"]:
        show_evidence(decision)
        if buckets := decision.pop("m_buckets"):
            decision["by_rows"] = buckets  # its name in plan files of every version
        _omit(decision["operands"] or (), "transposed")
    _omit(data["decisions"], "times")
    forwards = [binding["forward"] for binding in data["bindings"] if binding["forward"] is not None]
    _omit(forwards, "rewritten", "near", "crosses", "reads", "called", "constants", "guards")
    _omit((statement for forward in forwards for statement in forward["statements"]), "even", "written", "group")
    _omit((step["call"] for forward in forwards for step in forward["statements"] if step["call"]), "plus")


def _omit(rows: Iterable[dict[str, Any]], *names: str) -> None:
    """Remove each of these fields that is None, False or without elements; a zero stays."""
    for row in rows:
        for name in names:
            value = row[name]
            if value is None or value is False or value in ("", [], {}):
                del row[name]
