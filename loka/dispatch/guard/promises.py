"""The error that a package's plan promised for each bound module: what the guard holds training to."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka.dispatch.patch.bound_module import BoundModule
from loka.paths import open_plain

PLAN = "plan.json"
UNKNOWN_DB = 22.0  # SQNR of a GEMM that the plan has no figure for: a little under that of e5m2
FLOOR = 0.01  # kernels of a module round by themselves, in bfloat16 perhaps, beside its FP8 GEMMs


@dataclass(frozen=True, slots=True)
class Promise:
    """Relative errors (noise over signal) of a bound module by the plan: of its output and of its gradients."""

    output: float
    gradients: float


def promises(package: str, bound: Iterable[BoundModule]) -> dict[str, Promise]:
    """The promise for each module, by the `plan.json` beside its package.

    The errors of the GEMMs of a module add up as independent ones do: its fprops in its output, all of them in its
    gradients. A GEMM's is the lower end of the SQNR by the profile's evidence, otherwise that of its kernel's
    measurement, otherwise `UNKNOWN_DB`.
    """
    known = _sqnr(package)
    found = {}
    for each in bound:
        forward = backward = FLOOR**2
        for index, site in enumerate(each.counters.sites):
            for gemm in each.counters.planned(index):
                noise = 10 ** (-known.get((site, gemm), UNKNOWN_DB) / 10)
                backward += noise
                forward += noise if gemm == "fprop" else 0.0
        found[each.name] = Promise(math.sqrt(forward), math.sqrt(backward))
    return found


def _sqnr(package: str) -> dict[tuple[str, str], float]:
    """SQNR in dB of each planned GEMM, by site and GEMM; {} without a plan that can be read."""
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None:
        return {}
    try:
        with open_plain(Path(file).parent / PLAN) as opened:
            plan = json.loads(opened.read().decode())
        found = {}
        for site in plan["sites"]:
            for number in site["gemms"]:
                decision = plan["decisions"][number]
                if (value := _figure(decision)) is not None:
                    found[site["site"]["name"], decision["gemm"]] = value
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}  # a plan of another version
    return found


def _figure(decision: Mapping[str, Any]) -> float | None:
    evidence = decision.get("evidence") or {}
    low = (evidence.get("sqnr_db") or {}).get("low")
    measured = [each["sqnr_db"] for each in decision.get("times", ()) if each["kernel"] == decision["kernel"]]
    values = [float(value) for value in (low, *measured) if value is not None]
    return values[0] if values and math.isfinite(values[0]) else None
