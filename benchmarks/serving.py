"""Latency and throughput of a served model: AOTInductor's packages, torch.compile's CUDA graphs, and LoKA's.

    python -m benchmarks.serving POLICY [--batches 32,128,512,2048,4096] [--p99 5] [--seconds 1] [--variants ...]
                                 [--device cuda] [--json]

Each variant has a process, which compiles for all batch sizes beside the others; then one after the other is measured.
A latency is that of one batch, whose inputs are on the device, until its result is there; throughput is that of the
batch size with the most samples a second whose 99th percentile is within the bound, one batch at a time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch._inductor

from benchmarks.aoti.compiler import cpp_compiler, fault_of
from benchmarks.packages import refuse_nothing
from benchmarks.study import run_study, tell
from loka.bench.child_processes import ChildProcess, child_processes
from loka.bench.device import describe
from loka.bench.machine import require_gpu
from loka.bench.model.whole_step import Example, real_model
from loka.bench.packages import KEEP_AND_FUSE, Workshop, policy_text
from loka.errors import InputError
from loka.model.callables import current_directory_importable
from loka.model.inputs import cut_inputs
from loka.mods.modded_model import model_without_mods
from loka.mods.policy_loader import load_policy
from loka.plan.planner import make_plan

LIMIT = 400.0  # seconds in which a variant has to be compiled
FEWEST = 100  # calls of a batch size, for the 99th percentile
WARM_UPS = 5

Calls = dict[int, Callable[[], object]]  # by the batch size


@dataclass(frozen=True, slots=True)
class ServedForm:
    """How a model is served."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    aoti: bool = False  # one package of AOTInductor for all batch sizes; else torch.compile's CUDA graphs, one for each
    package: str = ""  # the generated package, in the workshop


FORMS = (
    ServedForm("aoti-fp16", torch.float16, aoti=True),
    ServedForm("aoti-bf16", aoti=True),
    ServedForm("graphs-fp16", torch.float16),
    ServedForm("graphs-bf16"),
    ServedForm("loka-bf16", package="served_native"),
    ServedForm("loka-fp8", package="served"),
)
BASELINE = "aoti-bf16"


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one variant at one batch size, in ms."""

    variant: str
    batch: int
    p50: float
    p99: float

    @property
    def per_second(self) -> float:
        """Samples a second, one batch at a time."""
        return 1e3 * self.batch / self.p50


def latency_of(variant: str, batch: int, ms: list[float]) -> Latency:
    """The percentiles of single calls."""
    return Latency(variant, batch, median(ms), quantiles(ms, n=100)[-1])


@dataclass(frozen=True, slots=True)
class ServingJob:
    """What every process is given. `folder`: of the Workshop with the packages."""

    policy: Path
    folder: Path
    device: str
    batches: tuple[int, ...]
    seconds: float  # of calls at one batch size


def serve(job: ServingJob, form: ServedForm, channel: Connection) -> None:
    """Body of a process: `answer`, with the settings of a process of its own."""
    os.dup2(2, 1)  # stdout is for results only, but compilers write to it
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    limits: Any = torch._dynamo.config
    limits.recompile_limit = len(job.batches) + 1
    answer(job, form, channel)


def answer(job: ServingJob, form: ServedForm, channel: Connection) -> None:
    """Compile, send "" or why not, wait for a message, and send the latencies."""
    try:
        with torch.no_grad(), current_directory_importable(), Workshop(job.folder):
            calls = compiled(job, form)
            for each in calls.values():
                for _ in range(WARM_UPS):
                    each()
            channel.send("")
            channel.recv()
            channel.send([latency_of(form.name, batch, _timed(job, each)) for batch, each in calls.items()])
    except Exception as error:  # noqa: BLE001  (libraries, compiler and device may raise anything: it is reported)
        channel.send(describe(error))


def compiled(job: ServingJob, form: ServedForm) -> Calls:
    """A call for each batch size."""
    policy, largest = load_policy(job.policy), max(job.batches)
    built = model_without_mods(replace(policy, model=replace(policy.model, batch_size=largest)))
    model = real_model(policy, "cpu").eval().to(job.device, form.dtype)
    if form.package:
        importlib.import_module(f"{job.folder.name}.{form.package}").apply(model, mode="infer")
    inputs: dict[int, Example] = {}
    for batch in job.batches:
        args, kwargs = cut_inputs((built.args, built.kwargs), largest, batch)
        inputs[batch] = Example(args, kwargs).fresh(job.device, form.dtype, training=False)
    called: Callable[..., Any]
    if form.aoti:
        rows = torch.export.Dim("rows", min=2, max=2 * largest)
        sizes = tuple({0: rows} for _ in inputs[largest].args)
        program = torch.export.export(model, inputs[largest].args, dynamic_shapes=sizes)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(job.folder / f"{form.name}.pt2"))
        called = torch._inductor.aoti_load_package(path)
    else:
        graphs = "reduce-overhead" if job.device == "cuda" else None
        called = torch.compile(model, mode=graphs, dynamic=False)
    return {batch: partial(called, *given.args, **given.kwargs) for batch, given in inputs.items()}


def _timed(job: ServingJob, run: Callable[[], object]) -> list[float]:
    def wait() -> None:
        if job.device == "cuda":
            torch.cuda.synchronize()

    taken: list[float] = []
    end = time.perf_counter() + job.seconds
    while len(taken) < FEWEST or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        wait()
        taken.append(1e3 * (time.perf_counter() - start))
    return taken


def measure(job: ServingJob, forms: tuple[ServedForm, ...], workshop: Workshop) -> list[Latency]:
    """Generate the packages, compile side by side, and measure one variant after the other.

    Raises LokaError if a package has nothing in FP8, or replaces nothing: another variant would go by its name.
    """
    policy = load_policy(job.policy)
    for name, rules in (("served", ()), ("served_native", (KEEP_AND_FUSE,))):
        if any(form.package == name for form in forms):
            plan = make_plan(workshop.write(f"{name}.yaml", policy_text(policy, name, rules=rules)))
            refuse_nothing(plan, fp8=not rules)
            workshop.package(plan)
    found: list[Latency] = []
    with child_processes() as start:
        children = [(form, start(serve, job, form)) for form in forms]
        end = time.monotonic() + LIMIT
        ready = [(form, child) for form, child in children if _is_ready(form, child, end)]
        for form, child in ready:
            child.channel.send(True)
            said = child.received(time.monotonic() + LIMIT)
            if isinstance(said, list):
                found += said
            else:
                tell(f"{form.name}: {said or child.failure}")
    return found


def _is_ready(form: ServedForm, child: ChildProcess, end: float) -> bool:
    said = child.received(end)
    tell(f"{form.name}: {'compiled' if said == '' else said or child.failure}")
    return said == ""


def table(found: list[Latency], bound: float) -> str:
    """Latencies, and the throughput within the bound, as text."""
    names = list(dict.fromkeys(each.variant for each in found))
    batches = sorted({each.batch for each in found})
    at = {(each.variant, each.batch): each for each in found}
    lines = [f"{'p50; p99 in ms':16}" + "".join(f"{name:>16}" for name in names)]
    for batch in batches:
        cells = [at.get((name, batch)) for name in names]
        lines.append(f"{batch:<16}" + "".join(f"{_cell(cell):>16}" for cell in cells))
    lines.append(f"samples a second, p99 within {bound:g} ms")
    for name in names:
        within = [each for each in found if each.variant == name and each.p99 <= bound]
        best = max(within, key=lambda each: each.per_second, default=None)
        lines.append(f"{name:16}" + ("none" if best is None else f"{best.per_second:14.0f}  at {best.batch}"))
    return "\n".join(lines)


def _cell(found: Latency | None) -> str:
    return "-" if found is None else f"{found.p50:.3f}; {found.p99:.3f}"


def main(given: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("policy", type=Path, help="of the model; its mods must not make another one")
    parser.add_argument("--batches", default="32,128,512,2048,4096", help="batch sizes")
    parser.add_argument("--variants", default=",".join(form.name for form in FORMS), help="comma-separated")
    parser.add_argument("--p99", type=float, default=5.0, help="bound of the 99th percentile in ms")
    parser.add_argument("--seconds", type=float, default=1.0, help="of calls for each variant and batch size")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    options = parser.parse_args(given)

    def study() -> str:
        names = options.variants.split(",")
        forms = tuple(form for form in FORMS if form.name in names)
        if unknown := sorted(set(names) - {form.name for form in FORMS}):
            raise InputError(f"--variants: {', '.join(unknown)}: there are {', '.join(form.name for form in FORMS)}")
        if not all(size.isdecimal() and int(size) > 1 for size in options.batches.split(",")):
            raise InputError(f"--batches: {options.batches}: numbers above 1, comma-separated")
        if options.device == "cuda":
            require_gpu("benchmarks.serving")
        if any(form.aoti for form in forms) and (fault := fault_of(cpp_compiler())):
            raise InputError(f"benchmarks.serving: {fault}, or leave out the variants of AOTInductor (--variants)")
        sizes = tuple(int(size) for size in options.batches.split(","))
        with Workshop() as workshop:
            job = ServingJob(options.policy.absolute(), workshop.folder, options.device, sizes, options.seconds)
            found = measure(job, forms, workshop)
        return json.dumps([asdict(each) for each in found]) if options.json else table(found, options.p99)

    return run_study(study)


if __name__ == "__main__":
    sys.exit(main())
