"""Evaluation of a model: its logits on test batches, and log loss, normalised entropy (NE) and AUC of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from loka.bench.quality.heads import Head, are_labels, by_head
from loka.bench.quality.training_calls import (
    LOSS,
    TEST,
    Inputs,
    TrainingCallError,
    at,
    called,
    forward,
    moved,
    pairs,
    place_of_batch,
    samples_in,
)
from loka.bench.quality.training_job import TrainingJob
from loka.errors import InputError
from loka.graph.sites.site import Site
from loka.probe.capture.live_sites import find_live
from loka.probe.sensitivity import HeldOut, LossFunction

ROWS = 1024  # of a batch: the change of NE is an average over rows
LEAST = 2  # batches, for an interval
MOST_ROWS = 1 << 24  # of test batches without a length: more are taken for endless


def log_loss(logits: Tensor, target: Tensor) -> float:
    """Mean binary cross-entropy in nats of logits (R,) against clicks in {0, 1} (R,), in float64."""
    logits, target = _pair(logits, target)
    return float(binary_cross_entropy_with_logits(logits, target))


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
    if not are_labels(target):
        raise InputError("target must hold only 0 (no click) and 1 (click)")
    return scores.double(), target


def check_output(model: nn.Module, job: TrainingJob, seed: int) -> None:
    """Predict the first test batch, so that a wrong output fails before training. Raises the errors of `predict`."""
    with seeded(seed, job.device), job.precision():
        predict(model, islice(evaluation_batches(job, seed), 1), job.device, job.heads)


def evaluation_batches(job: TrainingJob, seed: int) -> Iterator[tuple[Inputs, Any]]:
    """The job's test batches. Raises TrainingCallError where they have no length, and do not end after MOST_ROWS."""
    found = called(TEST, job.test_batches, job.test_batch_size, seed)
    rows = 0
    for number, (inputs, target) in enumerate(pairs(TEST, found)):
        if rows >= MOST_ROWS and not isinstance(found, Sized):
            raise TrainingCallError(
                TEST,
                f"the test batches have not ended after {number} with {rows} rows: end them, as with "
                "itertools.islice, or return something that has a length, which is believed",
            )
        yield inputs, target
        rows += samples_in(target) or 0


@torch.no_grad()
def predict(
    model: nn.Module, batches: Iterable[tuple[Inputs, Any]], device: str, heads: Sequence[Head] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits and targets (R,) of all rows of each head, by name, on the CPU, float32, in evaluation mode.

    The model's mode is restored. Raises TrainingCallError if there is no batch, and as `by_head`.
    """
    was_training = model.training
    model.eval()
    found: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    try:
        for number, (inputs, target) in enumerate(batches, 1):
            with at(place_of_batch(TEST, number)):
                output = forward(TEST, model, moved(TEST, inputs, device))
                for head, both in by_head(output, target, heads).items():
                    for parts, tensor in zip(found.setdefault(head, ([], [])), both, strict=True):
                        parts.append(tensor.float().flatten().cpu())
    finally:
        model.train(was_training)
    if not found:
        raise TrainingCallError(TEST, "the test batches are empty")
    return {head: (torch.cat(logits), torch.cat(targets)) for head, (logits, targets) in found.items()}


@dataclass(frozen=True, slots=True)
class Metrics:
    """How well logits of the test rows predict their labels."""

    ne: float
    auc: float
    log_loss: float  # nats


def evaluate(model: nn.Module, job: TrainingJob, seed: int) -> dict[str, Metrics]:
    """The metrics of each head on the job's test batches. Raises TrainingCallError as `predict`, and without clicks."""
    with job.precision():
        predicted = predict(model, evaluation_batches(job, seed), job.device, job.heads)
    found = {}
    for head, (logits, target) in predicted.items():
        try:
            found[head] = Metrics(normalised_entropy(logits, target), auc(logits, target), log_loss(logits, target))
        except InputError as error:
            raise TrainingCallError(TEST, f"head {head}: {error}" if head else str(error)) from error
    return found


def held_out_of(job: TrainingJob, model: nn.Module, sites: tuple[Site, ...], seed: int, count: int) -> HeldOut:
    """The first `count` test batches of the job for its model, which is on the job's device.

    Raises TrainingCallError where there are fewer than LEAST, or where the loss has not one number.
    """
    rows = min(job.test_batch_size, ROWS)
    with seeded(seed, job.device):
        found = list(islice(pairs(TEST, called(TEST, job.test_batches, rows, seed)), count))
    if len(found) < LEAST:
        raise TrainingCallError(TEST, f"{len(found)} test batches of {rows} rows are there, and {LEAST} are needed")
    batches = [(inputs, moved(TEST, target, job.device)) for inputs, target in found]

    def run(inputs: Any) -> Any:
        with seeded(seed, job.device), job.precision():
            return forward(TEST, model, moved(TEST, inputs, job.device))

    def loss(output: Any, target: Any) -> Tensor:
        with job.precision():
            value = called(LOSS, job.loss, output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise TrainingCallError(LOSS, "it returned no Tensor of one number")
        return value

    def loss_of(head: Head) -> LossFunction:
        def of_head(output: Any, target: Any) -> Tensor:
            ((logits, labels),) = by_head(output, target, (head,)).values()
            return binary_cross_entropy_with_logits(logits.float().flatten(), labels.float().flatten())

        return of_head

    return HeldOut(find_live(model, sites), batches, run, loss, tuple(map(loss_of, job.heads)))


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Context in which torch's generators start at `seed`; the caller's state is restored after."""
    cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[torch.device(device)] if cuda else []):
        torch.manual_seed(seed)
        yield
