"""`loka tune` without the command line: check a policy, measure its candidates, and say which one won."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import torch

from loka.bench.machine import require_gpu
from loka.bench.model.model_report import StepOutcome
from loka.bench.model.model_run import RunLimits
from loka.bench.model.model_variants import MODEL_BASELINE
from loka.bench.options import check_seconds
from loka.bench.record.clock import span_of
from loka.bench.results import utc_minute
from loka.bench.timing import Progress
from loka.bench.tune.tune_steps import Measure, StepMeasurer, TimedDevice
from loka.devices.spec import Execution
from loka.devices.targets import GPUS, device_named, spec_of
from loka.errors import CheckFailedError, Code, InputError
from loka.kernels.measurements.versions import Versions
from loka.plan.tuning.candidates import STANDING_TITLE, Candidate, Candidates
from loka.plan.tuning.record import MeasuredCandidate, TunedKey, TunedRecord
from loka.policy.policy import Policy

PLANNING = 0.2  # share of the time in which candidates are planned
FIRST_RUN = 0.85  # share of the time after which combinations are measured
FEWEST_ROUNDS = 3  # of a candidate that is judged
WORTH = 0.01  # of the step: what less FP8 may cost
TURNS = 16  # of each candidate: many short ones, as the host's speed varies from one to the next
STEPS_OF_A_TURN = 5
NO_TIME = "no time was left"
_COMPILED = "; if torch cannot replay it as CUDA graphs, write execution: {mode: compiled}"


@dataclass(frozen=True, slots=True)
class TuneLimits:
    """`rounds` of each candidate, the seconds for everything, and the most processes that compile; None: the cores."""

    seconds: float
    rounds: int = TURNS
    jobs: int | None = None

    def check(self) -> None:
        """Raise InputError for numbers that cannot be worked with."""
        check_seconds(self.seconds)
        if self.rounds < FEWEST_ROUNDS:
            raise InputError(f"--rounds: {self.rounds} are too few to tell plans apart; write {FEWEST_ROUNDS} or more")
        if self.jobs is not None and self.jobs < 1:
            raise InputError(f"--jobs: {self.jobs} is no number of processes; write 1 to compile in none but this one")


def check_policy(policy: Policy, synthetic: bool) -> None:
    """Raise InputError for a policy that cannot be tuned, before anything is built."""
    if spec_of(policy.target).is_reference:
        raise InputError(
            f"{policy.where('target')}: loka tune: target {policy.target} is the reference path, whose steps say "
            f"nothing; name the GPU to train on: {GPUS}"
        )
    if policy.train is None and not synthetic:
        raise InputError(
            f"{policy.where('')}: loka tune measures your training step, and the policy has no train section; add "
            'train: {batches: "package.module:name", loss: "package.module:name"}, functions of (batch_size, seed) and '
            "of (output, target), or measure example inputs with a synthetic loss: loka tune --synthetic",
            Code.MISSING,
        )


def require_target(policy: Policy) -> None:
    """Raise InputError unless this machine has the policy's target."""
    require_gpu("loka tune")
    here = torch.cuda.get_device_name()
    if not spec_of(policy.target).is_named(here):
        found = device_named(here)
        advice = f"write target: {found.name} to tune for this one" if found is not None else "tune it there"
        raise InputError(
            f"{policy.where('target')}: loka tune: the policy's target is {policy.target}, and this machine has "
            f"{here}, whose times do not hold there; {advice}"
        )


def tuned_here(policy: Policy, limits: TuneLimits, synthetic: bool, progress: Progress) -> TunedRecord:
    """Measure the candidates of a policy on this machine's GPU.

    Raises InputError for a policy, a model or a machine that cannot be tuned, CheckFailedError if nothing was measured.
    """
    limits.check()
    check_policy(policy, synthetic)
    require_target(policy)
    measurer = StepMeasurer(policy, TimedDevice(), progress, synthetic, limits.jobs)
    return tuned(policy, limits, measurer, measurer.words, Versions.here(), progress)


def tuned(
    policy: Policy,
    limits: TuneLimits,
    measure: Measure,
    step: str,
    machine: Versions,
    progress: Progress,
    clock: Callable[[], float] | None = None,
    now: datetime | None = None,
) -> TunedRecord:
    """Measure the candidates of a policy with `measure`, those that look best combined after the others.

    `step` says in words what is measured, on `machine`; `clock` is in seconds. Raises as `tuned_here` does.
    """
    clock = clock or time.monotonic
    start = clock()

    def until(share: float) -> RunLimits:
        return RunLimits(limits.rounds, start + share * limits.seconds, clock, STEPS_OF_A_TURN)

    progress(f"{policy.name}: planning the candidates")
    candidates = Candidates(policy)
    found = candidates.found(start + PLANNING * limits.seconds, clock)
    progress(f"{policy.name}: {len(found)} candidate plans")
    steps = measure(found, until(FIRST_RUN))
    bf16_ms = _bf16_ms(steps.get(MODEL_BASELINE), policy.measured_execution)
    measured = _measured(found, steps)
    together = combination(measured)
    if together and until(1.0).left > 0:
        best = next(each for each in found if each.title == winner_of(measured).title)
        title = " + ".join(each.title for each in together if not each.choice.as_it_stands)
        made = candidates.combined([each.choice for each in together], title)
        if made is not None and all(made.decisions != each.decisions for each in found):
            again = measure([best, made], until(1.0))
            if made.title in again:
                found = (*found, made)
                measured = (*measured, *_measured([made], again))
    won = winner_of(measured)
    return TunedRecord(
        key=TunedKey.of(policy),
        inputs=candidates.inputs,
        machine=machine,
        date=utc_minute(now),
        step=step,
        bf16_ms=bf16_ms,
        winner=won.title,
        decisions=next(each.decisions for each in found if each.title == won.title),
        candidates=measured,
    )


def _bf16_ms(baseline: StepOutcome | None, execution: Execution) -> float:
    """The median step of the model as it is. Raises CheckFailedError where it was not measured."""
    if baseline is None:
        raise CheckFailedError("loka tune: no time was left to measure anything; give it more: --seconds")
    if baseline.figures is None:
        raise CheckFailedError(
            f"loka tune: the model as it is, in BF16, does not run here ({execution.value}), so there is nothing to "
            f"compare with: {baseline.failure}{_COMPILED if execution is Execution.REDUCE_OVERHEAD else ''}"
        )
    return round(baseline.figures.step_ms, 4)


def _measured(candidates: Sequence[Candidate], found: Mapping[str, StepOutcome]) -> tuple[MeasuredCandidate, ...]:
    return tuple(_of(each, found.get(each.title)) for each in candidates)


def _of(candidate: Candidate, outcome: StepOutcome | None) -> MeasuredCandidate:
    figures = outcome.figures if outcome is not None else None
    speedups = figures.speedups if figures is not None else ()
    return MeasuredCandidate(
        title=candidate.title,
        choice=candidate.choice,
        sites_fp8=candidate.sites_fp8,
        native=not candidate.plan.bindings,
        predicted_us=candidate.predicted_us,
        step_ms=round(figures.step_ms, 4) if figures is not None else None,
        speedup=round(statistics.median(speedups), 4) if speedups else None,
        noise=round(span_of(speedups).spread, 4) if len(speedups) >= FEWEST_ROUNDS else None,
        rounds=len(figures.rounds) if figures is not None else 0,
        failure=outcome.failure if outcome is not None else NO_TIME,
    )


def winner_of(measured: Sequence[MeasuredCandidate]) -> MeasuredCandidate:
    """The fastest that is clearly faster than the plan as it stands; without one that plan, or what has less FP8 and is
    not clearly slower.

    Clearly: by more than the noise of both, and by more than WORTH. Raises CheckFailedError if none was measured in
    enough rounds.
    """
    timed = _timed(measured)
    if not timed:
        raise CheckFailedError(
            f"loka tune: no candidate was measured in {FEWEST_ROUNDS} rounds; give it more time: --seconds"
        )
    standing = next((each for each in timed if each.title == STANDING_TITLE), timed[0])
    as_fast = (each for each in timed if _ties(each, standing))
    holder = min(as_fast, key=lambda each: each.sites_fp8)  # the first of those with the least
    return max((each for each in timed if each is holder or _is_faster(each, holder)), key=_speed)


def combination(measured: Sequence[MeasuredCandidate]) -> tuple[MeasuredCandidate, ...]:
    """The best candidate for the whole model, and the switches that were clearly faster than the plan that they switch.

    () where that is no new candidate.
    """
    timed = _timed(measured)
    standing = next((each for each in timed if each.title == STANDING_TITLE), None)
    wholes = [each for each in timed if not each.choice.is_switch]
    if standing is None or not wholes:
        return ()
    faster = [each for each in timed if each.choice.is_switch and _is_faster(each, standing)]
    best = {each.choice.sites[0].sites: each for each in sorted(faster, key=_speed)}  # of each group, the fastest way
    base = winner_of(wholes)
    if not best or (len(best) == 1 and base.choice.as_it_stands):
        return ()
    return (base, *best.values())


def _timed(measured: Sequence[MeasuredCandidate]) -> list[MeasuredCandidate]:
    return [each for each in measured if each.noise is not None and each.speedup is not None]


def _speed(measured: MeasuredCandidate) -> float:
    return measured.speedup or 0.0


def _ties(one: MeasuredCandidate, other: MeasuredCandidate) -> bool:
    """True if the noise of both together does not tell them apart, or hardly anything lies between them."""
    noise = math.hypot(one.noise or 0.0, other.noise or 0.0)
    return abs((one.speedup or 1.0) / (other.speedup or 1.0) - 1) <= max(noise, WORTH)


def _is_faster(one: MeasuredCandidate, other: MeasuredCandidate) -> bool:
    return _speed(one) > _speed(other) and not _ties(one, other)
