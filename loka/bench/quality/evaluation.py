"""Evaluation of a model: its logits on test batches, and log loss, normalised entropy (NE) and AUC of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.quality.training_calls import LOSS, TEST, Inputs, TrainingCallError, called, forward, pairs, to_device
from loka.bench.quality.training_job import TrainingJob
from loka.errors import InputError
from loka.graph.sites.site import Site
from loka.probe.capture.live_sites import find_live
from loka.probe.sensitivity import HeldOut

ROWS = 1024  # of a batch: the change of NE is an average over rows
LEAST = 2  # batches, for an interval


def log_loss(logits: Tensor, target: Tensor) -> float:
    """Mean binary cross-entropy in nats of logits (R,) against clicks in {0, 1} (R,), in float64."""
    logits, target = _pair(logits, target)
    return float(torch.nn.functional.binary_cross_entropy_with_logits(logits, target))


def base_entropy(target: Tensor) -> float:
    """Entropy in nats of the share of clicks: the log loss of predicting that share for every row.

    Raises InputError if all targets are equal: the entropy is 0.
    """
    share = float(target.double().mean())
    if not 0 < share < 1:
        raise InputError(f"normalised entropy needs clicks and non-clicks, but the share of clicks is {share:g}")
    return -share * math.log(share) - (1 - share) * math.log1p(-share)


def normalised_entropy(logits: Tensor, target: Tensor) -> float:
    """Log loss over the entropy of the base rate of the same rows (He et al., ADKDD 2014).

    1 is no better than predicting the base rate, 0 is perfect. Raises InputError for different shapes, for no rows,
    and if all targets are equal.
    """
    return log_loss(logits, target) / base_entropy(target)


def auc(scores: Tensor, target: Tensor) -> float:
    """Probability that a click scores above a non-click; ties count one half. Exact, in O(R log R).

    scores and target (clicks in {0, 1}) are (R,). Raises InputError as `normalised_entropy` does.
    """
    scores, target = _pair(scores, target)
    clicks = int(target.sum())
    others = len(target) - clicks
    if clicks == 0 or others == 0:
        raise InputError(f"AUC needs clicks and non-clicks, but there are {clicks} and {others}")
    _, place, count = torch.unique(scores, return_inverse=True, return_counts=True)  # sorted: ties share a place
    before = count.cumsum(0) - count
    doubled_rank = 2 * before + count + 1  # of one row among ties, from 1; doubled to stay whole
    doubled_sum = int((doubled_rank[place] * target.long()).sum())
    return (doubled_sum / 2 - clicks * (clicks + 1) / 2) / (clicks * others)


def _pair(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64. Raises InputError unless they are non-empty vectors of one length and the target is 0 or 1."""
    if scores.dim() != 1 or scores.shape != target.shape or len(target) == 0:
        raise InputError(
            "scores and target must be two vectors of one length, at least 1, "
            f"not {tuple(scores.shape)} and {tuple(target.shape)}"
        )
    target = target.double()
    if not bool(((target == 0) | (target == 1)).all()):
        raise InputError("target must hold only 0 (no click) and 1 (click)")
    return scores.double(), target


def check_output(model: nn.Module, job: TrainingJob, seed: int) -> None:
    """Predict the first test batch, so that a wrong output fails before training. Raises the errors of `predict`."""
    with seeded(seed, job.device), job.precision():
        predict(model, islice(evaluation_batches(job, seed), 1), job.device)


def evaluation_batches(job: TrainingJob, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
    """The job's test batches."""
    return pairs(TEST, called(TEST, job.test_batches, job.test_batch_size, seed))


@torch.no_grad()
def predict(model: nn.Module, batches: Iterable[tuple[Inputs, Tensor]], device: str) -> tuple[Tensor, Tensor]:
    """Logits and targets (R,) of all rows on the CPU, float32, in evaluation mode; the model's mode is restored.

    Raises InputError if there is no batch, or an output is not one logit for each sample.
    """
    was_training = model.training
    model.eval()
    logits: list[Tensor] = []
    targets: list[Tensor] = []
    try:
        for inputs, target in batches:
            output = forward(TEST, model, inputs, device)
            _check_one_logit(output, target)
            logits.append(output.float().flatten().cpu())
            targets.append(target.float().flatten().cpu())
    finally:
        model.train(was_training)
    if not logits:
        raise TrainingCallError(TEST, "the test batches are empty")
    return torch.cat(logits), torch.cat(targets)


def _check_one_logit(output: object, target: object) -> None:
    """Raise InputError unless there is one logit for each sample; only evaluation requires it, the loss does not."""
    if not isinstance(target, Tensor):
        raise InputError(
            f"the test batches must yield (inputs, target) with one Tensor of labels, (R,) or (R, 1), not "
            f"{form_of(target)}: NE and AUC are of one label for each sample; in train.test, yield that label alone"
        )
    if not isinstance(output, Tensor) or output.numel() != target.numel():
        raise InputError(
            "in evaluation mode the model must return one logit for each sample, (R,) or (R, 1), not "
            f"{form_of(output)} for a target of {form_of(target)}: NE and AUC are of one logit; a model of several "
            "heads returns the one to compare where self.training is False, and train.loss reads the others while it "
            "trains"
        )


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


def form_of(value: object) -> str:
    """A value as shown in a message: the shape of a Tensor, or a container of shapes."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(f'{name}: {form_of(each)}' for name, each in value.items())}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {' and '.join(map(form_of, value))}"
    return type(value).__name__


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Context in which torch's generators start at `seed`; the caller's state is restored after."""
    cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[torch.device(device)] if cuda else []):
        torch.manual_seed(seed)
        yield
