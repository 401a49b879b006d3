"""Measures candidates of `loka tune` in a process without pytest.

Inductor's cache keys pickle torch's constants by the first module that holds torch, which under pytest is its conftest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from torch._dynamo.utils import counters

from loka.bench import timing
from loka.bench.device import BenchDevice
from loka.bench.model.model_run import RunLimits
from loka.bench.tune.tune_steps import StepMeasurer
from loka.kernels import call_counters
from loka.plan.tuning.candidates import Candidate
from loka.policy.policy import Policy

Lookups = list[tuple[str, int, int]]  # line of progress, and hits and misses of Inductor's cache before it


def measure(
    policy: Policy, candidates: Sequence[Candidate], device: BenchDevice, folder: str, channel: Connection
) -> None:
    """Send the lookups, and the failures by title. Each candidate is compiled in a process of its own, into `folder`.

    A policy without a train section is measured on its example inputs.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
    os.cpu_count = lambda: len(candidates)
    timing.STEPS, timing.TURN_WARM_UPS = 1, 0
    call_counters.new_counters(7)  # what ran before in this process has no effect
    lookups: Lookups = []

    def progress(line: str) -> None:
        found = counters["inductor"]
        lookups.append((line, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]))
        counters.clear()

    measurer = StepMeasurer(policy, device, progress, synthetic=policy.train is None)
    steps = measurer(candidates, RunLimits(3, time.monotonic() + 600))
    channel.send((lookups, {title: each.failure for title, each in steps.items()}))
