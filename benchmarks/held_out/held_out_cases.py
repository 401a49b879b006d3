"""Models, data and sizes of the comparison of samplers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.quality.training_job import Batches, TrainingJob
from loka.errors import InputError
from loka.model.callables import find_callable

POLICY = """\
version: 1
name: held_out
model: {{factory: "{factory}", inputs: "{inputs}", batch_size: {batch_size}}}
train: {{batches: "{batches}", loss: "{loss}"}}
target: reference
defaults: {{compute: auto}}
"""


@dataclass(frozen=True, slots=True)
class StudyCase:
    """One model on one data set; callables are "package.module:name", as in a policy."""

    model: str
    data: str
    factory: str
    inputs: str
    batches: str
    test_batches: str  # must share no row with `batches`
    batch_size: int
    learning_rate: float
    steps: int
    loss: str = "loka.zoo:click_loss"

    @property
    def policy(self) -> str:
        """The text of a policy that probes this model."""
        return POLICY.format(
            factory=self.factory,
            inputs=self.inputs,
            batch_size=self.batch_size,
            batches=self.batches,
            loss=self.loss,
        )

    def job(self) -> TrainingJob:
        """The training job. Raises InputError if a callable cannot be found."""
        factory: Callable[[], nn.Module] = _found(self.factory)
        batches: Batches = _found(self.batches)
        test_batches: Batches = _found(self.test_batches)
        return TrainingJob(
            factory=factory,
            batches=batches,
            test_batches=test_batches,
            loss=_found(self.loss),
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            steps=self.steps,
        )


@dataclass(frozen=True, slots=True)
class StudySizes:
    """Numbers of watched steps, held-out batches and draws."""

    watched: int = 64  # number of last training steps that are watched
    every: int = 2  # one in `every` watched steps is sampled
    batches: int = 32  # held-out batches
    draws: int = 24  # sampled pairs of operands for each GEMM
    pooled: int = 8  # draws of operands assembled from single real rows
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("watched", 2), ("every", 2), ("batches", 1), ("draws", 1), ("pooled", 1), ("seed", 0)):
            value = getattr(self, name)
            if value < least:
                raise InputError(f"held-out comparison: {name} must be at least {least}, not {value}")


CASES = {
    "movietweetings_ranker": StudyCase(
        model="Wukong",
        data="MovieTweetings",
        factory="loka.zoo:movietweetings_ranker",
        inputs="loka.zoo:movietweetings_inputs",
        batches="loka.zoo:movietweetings_batches",
        test_batches="loka.zoo:movietweetings_test_batches",
        batch_size=256,
        learning_rate=3e-4,
        steps=312,
    ),
    "movietweetings_dlrm": StudyCase(
        model="DLRM-DCNv2",
        data="MovieTweetings",
        factory="loka.zoo:movietweetings_dlrm",
        inputs="loka.zoo:movietweetings_inputs",
        batches="loka.zoo:movietweetings_batches",
        test_batches="loka.zoo:movietweetings_test_batches",
        batch_size=256,
        learning_rate=3e-4,
        steps=312,
    ),
    "ranker": StudyCase(
        model="Wukong",
        data="embedded clicks",
        factory="loka.zoo:small_ranker",
        inputs="loka.zoo:ranker_inputs",
        batches="loka.zoo:ranker_batches",
        test_batches="loka.zoo:ranker_test_batches",
        batch_size=512,
        learning_rate=1e-3,
        steps=400,
    ),
    "dlrm": StudyCase(
        model="DLRM-DCNv2",
        data="embedded clicks",
        factory="loka.zoo:dlrm",
        inputs="loka.zoo:dlrm_inputs",
        batches="loka.zoo:dlrm_batches",
        test_batches="loka.zoo:dlrm_test_batches",
        batch_size=512,
        learning_rate=1e-3,
        steps=400,
    ),
}


def held_out_batches(job: TrainingJob, count: int, seed: int) -> list[tuple[Any, Tensor]]:
    """`count` batches of the training batch size from the test rows, in an order drawn from `seed`.

    Test rows may be in time order, which puts similar rows in one batch; training batches are shuffled, so these are
    too. Raises InputError if there are too few test rows, or the inputs are not tensors or a tuple of them.
    """
    # Read in large batches: the original order is lost when rows are shuffled.
    parts = list(job.test_batches(job.test_batch_size, seed))
    if not parts:
        raise InputError("held-out comparison: the test batches are empty")
    inputs = _joined([part[0] for part in parts])
    target = torch.cat([part[1] for part in parts])
    if len(target) < count * job.batch_size:
        raise InputError(
            f"held-out comparison: {count} batches of {job.batch_size} need {count * job.batch_size} test rows, and "
            f"there are {len(target)}; ask for fewer batches"
        )
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed))
    chosen = [order[i * job.batch_size : (i + 1) * job.batch_size] for i in range(count)]
    return [(tuple(part[rows] for part in inputs), target[rows]) for rows in chosen]


def training_batches(job: TrainingJob, count: int, seed: int) -> list[tuple[Any, Tensor]]:
    """The first `count` training batches."""
    return list(islice(job.batches(job.batch_size, seed), count))


def _joined(parts: list[Any]) -> tuple[Tensor, ...]:
    if all(isinstance(part, Tensor) for part in parts):
        return (torch.cat(parts),)
    if not all(isinstance(part, tuple | list) and all(isinstance(x, Tensor) for x in part) for part in parts):
        raise InputError("held-out comparison: a batch's inputs must be one tensor or a tuple of tensors")
    return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))


def _found(spec: str) -> Any:
    return find_callable(spec, "held-out comparison")[0]
