"""Whole training steps of candidate plans, timed in turns with the model as it is."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch._inductor import config

from loka.bench.device import BenchDevice, KernelSum
from loka.bench.model.model_report import StepOutcome
from loka.bench.model.model_run import BlockRun, RunLimits
from loka.bench.model.model_subject import ModelSubject
from loka.bench.model.model_variants import (
    MODEL_BASELINE,
    Casting,
    Compiling,
    ModelVariant,
    StepBlock,
    StepLaunch,
    in_measuring_order,
)
from loka.bench.packages import Workshop
from loka.bench.timing import Progress
from loka.bench.tune.warming import Warmer, Warming
from loka.devices.spec import Execution
from loka.model.callables import current_directory_importable
from loka.plan.tuning.candidates import Candidate
from loka.policy.policy import Policy

COUNTERS = 100_000  # ids of counters between those of two candidates: more than a model's GEMMs


Measure = Callable[[Sequence[Candidate], RunLimits], Mapping[str, StepOutcome]]  # by title, and of MODEL_BASELINE

_WAYS = {
    Execution.EAGER: (Compiling.EAGER, StepLaunch.LOOP),
    Execution.COMPILED: (Compiling.DEFAULT, StepLaunch.LOOP),
    Execution.REDUCE_OVERHEAD: (Compiling.DEFAULT, StepLaunch.REDUCE_OVERHEAD),
    Execution.GRAPH: (Compiling.DEFAULT, StepLaunch.CAPTURED),
}


class TimedDevice(BenchDevice):
    """The current CUDA device, where steps are timed and no profiler looks at their kernels.

    Inductor's choices between forms of a kernel are not kept on disk: those of processes that compile side by side are
    timed while others use the device. The code itself is kept, whatever this says.
    """

    @contextmanager
    def session(self) -> Iterator[None]:
        inductor: Any = config
        with super().session(), inductor.patch(autotune_local_cache=False):
            yield

    def kernels(self, step: Callable[[], object]) -> KernelSum | None:
        return None


@dataclass(slots=True)
class StepMeasurer:
    """Measures candidates on a device: forward, loss, backward and optimiser, under autocast to bfloat16.

    `synthetic`: on the model's example inputs with a synthetic loss. `jobs`: the most processes that compile candidates
    ahead, with 1 none; None: as many as there are cores.
    """

    policy: Policy
    device: BenchDevice
    progress: Progress
    synthetic: bool = False
    jobs: int | None = None
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # of candidates

    def __call__(self, candidates: Sequence[Candidate], limits: RunLimits) -> Mapping[str, StepOutcome]:
        """The steps, by the candidates' titles, as far as there is time.

        A candidate that replaces nothing is the model as it is, and has its steps. Raises InputError if the model
        cannot be built, or its training functions cannot be used.
        """
        compiling, launch = _WAYS[self.policy.measured_execution]
        block = StepBlock(Casting.AUTOCAST, True, launch)
        baseline = ModelVariant(MODEL_BASELINE, compiling)
        # Dynamo keeps guards on modules by name: a package of a later run needs another.
        variants = {each.title: _variant(each, next(self.numbers), compiling) for each in candidates}
        plans = {
            variants[each.title].package or "": replace(each.plan, tuned=None)
            for each in candidates
            if variants[each.title].package is not None
        }
        found: dict[str, StepOutcome] = {}
        with (
            current_directory_importable(),
            Workshop() as workshop,
            self.device.session(),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", module=r"torch\.")  # the compiler's, of each candidate again
            subject = ModelSubject(self.policy, workshop, plans, self.synthetic)
            subject.sample(True)  # its mistakes are the user's, and no candidate's
            different = [each for each in variants.values() if each.package is not None or each.adapted]
            warming = Warming(self.policy, workshop.folder, block, self.device, self.synthetic)
            warmer = Warmer(warming, subject, plans, self.jobs, self.progress)
            run = BlockRun(subject, block, self.device, limits, self.progress)
            order = in_measuring_order([baseline, *different], launch)
            ahead = 1  # how many of them were compiled in other processes, or will not be; the first is the baseline
            peak_mib: float | None = None
            for outcome in run.outcomes(order):
                if outcome.variant == MODEL_BASELINE and outcome.figures is not None:
                    peak_mib = outcome.figures.peak_mib
                found[outcome.variant] = outcome
                if len(found) == ahead < len(order):  # the next one was not seen to yet
                    ahead += max(1, warmer.wave(order[ahead:], peak_mib, limits))
        for title, variant in variants.items():
            if variant not in different and MODEL_BASELINE in found:
                found[title] = found[MODEL_BASELINE]
        return found

    @property
    def words(self) -> str:
        """What a step is."""
        train = self.policy.train
        loss = "a synthetic loss" if self.synthetic or train is None else "the policy's loss"
        return f"forward, {loss}, backward, {'adam' if self.synthetic or train is None else train.optimizer or 'adam'}"


def _variant(candidate: Candidate, number: int, compiling: Compiling) -> ModelVariant:
    if candidate.plan.bindings:
        package, counters = f"candidate_{number}", COUNTERS * number
        return ModelVariant(candidate.title, compiling, package=package, counters=counters)
    return ModelVariant(candidate.title, compiling, adapted=bool(candidate.plan.adaptations))
