"""The CPU as a device of the bench: compiling with Inductor, or failing to in other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.support.bench_device import CpuBench, out_of_memory


@dataclass
class InductorBench(CpuBench):
    """Compiles as a GPU does, with Inductor."""

    def compiled(self, model: nn.Module, mode: str | None) -> Callable[..., Any]:
        super().compiled(model, mode)
        found: Callable[..., Any] = torch.compile(model, dynamic=False)
        return found

    def release(self) -> None:
        super().release()
        torch._dynamo.reset()


@dataclass
class FailingElsewhere(CpuBench):
    """In processes other than the one that made it, compiling ends in `how`: "memory", "death" or "sleep"."""

    how: str = ""
    maker: int = field(default_factory=os.getpid)

    def compiled(self, model: nn.Module, mode: str | None) -> Callable[..., Any]:
        if os.getpid() != self.maker:
            if self.how == "memory":
                raise out_of_memory()
            if self.how == "death":
                os._exit(3)
            time.sleep(600)
        return super().compiled(model, mode)
