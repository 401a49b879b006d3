"""The record of `loka tune`: which of a policy's candidate plans was fastest in measured steps, and what it holds for.

A JSON file beside the policy has a record for each target, batch size and execution. A plan takes one that is of its
model, of what its policy leaves open, of its profile and of this LoKA, if its winner still gives the plan that was
measured; any other is ignored, and the plan says why. Versions of torch and the driver are not compared: a plan is the
same on every machine. `loka doctor` compares them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter
from pydantic.dataclasses import dataclass

from loka.devices.spec import Execution
from loka.graph.sites.site import Site
from loka.kernels.measurements.versions import Versions
from loka.model.build_model import BuiltModel
from loka.paths import shown
from loka.plan.evidence import ProfiledSites
from loka.plan.json_file import JsonFormat
from loka.plan.plan import MODEL, Milliseconds, Plan, TunedStep
from loka.plan.tuning.choices import AS_IT_STANDS, Choice
from loka.plan.tuning.fingerprints import decisions_sha256, model_sha256, settings_sha256
from loka.policy.policy import Policy
from loka.policy.settings import SiteSettings
from loka.probe.stats.site_stats import Finite
from loka.version import __version__

VERSION: Literal[2] = 2


@dataclass(frozen=True, slots=True, config=MODEL)
class TunedKey:
    """What a record was measured for; a file has one record for each."""

    target: str
    batch_size: int
    execution: Execution

    @classmethod
    def of(cls, policy: Policy) -> TunedKey:
        """That of a policy."""
        return cls(policy.target, policy.model.batch_size, policy.measured_execution)

    def __str__(self) -> str:
        return f"{self.target} at batch size {self.batch_size}, execution {self.execution.value}"


@dataclass(frozen=True, slots=True, config=MODEL)
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
        words = {
            "model": "the model has changed since it was measured",
            "policy": "the policy asks for something else since it was measured",
            "profile": "the profile has changed since it was measured",
        }
        return next((said for name, said in words.items() if getattr(self, name) != getattr(now, name)), "")


@dataclass(frozen=True, slots=True, config=MODEL)
class MeasuredCandidate:
    """A candidate plan and its steps. Times are medians over rounds in which every candidate has its turn."""

    title: str
    choice: Choice
    sites_fp8: int
    native: bool  # it replaces nothing: the model as it is
    predicted_us: Finite | None  # of the sites in a step; None where measurements are missing
    step_ms: Milliseconds | None  # None: it failed, or there was no time
    speedup: float | None  # over the model as it is, in the same rounds: the median
    noise: float | None  # half the interquartile range of the speedups, as a share of the median
    rounds: int
    failure: str = ""


@dataclass(frozen=True, slots=True, config=MODEL)
class TunedRecord:
    """Measured steps of the candidates of one policy, and the winner."""

    key: TunedKey
    inputs: TunedInputs
    machine: Versions
    date: str  # UTC, to the minute
    step: str  # in words: what was measured
    bf16_ms: Milliseconds  # a step of the model as it is
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
            execution=self.key.execution.value,
            device=self.machine.device,
            date=self.date,
        )

    @property
    def sha256(self) -> str:
        """Of its content."""
        return hashlib.sha256(_format().adapter.dump_json(_File("loka.tuned", VERSION, (self,)))).hexdigest()


@dataclass(frozen=True, slots=True, config=MODEL)
class _File:
    """The layout of the file."""

    format: Literal["loka.tuned"]
    version: Literal[2]
    records: tuple[TunedRecord, ...]


@cache
def _format() -> JsonFormat[_File]:
    again = "remove the file, and run loka tune again"
    return JsonFormat("loka.tuned", VERSION, TypeAdapter(_File), "record", f"no record of loka tune; {again}", again)


def read_records(path: Path) -> tuple[TunedRecord, ...]:
    """The records in a file; none if it is missing. Raises InputError for one that cannot be read."""
    try:
        text = _format().text_of(path)
    except FileNotFoundError:
        return ()
    records = _format().parse(text, shown(path)).records
    for each in records:
        winners = [other for other in each.candidates if other.title == each.winner]
        if len(winners) != 1 or winners[0].step_ms is None:
            raise _format().damaged(shown(path), "its winner is none of the measured candidates")
    return records


def with_record(records: tuple[TunedRecord, ...], new: TunedRecord) -> str:
    """The text of the file with a new record, which takes the place of one for the same key."""
    others = tuple(each for each in records if each.key != new.key)
    data = _format().adapter.dump_python(_File("loka.tuned", VERSION, (*others, new)), mode="json")
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True, config=MODEL)
class TunedFile:
    """What is at the place of a policy's record."""

    name: str  # relative to the policy's directory
    advice: str
    record: TunedRecord | None = None  # of the policy's target, batch size and execution
    others: str = ""  # what else there are records for, where there is none of these

    @classmethod
    def of(cls, policy: Policy) -> TunedFile:
        """Raises InputError where the file is there and cannot be read."""
        records, key = read_records(policy.tuned_file), TunedKey.of(policy)
        record = next((each for each in records if each.key == key), None)
        others = "" if record is not None else ", ".join(str(each.key) for each in records)
        wanted = f"it has records for {others}, and this policy is for {key}" if others else ""
        return cls(policy.tuned_name, f"run loka tune {policy.path}", record, wanted)

    @property
    def choice(self) -> Choice:
        """The winner's; as it stands without a record."""
        return self.record.won.choice if self.record is not None else AS_IT_STANDS

    def ignored(self, reason: str) -> str:
        """That the file is not used, and why; "" without a reason."""
        return f"{self.name} is ignored: {reason}; {self.advice}, or remove it" if reason else ""


def tuned_inputs(
    policy: Policy,
    built: BuiltModel,
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    known: ProfiledSites | None,
) -> TunedInputs:
    """What a record of this policy depends on."""
    return TunedInputs(
        loka=__version__,
        model=model_sha256(policy.model.factory, built.module, sites),
        policy=settings_sha256(policy, sites, settings),
        profile=known.sha256 if known is not None else "",
    )


def confirmed_plan(file: TunedFile, inputs: TunedInputs, plan_with: Callable[[Choice], Plan]) -> tuple[Plan, str]:
    """The plan of the record's winner if the record holds, otherwise by predicted times; and why it does not, or "".

    `plan_with` makes the plan of a choice.
    """
    record = file.record
    if record is None:
        return plan_with(AS_IT_STANDS), file.ignored(file.others)
    reason = record.inputs.difference(inputs)
    if not reason:
        plan = plan_with(record.won.choice)
        if decisions_sha256(plan) == record.decisions:
            return replace(plan, tuned=record.confirmation(file.name)), ""
        reason = "the plan that it measured is not made any more: the model's code or the kernels' times have changed"
    return plan_with(AS_IT_STANDS), file.ignored(reason)
