"""The plan that a policy's record of `loka tune` confirms, or why the record does not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from loka.plan.evidence import ProfiledSites
from loka.plan.plan import Plan
from loka.plan.tuning.choices import AS_IT_STANDS, Choice
from loka.plan.tuning.fingerprints import decisions_sha256, model_sha256, settings_sha256
from loka.plan.tuning.record import TunedInputs, TunedKey, TunedRecord, read_records
from loka.policy.policy import Policy
from loka.policy.settings import SiteSettings
from loka.sites.build_model import BuiltModel
from loka.sites.site import Site
from loka.version import __version__


@dataclass(frozen=True, slots=True)
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
