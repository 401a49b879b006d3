"""Compiles candidates ahead, side by side in processes of their own.

Each runs one step of its candidate, so that Inductor's and Triton's caches on disk have what the measuring process then
compiles: it finds it there. Nothing is timed meanwhile, and what fails here is compiled when it is measured.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config

from loka.bench.child_processes import child_processes
from loka.bench.device import MIB, BenchDevice, describe
from loka.bench.model.model_run import RunLimits
from loka.bench.model.model_subject import ModelSubject
from loka.bench.model.model_variants import ModelVariant, StepBlock
from loka.bench.packages import Workshop
from loka.bench.timing import Progress
from loka.model.callables import current_directory_importable
from loka.plan.plan import Plan
from loka.policy.policy import Policy

CONTEXT_MIB = 600  # of the device's memory, for a process' CUDA context and loaded kernels
MARGIN = 1.3  # of a BF16 step's peak: plans keep quantized copies, and compilers try kernels out
SHARE = 0.5  # of the time that is left, for one wave
SHORTEST = 15.0  # seconds below which a wave is not worth starting: Python, torch and the model take most of it


@dataclass(frozen=True, slots=True)
class Warming:
    """A step to run in another process. `folder`: the Workshop that has the packages.

    `config`: Inductor's in the measuring process, and `threads` those of torch: its cache finds code by these, too.
    """

    policy: Policy
    folder: Path
    block: StepBlock
    device: BenchDevice
    synthetic: bool
    config: bytes = field(default_factory=lambda: _inductor().save_config(), repr=False)
    threads: int = field(default_factory=torch.get_num_threads)


@dataclass(frozen=True, slots=True)
class Warmer:
    """Compiles variants ahead in at most `jobs` processes at a time; None: as many as there are cores."""

    warming: Warming
    subject: ModelSubject
    plans: dict[str, Plan]
    jobs: int | None
    progress: Progress

    def wave(self, variants: Sequence[ModelVariant], peak_mib: float | None, limits: RunLimits) -> int:
        """Compile the first of these variants; returns how many, 0 where processes would gain nothing.

        `peak_mib`: the most memory of a BF16 step. Returns when all its processes have ended.
        """
        jobs = process_count(peak_mib, self.warming.device.free(), self.jobs)
        seconds = SHARE * limits.left
        wave = variants[:jobs]
        if len(wave) < 2 or seconds < SHORTEST:
            return 0
        label, begun = self.warming.block.label, time.monotonic()
        self.progress(f"{label}: compiling {len(wave)} candidates in as many processes")
        failures = self._run(wave, begun + seconds)
        done = f"{len(wave) - len(failures)} of {len(wave)} are compiled, after {time.monotonic() - begun:.0f} s"
        self.progress(f"{label}: {done}")
        for name, failure in failures.items():
            self.progress(f"{label} {name}: will be compiled when it is measured: {failure}")
        return len(wave)

    def _run(self, wave: Sequence[ModelVariant], end: float) -> dict[str, str]:
        """Run one process for each variant until `end`; returns the failures by the variants' names."""
        threads = max(1, (os.cpu_count() or 1) // len(wave))
        failures, running = {}, {}
        with child_processes() as start:
            for variant in wave:
                try:
                    self.subject.write(variant, self.warming.block)
                except Exception as error:  # noqa: BLE001  (measuring raises it again, and reports it)
                    failures[variant.name] = describe(error)
                    continue
                plan = self.plans.get(variant.package or "")
                running[variant.name] = start(warm, self.warming, variant, plan, threads)
            for name, child in running.items():
                found = child.received(end)
                if failure := child.failure or str(found):
                    failures[name] = failure
        return failures


def process_count(peak_mib: float | None, free: int | None, asked: int | None) -> int:
    """Number of processes: CPU cores, or `asked`, and as many steps as fit into `free` bytes where that is known."""
    cores = os.cpu_count() or 1
    jobs = cores if asked is None else min(asked, cores)
    if peak_mib is None or free is None:
        return jobs
    return min(jobs, int(free / MIB / (MARGIN * peak_mib + CONTEXT_MIB)))


def warm(warming: Warming, variant: ModelVariant, plan: Plan | None, threads: int, channel: Connection) -> None:
    """Body of a process: run one step of a variant, and send "", or why it failed. `threads`: its share of the CPUs."""
    os.dup2(2, 1)  # stdout is for results only, but compilers write to it
    torch.set_num_threads(threads)
    _inductor().load_config(warming.config)
    _inductor().compile_threads = threads
    try:
        _run_step(warming, variant, plan)
    except Exception as error:  # noqa: BLE001  (libraries, compiler and device may raise anything: it is reported)
        channel.send(describe(error))
    else:
        channel.send("")
    channel.close()


def _run_step(warming: Warming, variant: ModelVariant, plan: Plan | None) -> None:
    plans = {} if plan is None or variant.package is None else {variant.package: plan}
    device = warming.device
    with (
        current_directory_importable(),
        Workshop(warming.folder) as workshop,
        device.session(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # the measuring process shows them
        subject = ModelSubject(warming.policy, workshop, plans, warming.synthetic)
        torch.set_num_threads(warming.threads)
        subject.ready(variant, warming.block, device)()
        device.wait()


def _inductor() -> Any:
    return torch._inductor.config
