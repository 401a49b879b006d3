"""The training loop of `loka train`, `compare` and `probe`: a model alone, unpatched and patched, or watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.quality.evaluation import (
    auc,
    check_output,
    evaluation_batches,
    form_of,
    log_loss,
    normalised_entropy,
    predict,
    seeded,
)
from loka.bench.quality.training_calls import (
    BATCHES,
    LOSS,
    Inputs,
    TrainingCallError,
    backward,
    called,
    forward,
    movable,
    pairs,
    scalar,
)
from loka.bench.quality.training_job import Progress, TrainingJob
from loka.bench.quality.training_state import SharedStart, WeightAverage
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
    loop, average = _Loop(model, job), WeightAverage(model, job.ema)
    samples = shared = 0  # those of a shared start are not timed
    with seeded(seed, job.device):
        batches = called(BATCHES, job.batches, job.batch_size, seed)
        total = _samples_in_all(batches, job)
        if start is not None:
            average, loop.losses = start.restore(model, loop.optimizer), list(start.losses)
            samples = shared = start.samples
        model.train()
        _wait(job.device)
        began = time.perf_counter()
        for inputs, target in islice(pairs(BATCHES, batches), loop.steps, job.steps):
            _check_labels(target)
            loop.step(inputs, target)
            average.update()
            samples += target.shape[0]
            if keep is not None and loop.steps == job.shared_steps:
                loop.read()
                keep(SharedStart.of(model, loop.optimizer, average, loop.losses, samples))
                _wait(job.device)
                shared, began = samples, time.perf_counter()
            if progress is not None:
                progress(samples, total)
        loop.read()
        _wait(job.device)
        seconds = time.perf_counter() - began
        loop.end()
    if loop.steps <= job.shared_steps and job.shared_steps:
        raise TrainingCallError(
            BATCHES,
            f"the training batches end after {loop.steps} steps, and both runs share the first {job.shared_steps}: "
            "yield more, or share fewer (train.shared_steps)",
        )
    with average.applied(), job.precision():
        logits, target = predict(model, evaluation_batches(job, seed), job.device)
    return TrainResult(
        ne=normalised_entropy(logits, target),
        auc=auc(logits, target),
        log_loss=log_loss(logits, target),
        samples_per_second=(samples - shared) / seconds,
        steps=loop.steps,
        samples=samples,
        seconds=seconds,
        train_loss=_curve(loop.losses),
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


def train_watched(
    model: nn.Module,
    job: TrainingJob,
    batches: Iterable[tuple[Inputs, Tensor]],
    seed: int,
    stepped: Callable[[], object],
    progress: Callable[[int], None] | None = None,
) -> int:
    """Train `model`, which is on the job's device, in place on at most `job.steps` batches; returns their number.

    `stepped` is called after each optimizer step, as `Probe.step` wants it. `seed` sets the random numbers (dropout).
    Raises NonFiniteLossError at most CHECK_EVERY steps late, and InputError if there are no batches.
    """
    loop = _Loop(model, job)
    model.train()
    with seeded(seed, job.device):
        for inputs, target in islice(pairs(BATCHES, batches), job.steps):
            loop.step(inputs, movable(target))
            stepped()
            if progress is not None:
                progress(loop.steps)
    loop.end()
    return loop.steps


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


def _check_labels(target: object) -> None:
    """Raise InputError unless the target of a training batch is a Tensor with a row for each sample."""
    if not isinstance(target, Tensor) or target.dim() == 0:
        raise TrainingCallError(
            BATCHES,
            f"the training batches must yield (inputs, target) with one Tensor of a row for each sample, not "
            f"{form_of(target)}: in train.batches, give the labels of several heads as columns, torch.stack(labels, 1)",
        )


class _Loop:
    """The steps of a run. Losses are read from the device every CHECK_EVERY steps."""

    def __init__(self, model: nn.Module, job: TrainingJob) -> None:
        self.optimizer = job.make_optimizer(model)
        self.losses: list[float] = []
        self._unread: list[Tensor] = []
        self._model = model
        self._job = job

    @property
    def steps(self) -> int:
        """How many were done."""
        return len(self.losses) + len(self._unread)

    def step(self, inputs: Inputs, target: Tensor) -> None:
        """Train on a batch. Raises the errors of `read`."""
        job = self._job
        for group in self.optimizer.param_groups:
            group["lr"] = job.rate(self.steps + 1)
        self.optimizer.zero_grad(set_to_none=True)
        with job.precision():
            output = forward(BATCHES, self._model, inputs, job.device)
            loss = scalar(called(LOSS, job.loss, output, target.to(job.device)))
        backward(loss)
        self.optimizer.step()
        self._unread.append(loss.detach())
        if len(self._unread) == CHECK_EVERY:
            self.read()

    def read(self) -> None:
        """Move losses to the host. Raises NonFiniteLossError at the first that is not finite."""
        if not self._unread:
            return
        values = torch.stack(self._unread).float().cpu()
        finite = values.isfinite()
        if not bool(finite.all()):
            first = int((~finite).nonzero()[0])
            raise NonFiniteLossError(len(self.losses) + first + 1, float(values[first]))
        self.losses.extend(values.tolist())
        self._unread.clear()

    def end(self) -> None:
        """Read the last losses. Raises TrainingCallError if there were no batches."""
        self.read()
        if not self.losses:
            raise TrainingCallError(BATCHES, "the training batches are empty")


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


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
