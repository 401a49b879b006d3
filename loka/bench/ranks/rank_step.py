"""One rank of `loka bench model --gpus`: makes the model as each variant, and measures its training step."""

from __future__ import annotations

import copy
import gc
import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
import torch.distributed as dist
from torch import nn

from loka.bench.device import BenchDevice, describe
from loka.bench.model.whole_step import StepSample, StepSettings, WholeStep, real_model, sample_of
from loka.bench.packages import Workshop
from loka.bench.ranks.collectives import CollectiveFigures, Collectives, all_reduces, nccl_times
from loka.bench.ranks.rank_variants import Numbers, RankVariant, Sharing
from loka.bench.timing import SEED, RoundTiming, timed_turn
from loka.dispatch import Patch
from loka.errors import CheckFailedError
from loka.model.callables import current_directory_importable
from loka.mods.modded_model import model_without_mods
from loka.plan.units import units_of
from loka.policy.policy import Policy

FIRST_STEPS = 5  # the first compiles and makes the optimiser
TIMEOUT = timedelta(seconds=240)  # of a collective: the first waits until all ranks have compiled


@dataclass(frozen=True, slots=True)
class RankJob:
    """What every rank is given. `policy` has the units; `folder` is that of the Workshop with the packages."""

    policy: Policy
    world: int
    device: BenchDevice
    folder: Path
    package: str  # of the policy as it is
    sharded: str  # with the units, which no generated forward crosses
    rounds: int
    steps: int  # of each kind in a turn


@dataclass(frozen=True, slots=True)
class RankFigures:
    """What one rank measured of a variant. `losses`: of its first steps."""

    step_ms: float  # a median over the rounds, as host_ms
    host_ms: float
    peak_mib: float | None
    collectives: tuple[CollectiveFigures, ...]
    nccl_ms: float | None  # NCCL's kernels in a step, waiting for other ranks included; None if not seen
    exposed_ms: float | None  # of that, while nothing else ran
    losses: tuple[float, ...]
    gathering: str  # the report of gather_fp8; "" without it


def serve(job: RankJob, rank: int, store: str, channel: Connection) -> None:
    """Body of a rank's process: measures every variant that `channel` brings, until it brings None.

    Sends True once the model is there, RankFigures for each variant, or why it failed; after that it only waits to be
    ended: a rank that leaves makes others fail.
    `store`: a new file, over which the ranks find each other.
    """
    os.dup2(2, 1)  # stdout is for results only, but compilers write to it
    warnings.simplefilter("ignore")  # each rank would repeat them for each variant
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // job.world))
    try:
        with _ready(job, rank, store) as subject:
            channel.send(True)
            for variant in iter(channel.recv, None):
                channel.send(subject.measured(variant))
    except Exception as error:  # noqa: BLE001  (libraries, compiler and device may raise anything: it is reported)
        channel.send(describe(error))
        channel.poll(None)


@contextmanager
def _ready(job: RankJob, rank: int, store: str) -> Iterator[RankSubject]:
    cuda = job.device.type == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=job.world, timeout=TIMEOUT
    )
    with current_directory_importable(), Workshop(job.folder) as workshop, job.device.session():
        base = real_model(job.policy, "cpu")
        sample = sample_of(job.policy, model_without_mods(job.policy), True, SEED + rank)
        yield RankSubject(job, base, sample, workshop)
    gc.collect()  # where a reducer is the last to hold the group, freeing it can wait for ever
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class RankSubject:
    """The policy's model on one rank, and its batch. All ranks have to measure the same variants, in the same order."""

    job: RankJob
    base: nn.Module  # on the CPU
    sample: StepSample
    workshop: Workshop

    def measured(self, variant: RankVariant) -> RankFigures:
        """Figures of a variant, from a new copy of the model; collective. Errors of libraries propagate."""
        device = self.job.device
        device.release()
        held = device.allocated()
        model, patch, gathering = self._made(variant)
        called = device.compiled(model, None) if variant.compiled else model
        settings = StepSettings(True, torch.bfloat16, autocast=False, marks=False, device=device.type)
        step = WholeStep(called, model, self.sample, settings, patch)
        losses = tuple(float(step()[0]) for _ in range(FIRST_STEPS))
        if not all(map(torch.isfinite, torch.tensor(losses))):
            raise CheckFailedError("the loss is not finite")
        step.verify()
        device.restart_peak()
        seen = Collectives()
        with seen.counted():
            step()
        rounds = tuple(self._turn(step) for _ in range(self.job.rounds))
        peak = device.peak_mib(held)
        nccl, exposed = nccl_times(step) if device.type == "cuda" else (None, None)
        collectives = seen.figures(device, self.job.steps)
        if variant.sharing is Sharing.DDP:
            trained = [each for each in model.parameters() if each.requires_grad]
            collectives = (all_reduces(trained, device, self.job.steps),)
        step_ms, host_ms = median(each.step_ms for each in rounds), median(each.host_ms for each in rounds)
        return RankFigures(step_ms, host_ms, peak, collectives, nccl, exposed, losses, gathering)

    def _turn(self, step: WholeStep) -> RoundTiming:
        dist.barrier()
        return timed_turn(step, self.job.device.wait, steps=self.job.steps)

    def _made(self, variant: RankVariant) -> tuple[nn.Module, Patch | None, str]:
        """The model as a variant, its patch, and the report of gather_fp8."""
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        device, sharing = self.job.device.type, variant.sharing
        model: nn.Module = copy.deepcopy(self.base).to(device=device, dtype=torch.bfloat16).train()
        patch: Patch | None = None
        if variant.numbers is not Numbers.BF16:
            patch = self._package(sharing).apply(model)
        if sharing is Sharing.FSDP2:
            for name in sorted(units_of(self.job.policy, model)):
                fully_shard(model.get_submodule(name))
            fully_shard(model)
        elif sharing is Sharing.DDP:
            devices = [torch.cuda.current_device()] if device == "cuda" else None
            model = DistributedDataParallel(model, device_ids=devices)
        gathering = ""
        if patch is not None and variant.numbers is Numbers.GATHERED:
            gathering = "; ".join(line.strip() for line in str(patch.gather_fp8()).splitlines())
        return model, patch, gathering

    def _package(self, sharing: Sharing) -> ModuleType:
        name = self.job.sharded if sharing is Sharing.FSDP2 else self.job.package
        return importlib.import_module(f"{self.workshop.folder.name}.{name}")
