"""The record of `loka tune`: which of a policy's candidate plans was fastest in measured steps, and what it holds for.

A JSON file beside the policy has a record for each target, batch size and execution. A plan takes one that is of its
model, of what its policy leaves open, of its profile and of this LoKA, if its winner still gives the plan that was
measured; any other is ignored, and the plan says why. Versions of torch and the driver are not compared: a plan is the
same on every machine. `loka doctor` compares them.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from loka.devices.spec import Execution
from loka.errors import InputError
from loka.kernels.measurements.versions import Versions
from loka.paths import open_plain, shown
from loka.plan.plan import TunedStep
from loka.plan.tuning.choices import Choice
from loka.policy.policy import Policy

FORMAT: Literal["loka.tuned"] = "loka.tuned"
VERSION: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class TunedKey:
    """What a record was measured for; a file has one record for each."""

    target: str
    batch_size: int
    execution: Execution | None  # as in the policy; None: not said, measured under torch.compile without a graph

    @classmethod
    def of(cls, policy: Policy) -> TunedKey:
        """That of a policy."""
        execution = policy.execution.mode if policy.execution is not None else None
        return cls(policy.target, policy.model.batch_size, execution)

    def __str__(self) -> str:
        execution = f", execution {self.execution.value}" if self.execution is not None else ""
        return f"{self.target} at batch size {self.batch_size}{execution}"


@dataclass(frozen=True, slots=True)
class TunedInputs:
    """What decides which candidates there are; a record holds as long as all of it is the same."""

    loka: str  # version
    model: str  # sha256 of the model's structure and sites
    policy: str  # sha256 of what the policy asks of each site, and leaves open
    profile: str  # sha256 of the profile; "" without one

    def difference(self, now: TunedInputs) -> str:
        """Why a record does not hold any more; "" if it does."""
        if self.loka != now.loka:
            return f"it was measured with LoKA {self.loka}, and this is {now.loka}"
        if self.model != now.model:
            return "the model has changed since it was measured"
        if self.policy != now.policy:
            return "the policy asks for something else since it was measured"
        if self.profile != now.profile:
            return "the profile has changed since it was measured"
        return ""


@dataclass(frozen=True, slots=True)
class MeasuredCandidate:
    """A candidate plan and its steps. Times are medians over rounds in which every candidate has its turn."""

    title: str
    choice: Choice
    sites_fp8: int
    native: bool  # it replaces nothing: the model as it is
    predicted_us: float | None  # of the sites in a step; None where measurements are missing
    step_ms: float | None  # None: it failed, or there was no time
    speedup: float | None  # over the model as it is, in the same rounds: the median
    noise: float | None  # half the interquartile range of the speedups, as a share of the median
    rounds: int
    failure: str = ""


@dataclass(frozen=True, slots=True)
class TunedRecord:
    """Measured steps of the candidates of one policy, and the winner."""

    key: TunedKey
    inputs: TunedInputs
    machine: Versions
    date: str  # UTC, to the minute
    step: str  # in words: what was measured
    bf16_ms: float  # a step of the model as it is
    winner: str  # the title of a candidate
    decisions: str  # sha256 of what runs in the winner's plan
    candidates: tuple[MeasuredCandidate, ...]

    @property
    def won(self) -> MeasuredCandidate:
        """The winner."""
        return next(each for each in self.candidates if each.title == self.winner)

    def confirmation(self, file: str) -> TunedStep:
        """What a plan says of this record; `file` as named in plans."""
        fp8 = [each for each in self.candidates if each.sites_fp8 and each.noise is not None]
        best = max(fp8, key=lambda each: each.speedup or 0.0, default=None)
        return TunedStep(
            file=file,
            sha256=self.sha256,
            choice=self.winner,
            step_ms=self.won.step_ms or 0.0,
            bf16_ms=self.bf16_ms,
            best_fp8_ms=best.step_ms if best is not None else None,
            best_fp8_noise=best.noise if best is not None else None,
            is_native=self.won.native,
            execution=(self.key.execution or Execution.COMPILED).value,
            device=self.machine.device,
            date=self.date,
        )

    @property
    def sha256(self) -> str:
        """Of its content."""
        return hashlib.sha256(_adapter().dump_json(_File(FORMAT, VERSION, (self,)))).hexdigest()


@dataclass(frozen=True, slots=True)
class _File:
    """The layout of the file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    format: Literal["loka.tuned"]
    version: Literal[1]
    records: tuple[TunedRecord, ...]


@cache
def _adapter() -> TypeAdapter[_File]:
    return TypeAdapter(_File)


def read_records(path: Path) -> tuple[TunedRecord, ...]:
    """The records in a file; none if it is missing. Raises InputError for one that cannot be read."""
    try:
        with open_plain(path) as file:
            text = file.read().decode("utf-8")
    except FileNotFoundError:
        return ()
    except UnicodeDecodeError as error:
        raise InputError(f"{shown(path)}: not a text in UTF-8; {_AGAIN}") from error
    except OSError as error:
        raise InputError(f"{shown(path)}: cannot be read ({error.strerror or error}); check the path") from error
    return parsed(text, shown(path))


_AGAIN = "remove the file, and run loka tune again"


def parsed(text: str, name: str) -> tuple[TunedRecord, ...]:
    """The records in a text; `name` is the file's, for messages. Raises InputError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not a whole JSON file ({error}); {_AGAIN}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f"{name}: no record of loka tune; {_AGAIN}")
    version = data.get("version")
    if type(version) is int and version > VERSION:
        raise InputError(
            f"{name}: the record has version {version}, and this LoKA reads up to {VERSION}: upgrade LoKA, or {_AGAIN}"
        )
    try:
        records = _adapter().validate_json(text, strict=True).records
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InputError(f"{name}: damaged at {place}: {first['msg']}; {_AGAIN}") from error
    for each in records:
        wrong = _nonsense(each)
        if wrong:
            raise InputError(f"{name}: damaged: {wrong}; {_AGAIN}")
    return records


def _nonsense(record: TunedRecord) -> str:
    """Why well-formed data is no record; "" if it is one."""
    winners = [each for each in record.candidates if each.title == record.winner]
    if len(winners) != 1 or winners[0].step_ms is None:
        return "its winner is none of the measured candidates"
    times = [record.bf16_ms, *(each.step_ms for each in record.candidates if each.step_ms is not None)]
    if not all(math.isfinite(time) and time > 0 for time in times):
        return "a time is zero, negative or not finite"
    return ""


def with_record(records: tuple[TunedRecord, ...], new: TunedRecord) -> str:
    """The text of the file with a new record, which takes the place of one for the same key."""
    others = tuple(each for each in records if each.key != new.key)
    data = _adapter().dump_python(_File(FORMAT, VERSION, (*others, new)), mode="json")
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"
