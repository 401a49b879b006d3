"""Measured steps of the policy's model, from a file of `loka bench model`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from loka.errors import InputError
from loka.paths import open_plain
from loka.plan.plan import Plan


class Step(BaseModel):
    """One variant's step in one launch, a line of the file."""

    mode: str  # "train"
    failure: str
    variant: str = ""  # "loka-fp8"
    launch: str = ""  # "loop"
    step_ms: float = 0.0  # of one that failed there is none
    ratio: float | None = None  # the speed-up over BF16 launched in the same way

    @property
    def figure(self) -> str:
        """The milliseconds: `34.1`, `2.05`."""
        return f"{self.step_ms:.1f}" if self.step_ms >= 10 else f"{self.step_ms:.2f}"


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Training steps of a model, fastest first in each launch."""

    file: str
    command: str
    date: str
    device: str
    torch: str
    batch_size: int
    baseline: str  # the variant that speed-ups are over
    steps: tuple[Step, ...]

    @property
    def longest(self) -> float:
        """The milliseconds of the longest step."""
        return max(step.step_ms for step in self.steps)


class _Model(BaseModel):
    name: str
    batch_size: int
    lines: list[Step]


class _Environment(BaseModel):
    device: str
    torch: str


class _File(BaseModel):
    format: Literal["loka.bench"]
    what: Literal["model"]
    command: str
    date: str
    baseline: str
    environment: _Environment
    models: list[_Model]


def measured_steps(path: Path, plan: Plan) -> MeasuredSteps:
    """The training steps of a plan's model in a file of `loka bench model`.

    The batch size may be another than the plan's: the page names it. Raises InputError where the file cannot be read,
    is another, or has no step of a model of the plan's name.
    """
    try:
        with open_plain(path) as file:
            data = _File.model_validate(json.loads(file.read()))
    except OSError as error:
        raise InputError(f"--measured: {path}: cannot be read ({error.strerror or error}); check the path") from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"--measured: {path}: not a file of `loka bench model`; name the JSON that it wrote"
        ) from error
    model = next((each for each in data.models if each.name == plan.name), None)
    if model is None:
        names = ", ".join(each.name for each in data.models)
        raise InputError(
            f"--measured: {path}: has {names or 'no model'}, and the policy is {plan.name}; measure it: loka bench "
            "model POLICY"
        )
    lines = [each for each in model.lines if each.mode == "train" and not each.failure]
    if not lines or not all(0 < each.step_ms < math.inf for each in lines):
        raise InputError(f"--measured: {path}: no training step of {plan.name} was measured; measure it again")
    launches = list(dict.fromkeys(each.launch for each in lines))
    lines.sort(key=lambda each: (launches.index(each.launch), each.step_ms))
    return MeasuredSteps(
        file=path.name,
        command=data.command,
        date=data.date,
        device=data.environment.device,
        torch=data.environment.torch,
        batch_size=model.batch_size,
        baseline=data.baseline,
        steps=tuple(lines),
    )
