"""The training loop of `loka train`, `compare` and `probe`: a model alone, unpatched and patched, or watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from loka.bench.quality.batch_checksums import BatchChecksums
from loka.bench.quality.evaluation import Metrics, check_output, evaluate, seeded
from loka.bench.quality.heads import ONLY
from loka.bench.quality.training_calls import (
    BATCHES,
    LOSS,
    Inputs,
    TrainingCallError,
    at,
    backward,
    called,
    forward,
    movable,
    moved,
    pairs,
    place_in_run,
    place_of_batch,
    samples_in,
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
            f"the loss is {value} at step {step}, the first that is not finite: lower the learning rate, "
            "or look for the first site that made it with patch.trace_nonfinite"
        )
        self.step = step

    def __str__(self) -> str:
        return f"training: {place_in_run(self)}{super().__str__()}"


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Result of one training run. NE, AUC and log loss: of the averaged weights, on the test rows; means over `heads`
    where the policy names some.
    """

    ne: float
    auc: float
    log_loss: float  # nats
    samples_per_second: float  # of the whole job: input, embeddings, optimiser and averaging included, evaluation not
    steps: int
    samples: int
    seconds: float  # of training
    train_loss: tuple[float, ...]  # mean over each tenth of the steps, in order; fewer where there are fewer steps
    heads: dict[str, Metrics] = field(default_factory=dict)  # of each that the policy names

    def of_head(self, head: str) -> TrainResult:
        """The result with the metrics of one head; of ONLY, as it is."""
        if head == ONLY:
            return self
        found = self.heads[head]
        return replace(self, ne=found.ne, auc=found.auc, log_loss=found.log_loss, heads={})


@dataclass(frozen=True, slots=True)
class PairResult:
    """Two runs from the same initial weights on the same batches. `draw`: see `train_pair`."""

    seed: int
    as_is: TrainResult
    patched: TrainResult
    batches: str  # checksum of the batches that both saw
    draw: int = 0

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that are judged: ONLY, or those that the policy names."""
        return tuple(self.as_is.heads) or (ONLY,)

    def of_head(self, head: str) -> PairResult:
        """The pair with the metrics of one head."""
        return replace(self, as_is=self.as_is.of_head(head), patched=self.patched.of_head(head))

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
    checksums: BatchChecksums | None = None,
) -> TrainResult:
    """Train `model`, in place, on the batches of `seed` and evaluate the averaged weights on the test batches.

    After `job.shared_steps` the state is passed to `keep`; with a `start` the run goes on from such a state. The rate
    is that of the steps after it.

    The model moves to `job.device` and keeps its own last weights. `seed` sets the random numbers of training
    (dropout); the caller's generators are unchanged. Raises NonFiniteLossError, and InputError if there are no batches,
    fewer than `job.steps`, or others than `checksums` expects, or the output is not one logit for each sample, which is
    checked on the first test batch before the first step.
    """
    model.to(job.device)
    check_output(model, job, seed)
    loop, average = _Loop(model, job, checksums), WeightAverage(model, job.ema)
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
            samples += loop.step(inputs, target)
            average.update()
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
    if job.steps is not None and loop.steps < job.steps:
        raise TrainingCallError(
            BATCHES,
            f"the training batches end after {loop.steps} steps, and {job.steps} are asked for: yield more, or ask for "
            "fewer (train.steps, --steps)",
        )
    with average.applied():
        found = evaluate(model, job, seed)
    return TrainResult(
        ne=fmean(each.ne for each in found.values()),
        auc=fmean(each.auc for each in found.values()),
        log_loss=fmean(each.log_loss for each in found.values()),
        samples_per_second=(samples - shared) / seconds,
        steps=loop.steps,
        samples=samples,
        seconds=seconds,
        train_loss=_curve(loop.losses),
        heads={head: each for head, each in found.items() if head != ONLY},
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
    "patched". Raises the errors of `train`, and InputError if two calls of the factory differ in their parameters, or
    the two runs saw different batches.
    """
    model = build(job, seed)
    _jitter(model, draw)
    initial = {name: value.detach().clone() for name, value in model.state_dict().items()}
    kept: list[SharedStart] = []
    keep = kept.append if job.shared_steps else None
    seen = BatchChecksums()
    with at(f"seed {seed}"):
        as_is = train(model, job, seed, _labelled(progress, "as it is"), keep=keep, checksums=seen)
    model = build(job, seed)
    try:
        model.load_state_dict(initial)
    except RuntimeError as error:
        raise InputError(f"model: two calls of the factory give different parameters: {error}") from error
    handle = patch(model)
    start, again = kept[0] if kept else None, BatchChecksums(seen.seen, job.shared_steps)
    with at(f"seed {seed}, patched"):
        patched = train(model, job, seed, _labelled(progress, "patched"), start, checksums=again)
    if check is not None:
        check(handle)
    return PairResult(seed, as_is, patched, seen.digest, draw)


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
            loop.step(inputs, target)
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


class _Loop:
    """The steps of a run. Losses are read from the device every CHECK_EVERY steps."""

    def __init__(self, model: nn.Module, job: TrainingJob, checksums: BatchChecksums | None = None) -> None:
        self.optimizer = job.make_optimizer(model)
        self.losses: list[float] = []
        self._unread: list[Tensor] = []
        self._model = model
        self._job = job
        self._checksums = checksums

    @property
    def steps(self) -> int:
        """How many were done."""
        return len(self.losses) + len(self._unread)

    def step(self, inputs: Inputs, target: Any) -> int:
        """Train on a batch; gives the number of its samples. Raises the errors of `read`."""
        with at(place_of_batch(BATCHES, self.steps + 1)):
            loss = self._step(inputs, target)
        self._unread.append(loss.detach())
        if len(self._unread) == CHECK_EVERY:
            self.read()
        rows = samples_in(target)
        return self._job.batch_size if rows is None else rows

    def _step(self, inputs: Inputs, target: Any) -> Tensor:
        job = self._job
        for group in self.optimizer.param_groups:
            group["lr"] = job.rate(self.steps + 1)
        self.optimizer.zero_grad(set_to_none=True)
        inputs, target = moved(BATCHES, inputs, job.device), moved(BATCHES, movable(target), job.device)
        if self._checksums is not None:
            self._checksums.add((inputs, target))  # before a forward could change them
        with job.precision():
            output = forward(BATCHES, self._model, inputs)
            loss = scalar(called(LOSS, job.loss, output, target))
        backward(loss)
        self.optimizer.step()
        return loss

    def read(self) -> None:
        """Move losses and checksums to the host.

        Raises TrainingCallError at the first batch that is not the expected one, and NonFiniteLossError at the first
        loss that is not finite.
        """
        if self._checksums is not None:
            self._checksums.read()
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
        """Read the last losses. Raises TrainingCallError if there were no batches, or fewer than expected."""
        self.read()
        if self._checksums is not None:
            self._checksums.end()
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
