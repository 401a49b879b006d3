"""The CPU as a device of the bench, where compiling fails in other processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tests.support.bench_device import CpuBench, out_of_memory


@dataclass
class FailingElsewhere(CpuBench):
    """In processes other than the one that made it, compiling ends in `how`: "memory" or "sleep"."""

    how: str = ""
    maker: int = field(default_factory=os.getpid)

    def compiled(self, model: nn.Module, mode: str | None) -> Callable[..., Any]:
        if os.getpid() != self.maker:
            if self.how == "memory":
                raise out_of_memory()
            time.sleep(600)
        return super().compiled(model, mode)
