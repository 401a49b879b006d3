"""AOTInductor packages of a model in FP8 and in BF16, beside torch.compile and a CUDA graph.

    python -m benchmarks.aoti [--factory loka.zoo:wukong_small] [--inputs loka.zoo:wukong_small_inputs] [--batch 16384]
                              [--device cuda] [--folder build/aoti] [--jobs N] [--rounds 30] [--json]

The FP8 package is of `mode="infer"`, made portable (`loka.portable`). Every export, package and figure has a process of
its own: one that crashes is reported with its signal and its last lines. First packages are compiled side by side, that
of BF16 in several forms; then each is run in fresh processes, so that a crash is narrowed down; at last the figures are
taken one by one: medians of `rounds` runs after three, by CUDA events.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import torch

from benchmarks.aoti.compiler import cpp_compiler, fault_of
from benchmarks.aoti.jobs import PACKAGE, POLICY, AotiModel, Job, Outcome, compiling, running, timing
from benchmarks.study import run_study, tell
from loka.bench.machine import require_gpu
from loka.codegen.generation import generate
from loka.devices.targets import device_named
from loka.errors import InputError

SMALLEST = 64  # sites with K or N up to this stay native
LIMIT = 300.0  # seconds for a process
LAST_LINES = 20  # of stderr, of a process that failed
MOST_FRAMES = 16  # of C++, of a process that crashed
FEWEST_CHARACTERS = 3  # of a line that says something


@dataclass(frozen=True, slots=True)
class AotiRun:
    """All outcomes. `compiler`: of C++, "" without one, when there can be no packages."""

    device: str
    torch: str
    model: str
    batch: int
    compiler: str
    compiled: tuple[Outcome, ...]
    ran: tuple[Outcome, ...]
    timed: tuple[Outcome, ...]


def measure(subject: AotiModel, jobs: int, rounds: int) -> AotiRun:
    """Compile, run and time. Raises InputError for a machine without the device, and what planning raises."""
    device = _device(subject)
    compiler = cpp_compiler()
    if fault := fault_of(compiler):
        tell(fault)
    write_package(subject, device)
    return AotiRun(
        device=device,
        torch=torch.__version__,
        model=subject.factory,
        batch=subject.batch,
        compiler=compiler,
        compiled=outcomes(compiling(subject), jobs),
        ran=outcomes(running(subject), jobs),
        timed=outcomes(timing(subject, rounds), 1),
    )


def write_package(subject: AotiModel, device: str) -> None:
    """Generate the FP8 package into the folder, for a device of this name; sites up to `SMALLEST` stay native.

    Raises InputError if nothing would run in FP8, and what planning raises.
    """
    spec = device_named(device)
    target = "reference" if spec is None else spec.name
    folder = Path(subject.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    policy = folder / "aoti.yaml"
    named = {"factory": subject.factory, "inputs": subject.inputs, "batch": subject.batch}
    policy.write_text(POLICY.format(package=PACKAGE, target=target, smallest=SMALLEST, **named), encoding="utf-8")
    plan = generate(policy, folder / PACKAGE).plan
    if not any(site.fp8 for site in plan.sites):
        raise InputError(f"benchmarks.aoti: no GEMM of {subject.factory} would run in FP8: see loka plan {policy}")


def _device(subject: AotiModel) -> str:
    if subject.device == "cpu":
        return "CPU"
    require_gpu("benchmarks.aoti")
    name = torch.cuda.get_device_name()
    if device_named(name) is None:
        raise InputError(f"benchmarks.aoti: {name} is no target of LoKA; it runs on a Hopper GPU, or with --device cpu")
    return name


def outcomes(jobs: Sequence[Job], side_by_side: int) -> tuple[Outcome, ...]:
    """Run each job in a process of its own, so many at a time."""
    with ThreadPoolExecutor(side_by_side) as pool:
        return tuple(pool.map(outcome, jobs))


def outcome(job: Job) -> Outcome:
    """Run one job; whatever happens to its process is in the outcome."""
    start = time.monotonic()
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.aoti.worker", job.to_json()]
    environment = {**os.environ, "TORCH_SHOW_CPP_STACKTRACES": "1", **job.environment}
    found: dict[str, Any] = {}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        failure = f"not done after {LIMIT:.0f} s"
    else:
        failure = "" if ran.returncode == 0 else failure_of(ran.returncode, ran.stderr)
        found = {} if failure else json.loads(ran.stdout.splitlines()[-1])
    made = Outcome(job.name, round(time.monotonic() - start, 1), failure=failure, **found)
    tell(line_of(made))
    return made


def failure_of(status: int, stderr: str) -> str:
    """How a process ended, the C++ frames of the thread that crashed, and what the process said last."""
    ended = f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    said = [line for line in stderr.splitlines() if len(line.strip()) >= FEWEST_CHARACTERS]
    frames = list(dropwhile(lambda line: not line.startswith("SIG"), said))[: MOST_FRAMES + 1]
    return "\n".join((ended, *frames, *said[-LAST_LINES:]))


def line_of(found: Outcome) -> str:
    """An outcome on a line, or more if it failed."""
    parts = [f"{found.ms:.3f} ms"] if found.ms is not None else []
    if found.largest_error is not None and found.scale is not None:
        parts.append(f"differs by {found.largest_error:.2g} of {found.scale:.2g}")
    parts.append(f"{found.seconds:.0f} s" if not found.failure else "\n  ".join(found.failure.splitlines()))
    return f"{found.name}: {', '.join(parts)}"


def table(found: AotiRun) -> str:
    """The outcomes as text."""
    times = {each.name: each.ms for each in found.timed if each.ms is not None}
    lines = [
        f"{found.model}, batch {found.batch}; {found.device}, torch {found.torch}, C++: {found.compiler or 'none'}",
        *(f"{each.name:22} {each.ms:9.3f} ms" for each in found.timed if each.ms is not None),
    ]
    package = times.get("FP8 AOTInductor")
    for name, words in (("FP8 CUDA graph", "our CUDA graph"), ("BF16 AOTInductor", "BF16 AOTInductor")):
        if package and name in times:
            lines.append(f"speed of FP8 AOTInductor over {words}: {times[name] / package:.3f}x")
    lines += ["", *(line_of(each) for each in (*found.compiled, *found.ran))]
    lines += [line_of(each) for each in found.timed if each.failure]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aoti", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--factory", default="loka.zoo:wukong_small", help="function of the model")
    parser.add_argument("--inputs", default="loka.zoo:wukong_small_inputs", help="function of batch size -> inputs")
    parser.add_argument("--batch", type=int, default=16384)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--folder", default="build/aoti", help="for the generated package and all files")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--rounds", type=int, default=30, help="timed runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    def study() -> str:
        if min(options.batch, options.jobs, options.rounds) < 1:
            raise InputError("--batch, --jobs and --rounds must be 1 or more")
        folder = str(Path(options.folder).absolute())
        subject = AotiModel(options.factory, options.inputs, options.batch, options.device, folder)
        found = measure(subject, options.jobs, options.rounds)
        return json.dumps(asdict(found), indent=2) if options.json else table(found)

    return run_study(study)


if __name__ == "__main__":
    sys.exit(main())
