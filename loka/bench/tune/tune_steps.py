"""Whole training steps of candidate plans, timed in turns with the model as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from loka.bench.model.bench_device import BenchDevice
from loka.bench.model.model_results import StepOutcome
from loka.bench.model.model_run import BlockRun, RunLimits
from loka.bench.model.model_subject import ModelSubject
from loka.bench.model.model_variants import MODEL_BASELINE, Casting, Compiling, ModelVariant, StepBlock, StepLaunch
from loka.bench.speed.comparison import Progress
from loka.bench.subjects.packages import Workshop
from loka.devices.host_costs import Execution
from loka.plan.tuning.candidates import Candidate
from loka.policy.policy import Policy
from loka.sites.callables import current_directory_importable


@dataclass(frozen=True, slots=True)
class CandidateSteps:
    """Steps of one candidate, round by round; empty where there is a `failure`."""

    step_ms: tuple[float, ...] = ()
    speedups: tuple[float, ...] = ()  # over the model as it is, in the same rounds
    failure: str = ""


Measure = Callable[[Sequence[Candidate], RunLimits], Mapping[str, CandidateSteps]]  # by title, and of MODEL_BASELINE

_WAYS = {
    Execution.EAGER: (Compiling.EAGER, StepLaunch.LOOP),
    Execution.COMPILED: (Compiling.DEFAULT, StepLaunch.LOOP),
    Execution.GRAPH: (Compiling.DEFAULT, StepLaunch.CAPTURED),
}


def execution_of(policy: Policy) -> Execution:
    """How its steps are run: as the policy says, otherwise compiled without a graph."""
    return policy.execution.mode if policy.execution is not None else Execution.COMPILED


@dataclass(frozen=True, slots=True)
class StepMeasurer:
    """Measures candidates on a device: forward, loss, backward and optimiser, under autocast to bfloat16.

    `synthetic`: on the model's example inputs with a synthetic loss.
    """

    policy: Policy
    device: BenchDevice
    progress: Progress
    synthetic: bool = False

    def __call__(self, candidates: Sequence[Candidate], limits: RunLimits) -> Mapping[str, CandidateSteps]:
        """The steps, by the candidates' titles, as far as there is time.

        A candidate that replaces nothing is the model as it is, and has its steps. Raises InputError if the model
        cannot be built, or its training functions cannot be used.
        """
        compiling, launch = _WAYS[execution_of(self.policy)]
        block = StepBlock(Casting.AUTOCAST, True, launch)
        baseline = ModelVariant(MODEL_BASELINE, compiling)
        variants = {each.title: _variant(each, number, compiling) for number, each in enumerate(candidates)}
        plans = {
            variants[each.title].package or "": replace(each.plan, tuned=None)
            for each in candidates
            if variants[each.title].package is not None
        }
        found: dict[str, CandidateSteps] = {}
        with current_directory_importable(), Workshop() as workshop, self.device.session():
            subject = ModelSubject(self.policy, workshop, plans, self.synthetic)
            subject.sample(True)  # its mistakes are the user's, and no candidate's
            different = [each for each in variants.values() if each.package is not None or each.adapted]
            run = BlockRun(subject, block, self.device, None, limits, self.progress)
            beside: tuple[float, ...] = ()
            for outcome in run.outcomes([baseline, *different]):
                made = _steps(outcome, beside)
                beside = made.step_ms if outcome.variant == MODEL_BASELINE else beside  # it comes first in each group
                found[outcome.variant] = made
        for title, variant in variants.items():
            if variant not in different and MODEL_BASELINE in found:
                found[title] = found[MODEL_BASELINE]
        return found

    @property
    def words(self) -> str:
        """What a step is."""
        train = self.policy.train
        loss = "a synthetic loss" if self.synthetic or train is None else "the policy's loss"
        return f"forward, {loss}, backward, {'adam' if self.synthetic or train is None else train.optimizer}"


def _steps(outcome: StepOutcome, beside: Sequence[float]) -> CandidateSteps:
    """`beside`: the steps of the model as it is in the rounds of the same group."""
    if outcome.figures is None:
        return CandidateSteps(failure=outcome.failure)
    steps = tuple(each.step_ms for each in outcome.figures.rounds)
    if outcome.variant == MODEL_BASELINE:
        return CandidateSteps(steps, (1.0,) * len(steps))
    if len(steps) == 1:  # the first look, which has a turn of its own beside it
        return CandidateSteps(steps, () if outcome.figures.ratio is None else (outcome.figures.ratio,))
    return CandidateSteps(steps, tuple(other / own for other, own in zip(beside, steps, strict=False)))


def _variant(candidate: Candidate, number: int, compiling: Compiling) -> ModelVariant:
    if candidate.plan.bindings:
        return ModelVariant(candidate.title, compiling, package=f"candidate_{number}")
    return ModelVariant(candidate.title, compiling, adapted=bool(candidate.plan.adaptations))
