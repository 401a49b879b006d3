"""`loka bench model --gpus` without the command line: checks a request, starts the ranks, and writes the report."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch import nn

from loka.bench import timing
from loka.bench.child_processes import LONGEST, ChildProcess, child_processes
from loka.bench.device import BenchDevice, describe
from loka.bench.machine import environment, require_gpu
from loka.bench.model.model_report import in_milliseconds
from loka.bench.model.model_request import ModelRequest
from loka.bench.model.whole_step import sample_of
from loka.bench.options import check_least
from loka.bench.packages import Workshop, policy_text
from loka.bench.ranks.estimates import LINK
from loka.bench.ranks.rank_step import RankFigures, RankJob, serve
from loka.bench.ranks.rank_variants import RankVariant, chosen_rank_variants
from loka.bench.ranks.ranks_report import MeasuredRanks, RankOutcome, RanksReport, write_files
from loka.bench.results import usable_folder, utc_minute
from loka.bench.timing import ROUNDS, Progress
from loka.errors import Code, InputError, LokaError
from loka.model.callables import current_directory_importable
from loka.mods.modded_model import built_model
from loka.mods.policy_loader import load_policy
from loka.plan.planner import make_plan
from loka.plan.units import units_of
from loka.policy.policy import Policy


def check(request: ModelRequest) -> tuple[tuple[Policy, ...], tuple[RankVariant, ...]]:
    """Check everything that can be checked before a model is built; the policies and variants. Raises InputError."""
    check_least("--gpus", request.gpus, 2)
    if request.link is not None and not 0 < request.link < math.inf:
        raise InputError(f"--link: {request.link:g} is no bandwidth; write GB/s of a GPU, above 0")
    policies, variants = request.checked_policies(), chosen_rank_variants(request.variants)
    for policy in policies:
        if policy.train is None:
            raise InputError(
                f"{policy.where('')}: --gpus measures training steps, and the policy has no train section; add "
                'train: {batches: "package.module:name", loss: "package.module:name"}, functions of (batch_size, seed) '
                "and of (output, target)",
                Code.MISSING,
            )
    return policies, variants


def run(request: ModelRequest, out: Path, progress: Progress) -> RanksReport:
    """Check a request and measure it on the first GPUs; the files in `out` are rewritten with every outcome.

    Raises InputError for an invalid request, with fewer GPUs than it wants, and if `out` is not writable.
    """
    policies, variants = check(request)
    require_gpu()
    world, there = request.gpus or 0, torch.cuda.device_count()
    if world > there:
        raise InputError(f"--gpus: {world} are asked for, and this machine has {there}; write a number up to that")
    usable_folder(out)
    end = time.monotonic() + request.seconds
    link = LINK if request.link is None else request.link
    variables = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    report = RanksReport(request.command(), utc_minute(), environment(), world, link, variables, ())
    rounds = ROUNDS if request.rounds is None else request.rounds
    for policy in policies:
        if time.monotonic() >= end:
            progress(f"no time is left for {policy.name} and what follows")
            break
        done = report.models
        with current_directory_importable(), Workshop() as workshop:
            for model in _model(policy, variants, world, rounds, workshop, end, progress):
                report = replace(report, models=(*done, model))
                write_files(report, out)
    return report


def _model(
    policy: Policy,
    variants: Sequence[RankVariant],
    world: int,
    rounds: int,
    workshop: Workshop,
    end: float,
    progress: Progress,
) -> Iterator[MeasuredRanks]:
    """One model so far, after every outcome."""
    model = MeasuredRanks(policy.name, policy.model.factory, policy.model.batch_size)
    progress(f"{model.name}: planning")
    try:
        built = built_model(policy)[0]
        step = sample_of(policy, built, True).words
        added = () if policy.units else largest_list(built.module)
        own, sharded = f"bench_{policy.name}", f"bench_{policy.name}_units" if added else f"bench_{policy.name}"
        known = _package(policy, own, (), workshop)
        if added:
            known = _package(policy, sharded, added, workshop)
        units = sorted(units_of(known, built.module))
    except Exception as error:  # noqa: BLE001  (a factory may raise anything: it is reported, and the next goes on)
        progress(f"{model.name}: failed: {describe(error)}")
        yield replace(model, failure=describe(error))
        return
    origin = "the largest ModuleList" if added else "the policy's units" if units else "none but the whole model"
    words = f"{', '.join(units)} ({origin})" if units else origin
    model = replace(model, units=words, step=step)
    progress(f"{model.name}: FSDP2's units are {words}")
    job = RankJob(known, world, BenchDevice(), workshop.folder, own, sharded, rounds, timing.STEPS)
    for found in _outcomes(job, variants, end, progress):
        if isinstance(found, str):
            progress(f"{model.name}: {found}")
            model = replace(model, failure=found)
        else:
            model = replace(model, outcomes=(*model.outcomes, found))
        yield model


def largest_list(model: nn.Module) -> tuple[str, ...]:
    """The pattern of the children of the ModuleList that has the most parameters; () without one.

    A ModuleList of containers, which have no forward, is none.
    """
    sizes = {
        name: sum(each.numel() for each in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and not any(isinstance(c, nn.ModuleList | nn.ModuleDict) for c in module)
    }
    largest = max(sizes, key=lambda name: sizes[name], default="")
    return (f"{largest}.*",) if largest and sizes[largest] else ()


def _package(policy: Policy, name: str, units: Sequence[str], workshop: Workshop) -> Policy:
    """Generate the package of the policy, with these units in the place of none; the policy that it is of."""
    path = workshop.write(f"{name}.yaml", policy_text(policy, name, units=units))
    known = load_policy(path)
    if policy.tuned_file.exists() and not units:  # what was tuned is the plan without them
        workshop.copy(policy.tuned_file, known.tuned_name)
    plan = make_plan(path)
    if not plan.bindings:
        notes = dict.fromkeys(site.region_note for site in plan.sites if site.region_note)
        raise LokaError(f"the policy replaces nothing: {'; '.join(notes) or 'no site is planned'}")
    workshop.package(replace(plan, name=name))
    return known


def _outcomes(
    job: RankJob, variants: Sequence[RankVariant], end: float, progress: Progress
) -> Iterator[RankOutcome | str]:
    """Each outcome as soon as there is one, or why no more is measured. Where a rank fails all end, and new ones go on
    with the next variant.
    """
    left = list(variants)
    while left:
        if time.monotonic() >= end:
            yield f"no time was left for {left[0].name} and what follows"
            return
        with child_processes() as start:
            ranks = [start(serve, job, rank, str(job.folder / f"store{len(left)}")) for rank in range(job.world)]
            _, failure = _received(ranks, end)
            if failure:
                yield failure
                return
            while left and not failure and time.monotonic() < end:
                variant, begun = left.pop(0), time.monotonic()
                _send(ranks, variant)
                figures, failure = _received(ranks, end)
                text = f"failed: {failure}"
                if figures is not None:
                    text = f"{in_milliseconds(figures.step_ms)} ms, after {time.monotonic() - begun:.0f} s"
                progress(f"{variant.name}: {text}")
                yield RankOutcome(variant, figures, failure)
            if not failure:
                _send(ranks, None)


def _send(ranks: Sequence[ChildProcess], message: RankVariant | None) -> None:
    for rank in ranks:
        with suppress(OSError):  # of a process that has died, which is told when its answer is awaited
            rank.channel.send(message)


def _received(ranks: Sequence[ChildProcess], end: float) -> tuple[RankFigures | None, str]:
    """The message of rank 0, once all have sent one; or what the first rank that failed says, without the others'.

    Where a rank's process has died, what others say of the lost connection is not the cause.
    """
    found: dict[int, object] = {}
    while len(found) < len(ranks):
        waiting = [number for number in range(len(ranks)) if number not in found]
        ready = wait([ranks[number].channel for number in waiting], min(max(0.0, end - time.monotonic()), LONGEST))
        for number in waiting:
            if not ready or ranks[number].channel in ready:
                found[number] = ranks[number].received(end)
        dead = {number: ranks[number].failure for number in found if ranks[number].failure}
        told = {number: message for number, message in found.items() if isinstance(message, str)}
        for number, failure in (dead or told).items():
            for rank in ranks:
                rank.failure = rank.failure or str(failure)  # so that it is ended at once
            return None, f"rank {number}: {failure}"
    first = found[0]
    return (first if isinstance(first, RankFigures) else None), ""
