"""Policies whose profile finds everything safe, and steps of their candidates that nobody measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from loka.bench.model.model_report import StepOutcome, VariantFigures
from loka.bench.model.model_run import RunLimits
from loka.bench.model.model_variants import MODEL_BASELINE, Casting, StepBlock, StepLaunch
from loka.bench.timing import RoundTiming
from loka.bench.tune.tune import TuneLimits, tuned
from loka.mods.policy_loader import load_policy
from loka.plan.evidence import ProfiledSites
from loka.plan.examine import assumed_safe, examine
from loka.plan.tuning.candidates import Candidate
from loka.plan.tuning.record import TunedRecord, read_records, with_record
from loka.policy.policy import Policy
from loka.probe.profile.profile_file import save
from tests.support.plan.plan_costs import HOPPER

BF16_MS = 4.0
BLOCK = StepBlock(Casting.AUTOCAST, True, StepLaunch.LOOP)
NOW = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)


def safe_policy(
    path: Path, text: str, judged: Callable[[ProfiledSites], ProfiledSites] = lambda known: known
) -> Policy:
    """The policy of a text in a file, with a profile at its default place that finds everything safe.

    `judged` changes what the profile finds.
    """
    path.write_text(text)
    policy = load_policy(path)
    known = judged(assumed_safe(examine(policy)))
    profile = replace(known.profile, sites=tuple(known.sites.values()), created="2026-01-01T00:00:00Z")
    save(path.parent / policy.default_profile, profile)
    return load_policy(path)


def outcome_of(title: str, steps_ms: Sequence[float] = (), failure: str = "") -> StepOutcome:
    """Steps that took so many milliseconds, each beside a BF16 step of BF16_MS."""
    rounds, beside = (tuple(RoundTiming(ms, 0.0) for ms in each) for each in (steps_ms, [BF16_MS] * len(steps_ms)))
    figures = None if failure else VariantFigures(rounds, beside, None, None)
    return StepOutcome(BLOCK, title, figures, failure)


@dataclass
class MadeUpSteps:
    """Measures by a table: milliseconds by a part of the title, else `usual`; `uneven` varies them by round."""

    times: Mapping[str, float] = field(default_factory=dict)
    usual: float = BF16_MS
    uneven: float = 0.0
    failing: Mapping[str, str] = field(default_factory=dict)  # part of a title -> why
    bf16: StepOutcome | None = None
    asked: list[tuple[str, ...]] = field(default_factory=list)  # the titles of each call
    ends: list[float] = field(default_factory=list)

    def __call__(self, candidates: Sequence[Candidate], limits: RunLimits) -> Mapping[str, StepOutcome]:
        self.asked.append(tuple(each.title for each in candidates))
        self.ends.append(limits.end)
        found = {MODEL_BASELINE: self.bf16 or outcome_of(MODEL_BASELINE, (BF16_MS,) * limits.rounds)}
        for each in candidates:
            failure = next((why for part, why in self.failing.items() if part in each.title), "")
            found[each.title] = outcome_of(each.title, failure=failure) if failure else self._steps(each, limits.rounds)
        return found

    def _steps(self, candidate: Candidate, rounds: int) -> StepOutcome:
        parts = [ms for part, ms in self.times.items() if part in candidate.title]
        usual = BF16_MS if not candidate.plan.bindings else self.usual
        mean = min(parts, default=usual)
        steps = tuple(mean * (1 + self.uneven * (-1) ** number) for number in range(rounds))
        return outcome_of(candidate.title, steps)


def tune(
    policy: Policy, steps: MadeUpSteps, seconds: float = 1000.0, clock: Callable[[], float] = lambda: 0.0
) -> TunedRecord:
    """The record of made-up steps, on a made-up machine."""
    limits = TuneLimits(seconds, 4)
    return tuned(policy, limits, steps, "made up", HOPPER, lambda line: None, clock, NOW)


def keep(policy: Policy, record: TunedRecord) -> None:
    """Write a record to the policy's place."""
    policy.tuned_file.parent.mkdir(exist_ok=True)
    policy.tuned_file.write_text(with_record(read_records(policy.tuned_file), record))
