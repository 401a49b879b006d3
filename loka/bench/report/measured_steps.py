"""Measured steps of the policy's model, from a file of `loka bench model`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loka.bench.report.geometry import percent
from loka.errors import InputError
from loka.paths import open_plain
from loka.plan.plan import Plan

_FORMAT, _WHAT = "loka.bench", "model"


@dataclass(frozen=True, slots=True)
class StepBar:
    """One variant's step in one launch."""

    variant: str  # "loka-fp8"
    launch: str  # "loop"
    milliseconds: float
    speedup: float | None  # over BF16 launched in the same way
    width: float  # in per cent of the longest
    baseline: bool

    @property
    def figure(self) -> str:
        """The milliseconds: `34.1`, `2.05`."""
        return f"{self.milliseconds:.1f}" if self.milliseconds >= 10 else f"{self.milliseconds:.2f}"


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Training steps of a model, fastest first in each launch."""

    file: str
    command: str
    date: str
    device: str
    torch: str
    batch_size: int
    bars: tuple[StepBar, ...]


def measured_steps(path: Path, plan: Plan) -> MeasuredSteps:
    """The training steps of a plan's model in a file of `loka bench model`.

    The batch size may be another than the plan's: the page names it. Raises InputError where the file cannot be read,
    is another, or has no step of a model of the plan's name.
    """
    try:
        with open_plain(path) as file:
            data: Any = json.loads(file.read())
        if data["format"] != _FORMAT or data["what"] != _WHAT:
            raise ValueError("another format")
        models = {model["name"]: model for model in data["models"]}
        found = models.get(plan.name)
        if found is None:
            raise InputError(
                f"--measured: {path}: has {', '.join(models) or 'no model'}, and the policy is {plan.name}; "
                "measure it: loka bench model POLICY"
            )
        lines = [each for each in found["lines"] if each["mode"] == "train" and not each["failure"]]
        times = [float(each["step_ms"]) for each in lines]
        if not times or not all(0 < each < math.inf for each in times):
            raise InputError(f"--measured: {path}: no training step of {plan.name} was measured; measure it again")
        bars = [
            StepBar(
                variant=str(each["variant"]),
                launch=str(each["launch"]),
                milliseconds=time,
                speedup=float(each["ratio"]) if each["ratio"] is not None else None,
                width=percent(time / max(times)),
                baseline=each["variant"] == data["baseline"],
            )
            for each, time in zip(lines, times, strict=True)
        ]
        launches = list(dict.fromkeys(bar.launch for bar in bars))
        bars.sort(key=lambda bar: (launches.index(bar.launch), bar.milliseconds))
        about = data["environment"]
        return MeasuredSteps(
            file=path.name,
            command=str(data["command"]),
            date=str(data["date"]),
            device=str(about["device"]),
            torch=str(about["torch"]),
            batch_size=int(found["batch_size"]),
            bars=tuple(bars),
        )
    except OSError as error:
        raise InputError(f"--measured: {path}: cannot be read ({error.strerror or error}); check the path") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"--measured: {path}: not a file of `loka bench model`; name the JSON that it wrote"
        ) from error
