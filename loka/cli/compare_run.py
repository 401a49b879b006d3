"""The work of `loka compare`: train pairs, in this process or in several, and keep them in a file."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loka.bench.quality.batch_checksums import BatchChecksums
from loka.bench.quality.pair_file import COMPARE_FOLDER, TRAIN_FOLDER, PairFile, RunFacts
from loka.bench.quality.training import PairResult, build, train_pair
from loka.bench.quality.training_calls import BATCHES, TEST, at, called, pairs
from loka.bench.quality.training_job import TrainingJob, adapted_job
from loka.cli.train_and_compare import (
    AGAINST,
    ORIGINAL,
    ComparisonLabels,
    comparison_labels,
    fresh_package,
    load_package,
    make_job,
    patcher,
    training_of,
    verify,
)
from loka.errors import CheckFailedError, InputError, LokaError
from loka.model.callables import current_directory_importable
from loka.mods.adapt import adapt
from loka.mods.policy_loader import load_policy
from loka.plan.plan import Plan
from loka.plan.planner import make_plan
from loka.plan.serialize import from_json, plan_sha256, to_json
from loka.policy.policy import Policy
from loka.version import __version__

Told = Callable[[int, str, int, int | None], None]  # seed, "as it is" or "patched", samples done, samples in all


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared, in words that another process can open."""

    policy: str
    steps: int | None
    device: str
    against: str


@dataclass(frozen=True, slots=True)
class Opened:
    """A comparison with its model, package and data."""

    policy: Policy
    job: TrainingJob
    patch: Callable[[nn.Module], object]
    check: Callable[[object], None] | None
    labels: ComparisonLabels
    plan: Plan

    def train(self, seed: int, draw: int, told: Told | None = None) -> PairResult:
        """Train one pair. Raises the errors of `train_pair`, the user's own as InputErrors with a place."""
        progress = None if told is None else partial(told, seed)
        with current_directory_importable(), training_of(self.policy):
            return train_pair(self.job, self.patch, seed, progress, self.check, draw)

    def digest(self, seed: int) -> str:
        """What makes pairs comparable: plan, settings, versions, and the weights and batches that `seed` starts with.

        A change of the model's code or of the data beyond the first batches is not seen.
        """
        hashed = hashlib.sha256()
        settings = {key: str(value) for key, value in asdict_of(self.job).items()}
        hashed.update(
            json.dumps([__version__, torch.__version__, self.labels.first, to_json(self.plan), settings]).encode()
        )
        checksums = BatchChecksums()
        with current_directory_importable(), training_of(self.policy), at(f"seed {seed}"):
            checksums.add(sorted(build(self.job, seed).state_dict().items()))
            checksums.read()  # what follows is on another device
            for field, function in ((BATCHES, self.job.batches), (TEST, self.job.test_batches)):
                for batch in islice(pairs(field, called(field, function, self.job.batch_size, seed)), 1):
                    checksums.add(batch)
        checksums.read()
        hashed.update(checksums.digest.encode())
        return hashed.hexdigest()


def open_comparison(comparison: Comparison, plan: Plan | None = None) -> Opened:
    """Load the policy, its package and its training job; in another process quietly, with the `plan` of the first.

    On a GPU, training runs under autocast to bfloat16 unless the policy has `autocast: none`: FP8 is then compared
    with what it would replace. Raises what `make_plan`, `make_job` and `fresh_package` raise.
    """
    policy = load_policy(comparison.policy)
    job = make_job(policy, comparison.steps, comparison.device)
    if job.device != "cpu" and policy.train is not None and policy.train.autocast is None:
        job = replace(job, autocast=True)
    made = plan or make_plan(comparison.policy)
    labels = comparison_labels(made, comparison.against)
    if labels is ORIGINAL:
        return Opened(policy, job, partial(adapt, adaptations=made.adaptations), None, labels, made)
    package = fresh_package(made, comparison.policy) if plan is None else load_package(made.name)
    patch = patcher(package, quiet=plan is not None)
    return Opened(policy, adapted_job(job, made.adaptations), patch, verify, labels, made)


def pair_file(opened: Opened, first_seed: int, path: Path | None, budget_percent: float | None = None) -> PairFile:
    """The file of finished pairs: `path`, else one in COMPARE_FOLDER whose name has what is compared in it."""
    digest = opened.digest(first_seed)
    against = AGAINST[opened.labels is ORIGINAL]
    facts = RunFacts(
        plan_sha256(opened.plan), device_name(opened.job.device), against, budget_percent, opened.job.shared_steps
    )
    return PairFile(path or COMPARE_FOLDER / f"{opened.policy.name}-{digest[:8]}.jsonl", digest, facts)


def train_file(plan: Plan, job: TrainingJob) -> PairFile:
    """The file in TRAIN_FOLDER with the pairs of `loka train` for a plan, one for each choice of steps and device."""
    settings = {key: str(value) for key, value in asdict_of(job).items()}
    named = json.dumps([__version__, torch.__version__, plan_sha256(plan), settings])
    digest = hashlib.sha256(named.encode()).hexdigest()
    facts = RunFacts(plan_sha256(plan), device_name(job.device), shared_steps=job.shared_steps)
    return PairFile(TRAIN_FOLDER / f"{plan.name}-{digest[:8]}.jsonl", digest, facts)


def device_name(device: str) -> str:
    """The name of a device to train on: `cpu`, `NVIDIA H200`."""
    kind = torch.device(device).type
    return torch.cuda.get_device_name(device) if kind == "cuda" else kind


def trained_pairs(
    comparison: Comparison, opened: Opened, order: Sequence[tuple[int, int]], file: PairFile, jobs: int, told: Told
) -> Generator[PairResult, None, None]:
    """Yield the pair of each (seed, draw), in order: from the file, or trained and added to it.

    With several `jobs`, as many processes train side by side, each with its part of the threads; those that are not
    needed any more are ended when the generator is closed. Raises the errors of training.
    """
    if jobs == 1:
        for seed, draw in order:
            yield file.get(seed, draw) or _added(file, opened.train(seed, draw, told))
        return
    missing = deque(key for key in order if file.get(*key) is None)
    plan = to_json(opened.plan)
    with _processes(jobs) as pool:
        running: dict[tuple[int, int], Future[PairResult]] = {}
        for key in order:
            while missing and len(running) < 2 * jobs:  # one more each, so that none waits
                running[missing[0]] = pool.submit(_train, comparison, plan, jobs, *missing[0])
                missing.popleft()
            pair = file.get(*key)
            yield pair if pair is not None else _added(file, _result(running.pop(key)))


class TimeLeft:
    """How long the rest of a comparison takes, from the pairs that were trained so far; empty before the first."""

    def __init__(self, order: Sequence[tuple[int, int]], file: PairFile) -> None:
        self._start, self._before = time.monotonic(), len(file)
        self._file, self._total = file, len(order)

    def __str__(self) -> str:
        trained = len(self._file) - self._before
        if not trained:
            return ""
        left = max(0, self._total - len(self._file))
        seconds = (time.monotonic() - self._start) / trained * left
        return f"; at most {seconds / 60:.0f} min left" if seconds >= 60 else f"; at most {seconds:.0f} s left"


def asdict_of(job: TrainingJob) -> dict[str, Any]:
    """The settings of a job that are plain values: its callables are named by the policy."""
    return {key: value for key, value in asdict(job).items() if not callable(value)}


def _added(file: PairFile, pair: PairResult) -> PairResult:
    file.add(pair)
    return pair


@contextmanager
def _processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Context with a pool of processes, ended at its end whatever they do."""
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=_ignore_interrupts)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()


def _ignore_interrupts() -> None:
    """Ctrl-C goes to all processes of a terminal; the parent ends its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@lru_cache(maxsize=1)
def _opened_here(comparison: Comparison, plan: str, jobs: int) -> Opened:
    """The comparison in a process of its own, opened at its first pair, with the plan of the first process."""
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    return open_comparison(comparison, from_json(plan))


def _train(comparison: Comparison, plan: str, jobs: int, seed: int, draw: int) -> PairResult:
    """Train one pair in a process of its own. Raises InputError and CheckFailedError alone: others may not pickle."""
    try:
        return _opened_here(comparison, plan, jobs).train(seed, draw)
    except LokaError as error:
        kind = CheckFailedError if error.exit_status == CheckFailedError.exit_status else InputError
        raise kind(str(error)) from None


def _result(future: Future[PairResult]) -> PairResult:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise InputError(
            "compare: a training process was killed, probably for memory: use fewer --jobs; finished pairs are kept"
        ) from error
