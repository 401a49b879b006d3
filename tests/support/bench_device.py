"""The CPU as a device for the bench of models: nothing is compiled or captured, and what was wanted is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from loka.bench import timing
from loka.bench.device import MIB, BenchDevice, CaptureError, KernelSum

MODELS = "tests.support.models.ablation_model"
CLICKS = f"""\
version: 1
name: clicks
model: {{factory: "{MODELS}:build", inputs: "{MODELS}:inputs", batch_size: 16}}
"""
TRAINED = f'{CLICKS}train: {{batches: "{MODELS}:batches", loss: "{MODELS}:loss"}}\n'
FP8 = "defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}\n"


@pytest.fixture
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU takes its time."""
    monkeypatch.setattr(timing, "STEPS", 1)
    monkeypatch.setattr(timing, "TURN_WARM_UPS", 0)


@dataclass
class CpuBench(BenchDevice):
    """`compiled_modes`: of each compiled model. `fail_compiling`: with this mode raise this error, once for each."""

    type: str = "cpu"
    compiled_modes: list[str | None] = field(default_factory=list)
    fail_compiling: dict[str | None, list[Exception]] = field(default_factory=dict)
    captures: int = 0
    refuse_captures: bool = False
    full_after: int = 1000  # models kept alive
    alive: int = 0
    free_bytes: int | None = None
    releases: int = 0
    sessions: int = 0
    replay_ms: list[float] = field(default_factory=lambda: [0.002])
    measured: list[int] = field(default_factory=list)  # milliseconds that replays were asked for

    @contextmanager
    def session(self) -> Iterator[None]:
        self.sessions += 1
        yield

    def compiled(self, model: nn.Module, mode: str | None) -> Callable[..., Any]:
        if self.fail_compiling.get(mode):
            raise self.fail_compiling[mode].pop()
        self.compiled_modes.append(mode)
        return model

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        if self.refuse_captures:
            raise CaptureError("the step cannot be captured: it waits for the device")
        self.captures += 1
        return step

    def wait(self) -> None:
        pass

    def kernels(self, step: Callable[[], object]) -> KernelSum | None:
        step()
        return KernelSum(7, 0.25)

    def allocated(self) -> int:
        return MIB

    def restart_peak(self) -> None:
        self.alive += 1

    def replays(self, replay: Callable[[], object], measured: int) -> list[float]:
        """Each replay runs the step, and takes as long as it is told."""
        self.measured.append(measured)
        for _ in self.replay_ms:
            replay()
        return self.replay_ms

    def peak_mib(self, held: int) -> float | None:
        return 3.0 - held / MIB

    def free(self) -> int | None:
        return self.free_bytes

    def is_full(self) -> bool:
        return self.alive >= self.full_after

    def release_memory(self) -> None:
        pass

    def release(self) -> None:
        self.alive = 0
        self.releases += 1


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory")
