"""Values of plan.json that JSON leaves open: keys that are there twice, and infinities."""

from __future__ import annotations

import reprlib
from collections import Counter
from math import isfinite
from typing import Any

_INFINITE = ("inf", "-inf", "nan")


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError where a key is there twice: readers differ in which they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {reprlib.repr(twice)} is there twice in one object")
    return found


def read_infinities(data: dict[str, Any]) -> bool:
    """Makes numbers of the infinities in evidence, which are texts; nothing else is. True if there are any."""
    found = False
    decisions: Any = data.get("decisions")
    for decision in decisions if isinstance(decisions, list) else ():
        evidence: Any = decision.get("evidence") if isinstance(decision, dict) else None
        for ends in evidence.values() if isinstance(evidence, dict) else ():
            for end, value in ends.items() if isinstance(ends, dict) else ():
                if value in _INFINITE:
                    ends[end], found = float(value), True
    return found


def show_evidence(decision: dict[str, Any]) -> None:
    """Omits what there is none of: evidence, or its change of NE; infinities become "inf", which reads back as one."""
    evidence = decision["evidence"]
    if evidence is None:
        del decision["evidence"]
        return
    if evidence["ne_percent"] is None:
        del evidence["ne_percent"]
    for name in evidence.keys() & {"mere", "sqnr_db", "ne_percent"}:
        evidence[name] = {end: value if isfinite(value) else str(value) for end, value in evidence[name].items()}


def is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False
