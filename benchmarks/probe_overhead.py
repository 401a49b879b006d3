"""Overhead of probing a training run: time and memory with and without the probe, alternating in one run.

    python -m benchmarks.probe_overhead [--factory loka.zoo:wukong_small --inputs ... --batch 16384]
                                  [--every 100] [--windows 7] [--autocast] [--device cuda] [--json]

The model trains under torch.compile with plain SGD. A window is `every` steps, one of which is sampled if the probe is
on. Windows with and without the probe alternate, so that clock drift affects both; figures are medians over windows
with minimum and maximum. The cost of a save is measured separately, on the training thread and until the file exists,
and spread over the steps between two saves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from benchmarks.study import run_study
from loka.errors import InputError, LokaError
from loka.model.callables import current_directory_importable, find_callable
from loka.probe.probe import Probe

SAVE_EVERY = 10_000  # steps, the default of Probe
PATIENCE = 300  # seconds for a save
SAVES = 3  # number of measured saves

POLICY = """\
version: 1
name: overhead
model: {{factory: "{factory}", inputs: "{inputs}", batch_size: {batch}}}
"""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of some measurements."""

    median: float
    least: float
    largest: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:9.3f} ({self.least:.3f} to {self.largest:.3f})"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Measured overhead: times in milliseconds, device memory in MiB (0 on the CPU)."""

    device: str
    torch: str
    factory: str
    batch: int
    every: int
    autocast: bool
    off: Spread  # a step without the probe, mean over a window
    on: Spread  # a step with it, mean over a window
    paired_percent: Spread  # overhead of each window with the probe over the mean of its neighbours without
    sampled: Spread  # one sampled step
    peak_off: float
    peak_on: float
    state: float  # memory held by the probe between steps
    save_blocks: float  # time that a save blocks the training thread
    save_done: float  # time until the file exists
    file_mib: float

    @property
    def percent(self) -> float:
        """Training time added by the probe in percent, including the time that saves block."""
        return self.paired_percent.median + 100 * self.save_blocks / (SAVE_EVERY * self.off.median)


class TrainingLoop:
    """A compiled training step, repeated on one batch of example inputs."""

    def __init__(self, factory: str, inputs: str, batch: int, device: str, autocast: bool) -> None:
        torch.manual_seed(0)
        with current_directory_importable():
            model = cast("nn.Module", find_callable(factory, "--factory")[0]()).to(device)
            arguments = cast("tuple[torch.Tensor, ...]", find_callable(inputs, "--inputs")[0](batch))
        dtype = torch.float32 if autocast else torch.bfloat16
        self.model = model.to(dtype)
        self.arguments = tuple(_cast(value.detach().to(device), dtype) for value in arguments)
        self.device, self._autocast = device, autocast
        self._compiled: Callable[..., torch.Tensor] = torch.compile(self.model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def step(self) -> None:
        """Run forward, backward and update."""
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16) if self._autocast else nullcontext():
            output = self._compiled(*self.arguments)
        output.float().square().mean().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def timed(self, steps: int, after: Callable[[], None]) -> tuple[float, float]:
        """Mean milliseconds of a step, and peak device memory in MiB."""
        self.wait()
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
            after()
        self.wait()
        milliseconds = 1e3 * (time.perf_counter() - start) / steps
        return milliseconds, torch.cuda.max_memory_allocated() / 2**20 if self.device == "cuda" else 0.0

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(
    factory: str, inputs: str, batch: int, *, every: int, windows: int, autocast: bool, device: str
) -> Overhead:
    """Measure everything. Raises InputError if the model, the inputs or a number cannot be used."""
    if every <= SAVES or windows < 1 or batch < 1:
        raise InputError(
            f"--every must be above {SAVES}, --windows and --batch 1 or more, not {every}, {windows}, {batch}"
        )
    training = TrainingLoop(factory, inputs, batch, device, autocast)
    for _ in range(5):  # compiles
        training.step()
    with tempfile.TemporaryDirectory() as folder:
        policy, file = Path(folder) / "overhead.yaml", Path(folder) / "overhead.full.safetensors"
        policy.write_text(POLICY.format(factory=factory, inputs=inputs, batch=batch), encoding="utf-8")
        _sampled(training, policy, 2)
        sampled = _sampled(training, policy, 10)
        off: list[float] = []
        on: list[float] = []
        peaks_off: list[float] = []
        peaks_on: list[float] = []
        before = _allocated(device)
        with Probe(training.model, policy, every=every, path=file) as probe:
            state = _allocated(device) - before
            peaks_on.append(training.timed(every - SAVES, probe.step)[1])
            saves = [_save(training, probe, file) for _ in range(SAVES)]
            size = file.stat().st_size / 2**20
            for _ in range(windows):
                for times, peaks, after in ((off, peaks_off, _nothing), (on, peaks_on, probe.step)):
                    milliseconds, peak = training.timed(every, after)
                    times.append(milliseconds)
                    peaks.append(peak)
            milliseconds, _ = training.timed(every, _nothing)
            off.append(milliseconds)
    paired = [100 * (2 * value / (one + two) - 1) for value, one, two in zip(on, off[:-1], off[1:], strict=True)]
    return Overhead(
        device=torch.cuda.get_device_name() if device == "cuda" else "CPU",
        torch=torch.__version__,
        factory=factory,
        batch=batch,
        every=every,
        autocast=autocast,
        off=Spread.of(off),
        on=Spread.of(on),
        paired_percent=Spread.of(paired),
        sampled=sampled,
        peak_off=max(peaks_off),
        peak_on=max(peaks_on),
        state=state,
        save_blocks=statistics.median(blocked for blocked, _ in saves),
        save_done=statistics.median(done for _, done in saves),
        file_mib=size,
    )


def table(cost: Overhead) -> str:
    """The figures as text."""
    lines = (
        f"{cost.factory}, batch {cost.batch}, {'autocast' if cost.autocast else 'bfloat16'}, one step in {cost.every} "
        f"sampled; {cost.device}, torch {cost.torch}",
        f"step without the probe, ms   {cost.off}",
        f"step with it, ms             {cost.on}",
        f"a sampled step, ms           {cost.sampled}",
        f"added by the probe, percent  {cost.paired_percent}",
        f"peak memory, MiB             {cost.peak_off:9.0f} without, {cost.peak_on:.0f} with; held {cost.state:.0f}",
        f"a save, ms                   {cost.save_blocks:9.1f} of the training thread, {cost.save_done:.0f} until the "
        f"file of {cost.file_mib:.1f} MiB is there",
        f"in all, percent              {cost.percent:9.3f}, with a save every {SAVE_EVERY} steps",
    )
    return "\n".join(lines)


def _sampled(training: TrainingLoop, policy: Path, steps: int) -> Spread:
    times = []
    with Probe(training.model, policy, every=1) as probe:
        for _ in range(steps):
            times.append(training.timed(1, probe.step)[0])
    return Spread.of(times)


def _save(training: TrainingLoop, probe: Probe, file: Path) -> tuple[float, float]:
    """Milliseconds that a save blocks the training thread (including device work), and until it is written."""
    file.unlink(missing_ok=True)
    training.step()  # weights are recorded at most once a step
    probe.step()
    training.wait()
    start = time.perf_counter()
    probe.save()
    training.wait()
    blocked = time.perf_counter()
    while not file.exists():  # it is renamed into place when complete
        if time.perf_counter() - start > PATIENCE:
            raise LokaError(f"the probe wrote no file in {PATIENCE} s")
        time.sleep(1e-3)
    return 1e3 * (blocked - start), 1e3 * (time.perf_counter() - start)


def _allocated(device: str) -> float:
    return torch.cuda.memory_allocated() / 2**20 if device == "cuda" else 0.0


def _cast(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _nothing() -> None:
    """Do nothing after a step: the probe is off."""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.probe_overhead", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--factory", default="loka.zoo:wukong_small", help="package.module:name of the model")
    parser.add_argument("--inputs", default="loka.zoo:wukong_small_inputs", help="package.module:name of its inputs")
    parser.add_argument("--batch", type=int, default=16384, help="samples in a step")
    parser.add_argument("--every", type=int, default=100, help="one step in so many is sampled")
    parser.add_argument("--windows", type=int, default=7, help="pairs of windows to measure")
    parser.add_argument("--autocast", action="store_true", help="float32 parameters under autocast to bfloat16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    def study() -> str:
        cost = measure(
            options.factory,
            options.inputs,
            options.batch,
            every=options.every,
            windows=options.windows,
            autocast=options.autocast,
            device=options.device,
        )
        return json.dumps(asdict(cost), indent=2) if options.json else table(cost)

    return run_study(study)


if __name__ == "__main__":
    sys.exit(main())
