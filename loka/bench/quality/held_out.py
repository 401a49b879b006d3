"""Held-out batches of a training job, for measuring what errors of GEMMs do to the loss of its trained model."""

from __future__ import annotations

from itertools import islice
from typing import Any

from torch import Tensor, nn

from loka.bench.quality.training import seeded
from loka.bench.quality.training_calls import LOSS, TEST, TrainingCallError, called, forward, pairs, to_device
from loka.bench.quality.training_job import TrainingJob
from loka.probe.capture.live_sites import find_live
from loka.probe.sensitivity import HeldOut
from loka.sites.site import Site

ROWS = 1024  # of a batch: the change of NE is an average over rows
LEAST = 2  # batches, for an interval


def held_out_of(job: TrainingJob, model: nn.Module, sites: tuple[Site, ...], seed: int, count: int) -> HeldOut:
    """The first `count` test batches of the job for its model, which is on the job's device.

    Raises TrainingCallError where there are fewer than LEAST, where the model's output in evaluation mode is no Tensor,
    or where the loss of it has not one number.
    """
    rows = min(job.test_batch_size, ROWS)
    with seeded(seed, job.device):
        found = list(islice(pairs(TEST, called(TEST, job.test_batches, rows, seed)), count))
    if len(found) < LEAST:
        raise TrainingCallError(TEST, f"{len(found)} test batches of {rows} rows are there, and {LEAST} are needed")
    batches = [(inputs, to_device(target, job.device)) for inputs, target in found]

    def run(inputs: Any) -> Tensor:
        with seeded(seed, job.device), job.precision():
            output = forward(TEST, model, inputs, job.device)
        if not isinstance(output, Tensor):
            raise TrainingCallError(TEST, f"the model returns a {type(output).__name__} in evaluation, and no Tensor")
        return output

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with job.precision():
            value = called(LOSS, job.loss, output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TrainingCallError(LOSS, "it returned no Tensor of one number")
        return value

    return HeldOut(find_live(model, sites), batches, run, loss)
