"""Candidates of `loka tune` that other processes compile ahead: as many as fit, and failures there change nothing.

That caches are hit is tested on a GPU.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loka.bench.model.model_run import RunLimits
from loka.bench.model.model_variants import MODEL_BASELINE, Casting, ModelVariant, StepBlock, StepLaunch
from loka.bench.packages import Workshop
from loka.bench.tune import tune_steps, warming
from loka.bench.tune.tune_steps import StepMeasurer
from loka.bench.tune.warming import CONTEXT_MIB, MARGIN, Warming, process_count, warm
from loka.kernels import call_counters
from loka.plan.tuning.candidates import Candidate, Candidates
from loka.policy.policy import Policy
from tests.support.bench_device import TRAINED, CpuBench
from tests.support.failing_bench import FailingElsewhere
from tests.support.plan.tuned import safe_policy

POLICY = f"{TRAINED}defaults: {{compute: auto, scaling: auto}}\n".replace("clicks", "clicks_warm")
MIB = 2**20

pytestmark = [pytest.mark.filterwarnings("ignore::loka.dispatch.LokaWarning"), pytest.mark.usefixtures("short_turns")]


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return safe_policy(tmp_path / "clicks.yaml", POLICY)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def in_fp8(policy: Policy, count: int) -> list[Candidate]:
    found = [each for each in Candidates(policy).found() if each.plan.bindings and each.sites_fp8]
    assert len(found) >= count
    return found[:count]


def test_a_process_says_why_it_compiled_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its body runs here; that it is waited for, and ended, is in the next test."""
    sent: list[str] = []
    channel: Any = SimpleNamespace(send=sent.append, close=lambda: None)
    monkeypatch.setattr(os, "dup2", lambda *descriptors: None)
    block = StepBlock(Casting.AUTOCAST, True, StepLaunch.LOOP)
    with Workshop() as workshop, torch._inductor.config.patch(compile_threads=1):
        for device in (CpuBench(), FailingElsewhere(how="memory", maker=0)):
            asked = Warming(policy, workshop.folder, block, device, synthetic=False)
            warm(asked, ModelVariant(MODEL_BASELINE), None, torch.get_num_threads(), channel)
    assert sent == ["", "OutOfMemoryError: CUDA out of memory"]


@pytest.mark.slow
@pytest.mark.usefixtures("two_cores")
def test_processes_are_ended_when_half_of_the_time_is_over(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "SHORTEST", 0.0)
    lines: list[str] = []
    start = time.monotonic()
    limits = RunLimits(3, 4.0, clock=lambda: 0.0)  # 4 s are left, whenever it is asked
    steps = StepMeasurer(policy, FailingElsewhere(how="sleep"), lines.append)(in_fp8(policy, 2), limits)
    assert [each.failure for each in steps.values()] == ["", "", ""]
    assert sum("its time was up (--seconds)" in line for line in lines) == 2
    assert sum("0 of 2 are compiled" in line for line in lines) == 1
    assert sum("will be compiled when it is measured" in line for line in lines) == 2
    assert [len(each.figures.rounds) for each in steps.values() if each.figures is not None] == [3, 3, 3]
    assert time.monotonic() - start < 300


def test_waves_follow_the_order_of_measuring(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class TwoAtATime:
        def __init__(self, *arguments: object) -> None: ...

        def wave(self, variants: Sequence[ModelVariant], peak_mib: float | None, limits: RunLimits) -> int:
            assert peak_mib == 2.0  # CpuBench: 3 MiB, less the 1 MiB that was in use before
            events.append("wave " + ", ".join(each.name for each in variants))
            return 2 if len(variants) > 1 else 0

    monkeypatch.setattr(tune_steps, "Warmer", TwoAtATime)
    candidates = in_fp8(policy, 3)
    first, second, third = (each.title for each in candidates)

    def progress(line: str) -> None:
        if " rounds" not in line:
            events.append(line.removeprefix("train autocast reduce-overhead ").rpartition(": ")[0])

    StepMeasurer(policy, CpuBench(), progress)(candidates, RunLimits(3, math.inf))
    assert events == [MODEL_BASELINE, f"wave {first}, {second}, {third}", first, second, f"wave {third}", third]


@pytest.mark.parametrize(
    ("cores", "peak_mib", "free_mib", "asked", "expected"),
    [
        (16, None, None, None, 16),
        (16, None, None, 3, 3),
        (2, None, None, 3, 2),
        (16, 1000.0, 10 * (MARGIN * 1000 + CONTEXT_MIB), None, 10),
        (16, 1000.0, 10 * (MARGIN * 1000 + CONTEXT_MIB) - 1, None, 9),
        (16, 1000.0, 100.0, None, 0),
    ],
)
def test_as_many_processes_as_cores_and_memory_hold(
    cores: int,
    peak_mib: float | None,
    free_mib: float | None,
    asked: int | None,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert process_count(peak_mib, None if free_mib is None else int(free_mib * MIB), asked) == expected


@pytest.mark.parametrize("bench", [CpuBench(free_bytes=MIB), CpuBench()], ids=["memory", "jobs"])
def test_without_room_or_with_one_job_all_is_compiled_here(policy: Policy, bench: CpuBench) -> None:
    lines: list[str] = []
    jobs = 1 if bench.free_bytes is None else 16
    steps = StepMeasurer(policy, bench, lines.append, jobs=jobs)(in_fp8(policy, 2), RunLimits(3, math.inf))
    assert [each.failure for each in steps.values()] == ["", "", ""]
    assert not any("processes" in line for line in lines)
    assert bench.compiled_modes == ["reduce-overhead"] * 3


def test_a_folder_of_another_process_is_read_and_stays(policy: Policy) -> None:
    (candidate,) = in_fp8(policy, 1)
    with Workshop() as ours:
        made = ours.package(candidate.plan)
        module = ours.folder / candidate.plan.name / "modules.py"
        written = module.stat().st_mtime_ns
        with Workshop(ours.folder) as theirs:
            again = theirs.package(candidate.plan)
            assert (again is made, again.__file__) == (False, made.__file__)
        assert module.stat().st_mtime_ns == written
    assert not module.exists()


def test_ids_of_counters_can_be_left_out() -> None:
    first = call_counters.new_counters(1)
    call_counters.leave_out(first + 1000)
    assert call_counters.new_counters(2) == first + 1000
    call_counters.leave_out(first)  # never again
    assert call_counters.new_counters(1) == first + 1002
