"""The training loop of `loka train` and `loka compare`: train a model, or one unpatched and patched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.quality.click_metrics import auc, log_loss, normalised_entropy
from loka.bench.quality.ema import WeightAverage
from loka.bench.quality.shared_start import SharedStart
from loka.bench.quality.training_calls import (
    BATCHES,
    LOSS,
    TEST,
    TrainingCallError,
    backward,
    called,
    forward,
    pairs,
    scalar,
)
from loka.bench.quality.training_job import Inputs, Progress, TrainingJob
from loka.errors import CheckFailedError, InputError

CHECK_EVERY = 32  # steps between reads of the loss: on a GPU each read synchronises
CURVE_POINTS = 10
JITTER = 1e-6  # relative change of the weights between draws; coarser dtypes are changed by their last place


class NonFiniteLossError(CheckFailedError):
    """The training loss became infinite or NaN."""

    def __init__(self, step: int, value: float) -> None:
        super().__init__(
            f"training: the loss is {value} at step {step}, the first that is not finite: lower the learning rate, "
            "or look for the first site that made it with patch.trace_nonfinite"
        )
        self.step = step


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of one training run. NE, AUC and log loss: of the averaged weights, on the test rows."""

    ne: float
    auc: float
    log_loss: float  # nats
    samples_per_second: float  # of the whole job: input, embeddings, optimiser and averaging included, evaluation not
    steps: int
    samples: int
    seconds: float  # of training
    train_loss: tuple[float, ...]  # mean over each tenth of the steps, in order; fewer where there are fewer steps


@dataclass(frozen=True, slots=True)
class PairResult:
    """Two runs from the same initial weights on the same batches. `draw`: see `train_pair`."""

    seed: int
    as_is: TrainResult
    patched: TrainResult
    draw: int = 0

    @property
    def ne_difference_percent(self) -> float:
        """Relative difference of NE in percent, patched minus unpatched: positive is worse."""
        return 100 * (self.patched.ne - self.as_is.ne) / self.as_is.ne


def train(
    model: nn.Module,
    job: TrainingJob,
    seed: int,
    progress: Progress | None = None,
    start: SharedStart | None = None,
    keep: Callable[[SharedStart], None] | None = None,
) -> TrainResult:
    """Train `model`, in place, on the batches of `seed` and evaluate the averaged weights on the test batches.

    After `job.shared_steps` the state is passed to `keep`; with a `start` the run goes on from such a state. The rate
    is that of the steps after it.

    The model moves to `job.device` and keeps its own last weights. `seed` sets the random numbers of training
    (dropout); the caller's generators are unchanged. Raises NonFiniteLossError, and InputError if there are no batches
    or the output is not one logit for each sample, which is checked on the first test batch before the first step.
    """
    model.to(job.device)
    check_output(model, job, seed)
    with seeded(seed, job.device):
        fitted = _fit(model, job, seed, progress, start, keep)
    losses = fitted.losses
    with fitted.average.applied(), job.precision():
        logits, target = predict(model, _test_batches(job, seed), job.device)
    return TrainResult(
        ne=normalised_entropy(logits, target),
        auc=auc(logits, target),
        log_loss=log_loss(logits, target),
        samples_per_second=fitted.timed_samples / fitted.seconds,
        steps=len(losses),
        samples=fitted.samples,
        seconds=fitted.seconds,
        train_loss=_curve(losses),
    )


def train_pair(
    job: TrainingJob,
    patch: Callable[[nn.Module], object],
    seed: int,
    progress: Callable[[str, int, int | None], None] | None = None,
    check: Callable[[object], None] | None = None,
    draw: int = 0,
) -> PairResult:
    """Train the factory's model unpatched, then patched, from the same weights on the same batches.

    A `draw` above 0 changes the initial weights of both by about JITTER: nothing that matters, but roundings to FP8
    fall otherwise from there on, so that several draws of one seed show how far they move the result.

    The first `job.shared_steps` are trained once, unpatched, and both go on from there.

    `patch(model)` changes the model in place; its result is passed to `check` after the patched model is trained and
    evaluated (for example to call `loka.dispatch.Patch.verify`). The first argument of `progress` is "as it is" or
    "patched". Raises the errors of `train`, and InputError if two calls of the factory differ in their parameters.
    """
    model = build(job, seed)
    _jitter(model, draw)
    initial = {name: value.detach().clone() for name, value in model.state_dict().items()}
    kept: list[SharedStart] = []
    keep = kept.append if job.shared_steps else None
    as_is = train(model, job, seed, _labelled(progress, "as it is"), keep=keep)
    model = build(job, seed)
    try:
        model.load_state_dict(initial)
    except RuntimeError as error:
        raise InputError(f"model: two calls of the factory give different parameters: {error}") from error
    handle = patch(model)
    patched = train(model, job, seed, _labelled(progress, "patched"), start=kept[0] if kept else None)
    if check is not None:
        check(handle)
    return PairResult(seed, as_is, patched, draw)


def check_output(model: nn.Module, job: TrainingJob, seed: int) -> None:
    """Predict the first test batch, so that a wrong output fails before training. Raises the errors of `predict`."""
    with seeded(seed, job.device), job.precision():
        predict(model, islice(_test_batches(job, seed), 1), job.device)


def _test_batches(job: TrainingJob, seed: int) -> Iterator[tuple[Inputs, Tensor]]:
    return pairs(TEST, called(TEST, job.test_batches, job.test_batch_size, seed))


def build(job: TrainingJob, seed: int) -> nn.Module:
    """The factory's model with the initial weights of `seed`, on the job's device."""
    with seeded(seed, job.device):
        return job.factory().to(job.device)


@torch.no_grad()
def _jitter(model: nn.Module, draw: int) -> None:
    """Multiply the weights by 1 + JITTER * n, n normal and drawn from `draw`; draw 0 leaves them as they are."""
    if draw == 0:
        return
    generator = torch.Generator().manual_seed(draw)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            size = max(JITTER, torch.finfo(parameter.dtype).eps)
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.mul_((1 + size * noise).to(parameter.dtype))


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
            f"{_form(target)}: NE and AUC are of one label for each sample; in train.test, yield that label alone"
        )
    if not isinstance(output, Tensor) or output.numel() != target.numel():
        raise InputError(
            f"in evaluation mode the model must return one logit for each sample, (R,) or (R, 1), not {_form(output)} "
            f"for a target of {_form(target)}: NE and AUC are of one logit; a model of several heads returns the one "
            "to compare where self.training is False, and train.loss reads the others while it trains"
        )


def _check_labels(target: object) -> None:
    """Raise InputError unless the target of a training batch is a Tensor with a row for each sample."""
    if not isinstance(target, Tensor) or target.dim() == 0:
        raise TrainingCallError(
            BATCHES,
            f"the training batches must yield (inputs, target) with one Tensor of a row for each sample, not "
            f"{_form(target)}: in train.batches, give the labels of several heads as columns, torch.stack(labels, 1)",
        )


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A run: the loss of every step, the averaged weights, and the seconds of the samples that are timed."""

    losses: list[float]
    average: WeightAverage
    samples: int
    timed_samples: int  # without those of a shared start
    seconds: float


def _fit(
    model: nn.Module,
    job: TrainingJob,
    seed: int,
    progress: Progress | None,
    start: SharedStart | None,
    keep: Callable[[SharedStart], None] | None,
) -> _Fitted:
    """The loop itself. See `train`."""
    optimizer = job.make_optimizer(model)
    average = start.restore(model, optimizer) if start is not None else WeightAverage(model, job.ema)
    batches = called(BATCHES, job.batches, job.batch_size, seed)
    total = _samples_in_all(batches, job)
    losses = list(start.losses) if start is not None else []
    unread: list[Tensor] = []
    steps, samples = len(losses), start.samples if start is not None else 0
    before = samples
    model.train()
    _wait(job.device)
    began = time.perf_counter()
    for inputs, target in islice(pairs(BATCHES, batches), steps, job.steps):
        _check_labels(target)
        for group in optimizer.param_groups:
            group["lr"] = job.rate(steps + 1)
        optimizer.zero_grad(set_to_none=True)
        with job.precision():
            output = forward(BATCHES, model, inputs, job.device)
            loss = scalar(called(LOSS, job.loss, output, target.to(job.device)))
        backward(loss)
        optimizer.step()
        average.update()
        unread.append(loss.detach())
        samples, steps = samples + target.shape[0], steps + 1
        if len(unread) == CHECK_EVERY:
            _read(unread, losses)
        if keep is not None and steps == job.shared_steps:
            _read(unread, losses)
            keep(SharedStart.of(model, optimizer, average, losses, samples))
            _wait(job.device)
            before, began = samples, time.perf_counter()
        if progress is not None:
            progress(samples, total)
    _read(unread, losses)
    _wait(job.device)
    seconds = time.perf_counter() - began
    if not losses:
        raise TrainingCallError(BATCHES, "the training batches are empty")
    if steps <= job.shared_steps and job.shared_steps:
        raise TrainingCallError(
            BATCHES,
            f"the training batches end after {steps} steps, and both runs share the first {job.shared_steps}: yield "
            "more, or share fewer (train.shared_steps)",
        )
    return _Fitted(losses, average, samples, samples - before, seconds)


def _read(unread: list[Tensor], losses: list[float]) -> None:
    """Move losses to the host. Raises NonFiniteLossError at the first that is not finite."""
    if not unread:
        return
    values = torch.stack(unread).float().cpu()
    finite = values.isfinite()
    if not bool(finite.all()):
        first = int((~finite).nonzero()[0])
        raise NonFiniteLossError(len(losses) + first + 1, float(values[first]))
    losses.extend(values.tolist())
    unread.clear()


def _samples_in_all(batches: Iterable[Any], job: TrainingJob) -> int | None:
    """Number of samples for a progress bar: exact if the batches have `samples`, None if their length is unknown."""
    length = len(batches) if isinstance(batches, Sized) else None
    if job.steps is not None:
        length = job.steps if length is None else min(job.steps, length)
    if length is None:
        return None
    bound: int = length * job.batch_size
    return min(bound, getattr(batches, "samples", bound))


def _curve(losses: list[float]) -> tuple[float, ...]:
    points = min(CURVE_POINTS, len(losses))
    edges = [len(losses) * i // points for i in range(points + 1)]
    return tuple(sum(losses[a:b]) / (b - a) for a, b in pairwise(edges))


def _labelled(progress: Callable[[str, int, int | None], None] | None, label: str) -> Progress | None:
    if progress is None:
        return None
    return lambda done, total: progress(label, done, total)


def _form(value: object) -> str:
    """A value as shown in a message: the shape of a Tensor, or a container of shapes."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(f'{name}: {_form(each)}' for name, each in value.items())}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {' and '.join(map(_form, value))}"
    return type(value).__name__


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Context in which torch's generators start at `seed`; the caller's state is restored after."""
    cuda = torch.device(device).type == "cuda"
    with torch.random.fork_rng(devices=[torch.device(device)] if cuda else []):
        torch.manual_seed(seed)
        yield
