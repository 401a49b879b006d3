"""The work of `loka probe`: train with a Probe, then estimate errors and collect findings."""

from __future__ import annotations

import time
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from loka.cli.output import note
from loka.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from loka.bench.quality.training_job import TrainingJob
    from loka.plan.examine import Examined
    from loka.probe.finding_evidence import BiasTrack
    from loka.probe.probe import Probe
    from loka.probe.profile.profile import RecordedStats
    from loka.probe.sensitivity import HeldOut

STEPS = 80  # default if neither the command line nor the policy gives a number
SAMPLES = 20  # least number of samples without --every
SYNTHETIC = 8  # steps of a synthetic job, each a sample: drawn gradients do not change from step to step
SAVE_SAMPLES = 5  # samples between saves: a killed run loses at most these
ROWS = 512  # sampled from each call: many, because a short run has few samples
NE_BATCHES = 4  # held-out batches on which the change of NE is measured
NE_SECONDS = 300.0  # after which its measurement begins no further site


@dataclass(frozen=True, slots=True)
class Learned:
    """Statistics from training; complete, with estimates and findings, once `finish`ed. `seconds` by stage."""

    recorded: RecordedStats
    biases: dict[str, BiasTrack]
    seconds: dict[str, float]


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """Ctrl-C, with the statistics recorded so far or None."""

    def __init__(self, recorded: RecordedStats | None) -> None:
        super().__init__("interrupted")
        self.recorded = recorded


def record(
    examined: Examined,
    steps: int | None,
    every: int | None,
    seed: int,
    device: str,
    path: Path | None = None,
    ne_batches: int = 0,
    synthetic: bool = False,
) -> Learned:
    """Train the policy's model with a Probe, and measure the change of NE on `ne_batches` held-out batches, if any.

    With `synthetic` it trains on example inputs and random labels (`synthetic_job`), which have no NE.

    Samples are saved to `path` in the background, every SAVE_SAMPLES samples and at the end, so that a killed run
    leaves them, even during estimation. A run that fails or is interrupted before the first sample leaves no file.

    Raises Interrupted, NonFiniteLossError, and InputError if the policy cannot train, no site can be watched, or no
    step was sampled.
    """
    from loka.bench.quality.training import build, train_watched
    from loka.bench.quality.training_calls import BATCHES, at, called
    from loka.bench.quality.training_job import adapted_job, synthetic_job
    from loka.cli.output import Shown
    from loka.cli.train_and_compare import choose_device, make_job, training_of
    from loka.model.callables import current_directory_importable
    from loka.probe.finding_evidence import read_biases, track_biases
    from loka.probe.probe import Probe

    policy = examined.policy
    _check_watchable(examined)
    tested = ne_batches > 0 and policy.train is not None and policy.train.test is not None
    if synthetic:
        with current_directory_importable():
            plain = synthetic_job(examined, steps, choose_device(device))
    else:
        plain = make_job(policy, steps, device, tested=tested)
    job = adapted_job(plain, examined.adapted.adaptations)
    start = time.perf_counter()
    with current_directory_importable(), training_of(policy), at(f"seed {seed}"), Shown("steps") as shown:
        batches = called(BATCHES, job.batches, job.batch_size, seed)
        total = len(batches) if isinstance(batches, Sized) else None
        most = SYNTHETIC if synthetic else STEPS
        wanted = job.steps if job.steps is not None else min(most, total or most)
        total = wanted if total is None else min(wanted, total)
        one_in = every if every is not None else max(1, total // SAMPLES)
        job = replace(job, steps=wanted)
        model = build(job, seed)
        before = read_biases(model, examined.sites)
        probe = Probe(model, policy.path, every=one_in, rows=ROWS, path=path, save_every=SAVE_SAMPLES * one_in)
        try:
            judged = _Judged.of(examined, job, model, seed if tested else seed ^ 1, ne_batches) if ne_batches else None
            with probe:
                done = train_watched(
                    model, job, batches, seed, probe.step, lambda n: shown.update("training", n, total)
                )
        except KeyboardInterrupt as stopped:
            if probe.samples == 0:
                _remove(path)
            raise Interrupted(_recorded(probe, path) if probe.samples else None) from stopped
        except BaseException:
            _remove(path)
            raise
        recorded = _recorded(probe, path)
        recorded = replace(recorded, profile=replace(recorded.profile, synthetic=synthetic))
        biases = track_biases(before, read_biases(model, examined.sites))
    if recorded.profile.samples == 0:
        _remove(path)
        raise InputError(
            f"no step was sampled: training had {done} steps and one in {one_in} is sampled; lower --every"
        )
    if done < wanted and plain.steps is not None:
        note(f"note: the batches ended after {done} of {wanted} steps")
    seconds = {"training": time.perf_counter() - start}
    if judged is not None:
        start = time.perf_counter()
        recorded = judged.with_ne(recorded, examined)
        seconds["NE"] = time.perf_counter() - start
    return Learned(recorded, biases, seconds)


@dataclass(frozen=True, slots=True)
class _Judged:
    """Held-out batches of the model that trains, and its loss on them before."""

    held_out: HeldOut
    first_loss: float

    @classmethod
    def of(cls, examined: Examined, job: TrainingJob, model: nn.Module, seed: int, batches: int) -> _Judged | None:
        """None, with a note, where the model cannot be evaluated. Without test rows, `seed` is of another stream."""
        from loka.bench.quality.evaluation import held_out_of

        try:
            held_out = held_out_of(job, model, examined.sites, seed, batches)
            return cls(held_out, held_out.mean_loss())
        except Exception as error:  # noqa: BLE001 - the user's model, batches and loss can raise anything
            _note_without_ne(error)
            return None

    def with_ne(self, recorded: RecordedStats, examined: Examined) -> RecordedStats:
        """The record with changes of NE; as it is, with a note, where the trained model cannot be evaluated.

        Raises Interrupted with the record.
        """
        from loka.cli.output import Shown
        from loka.model.callables import current_directory_importable
        from loka.probe.learn import with_ne

        try:
            with current_directory_importable(), Shown("sites") as shown:
                reached = (0, 0)

                def progress(done: int, total: int) -> None:
                    nonlocal reached
                    reached = (done, total)
                    shown.update("measuring NE", done, total)

                given = (self.held_out, self.first_loss, progress, NE_SECONDS)
                learned = with_ne(recorded, examined.sites, examined.settings, *given)
        except KeyboardInterrupt as stopped:
            raise Interrupted(recorded) from stopped
        except Exception as error:  # noqa: BLE001 - as above
            _note_without_ne(error)
            return recorded
        done, total = reached
        if done < total:
            note(
                f"note: within {NE_SECONDS:g} s the change of NE was measured at the {done} of {total} sites with the "
                "most FLOPs; the others count as unknown in plans (fewer --ne-batches reach more)"
            )
        return learned


def _note_without_ne(error: Exception) -> None:
    from loka.model.callables import describe_error

    why = str(error) if isinstance(error, InputError) else describe_error(error)
    note(f"note: the profile has no changes of NE: {why}")


def _recorded(probe: Probe, path: Path | None) -> RecordedStats:
    """Statistics of a closed Probe, from its file if there is one."""
    from loka.probe.profile import profile_file
    from loka.probe.profile.profile import RecordedStats

    if path is not None:
        saved = profile_file.load(path)
        if isinstance(saved, RecordedStats):
            return saved
    return probe.recorded()


def _remove(path: Path | None) -> None:
    if path is not None:
        path.unlink(missing_ok=True)


def finish(examined: Examined, learned: Learned, draws: int | None, seed: int) -> Learned:
    """Estimate each GEMM's error under each recipe, with at most `draws` draws, and collect findings.

    Raises Interrupted with the recorded statistics, and InputError.
    """
    from loka.cli.output import Shown
    from loka.mods.suggestions import suggestible_mods
    from loka.probe.learn import LIMIT
    from loka.probe.learn import finish as learn

    start = time.perf_counter()
    try:
        with Shown("sites") as shown:
            recorded = learn(
                learned.recorded,
                examined.sites,
                examined.settings,
                batch_size=learned.recorded.profile.batch_size,
                limit=LIMIT if draws is None else draws,
                seed=seed,
                bias_norms=learned.biases,
                suggestible=suggestible_mods(examined.built),
                progress=lambda done, total: shown.update("estimating", done, total),
            )
    except KeyboardInterrupt as stopped:
        raise Interrupted(learned.recorded) from stopped
    return Learned(recorded, learned.biases, learned.seconds | {"estimating": time.perf_counter() - start})


def _check_watchable(examined: Examined) -> None:
    """Raise InputError if the model has no GEMM that can be watched."""
    from loka.probe.capture.live_sites import PROBED

    if not any(site.weight is not None and site.kind in PROBED and site.calls for site in examined.sites):
        raise InputError(
            f"{examined.policy.where('model')}: the model calls no GEMM whose weight is a Parameter: there is nothing "
            "to probe"
        )
