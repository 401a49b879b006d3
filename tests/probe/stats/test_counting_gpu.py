"""The kernel that counts on a GPU, against what torch counts on the CPU."""

from __future__ import annotations

import pytest
import torch

from loka.numerics.enums import Operand
from loka.probe.stats.graph_replay import Replays
from loka.probe.stats.operand_tracker import OperandTracker, operand_stats
from tests.support.gpu import ON_GPU

pytestmark = ON_GPU

EXACT = ("values", "relative", "column_amax", "call_amax")
COUNTS = ("calls", "rows", "sampled", "nonfinite", "nonfinite_calls")


def heavy(rows: int, width: int, seed: int) -> torch.Tensor:
    """Values over many octaves, some rows large, some columns zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator) * torch.randn(rows, width, generator=generator).mul(3).exp2()
    x *= torch.randn(rows, 1, generator=generator).mul(4).exp2()
    x[:, :: max(width // 3, 1)] = 0.0
    return x


def learned(calls, operand, width, device, graph=False):
    tracker = OperandTracker(operand, width, device)
    if graph:
        tracker.capture(calls[0].shape[0], Replays(torch.device(device)))
    for x in calls:
        x = x.to(device)
        tracker.update(x, torch.linalg.vector_norm(x, float("inf"), dim=0), x.shape[0] + 5)
    return operand_stats(tracker.snapshot())


@pytest.mark.parametrize("operand", [Operand.INPUT, Operand.GRAD_OUTPUT])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 13), (17, 128), (200, 479), (512, 2048), (33, 8256)])
@pytest.mark.parametrize("graph", [False, True])
def test_the_gpu_counts_what_the_cpu_counts(operand, rows, width, graph):
    calls = [heavy(rows, width, seed) for seed in range(3)]
    calls.append(torch.zeros(rows, width))
    calls[1][0, 0] = float("nan")
    calls[1][-1, -1] = float("-inf")
    on_gpu, on_cpu = learned(calls, operand, width, "cuda", graph), learned(calls, operand, width, "cpu")
    for name in COUNTS:
        assert getattr(on_gpu, name) == getattr(on_cpu, name), name
    for name in EXACT:
        assert torch.equal(getattr(on_gpu, name), getattr(on_cpu, name)), name
    for name in ("row_rms", "row_spread", "block_spread"):  # a rounding may move a row to the next bin
        first, second = getattr(on_gpu, name), getattr(on_cpu, name)
        assert first.sum() == second.sum(), name
        assert (first.cumsum(0) - second.cumsum(0)).abs().max() <= max(2, 0.002 * first.sum()), name
    torch.testing.assert_close(
        on_gpu.moments.mean, on_cpu.moments.mean, rtol=1e-4, atol=1e-6 * float(calls[0].abs().max())
    )


@pytest.mark.parametrize("operand", [Operand.INPUT])
@pytest.mark.parametrize(("rows", "width"), [(17, 128), (512, 2048), (33, 8256)])
def test_one_kernel_counts_what_many_do(operand, rows, width, monkeypatch):
    calls = [heavy(rows, width, seed) for seed in range(3)]
    one = learned(calls, operand, width, "cuda")
    monkeypatch.setattr("loka.probe.stats.operand_tracker._kernel_for", lambda device: None)
    many = learned(calls, operand, width, "cuda")
    assert torch.equal(one.values, many.values)
    # torch divides by a number on a GPU as it multiplies by the reciprocal: next to a boundary that may fall beyond it
    assert (one.relative.cumsum(1) - many.relative.cumsum(1)).abs().sum() <= 1e-5 * one.relative.sum()


@pytest.mark.parametrize("operand", [Operand.INPUT])
def test_boundaries_fall_on_the_same_side(operand):
    x = torch.tensor([[2.0**e * m for e in range(-20, 20)] for m in (1.0, 1.5, 1.0 - 2.0**-24, 1.0 + 2.0**-23)])
    on_gpu, on_cpu = (learned([x, x * 448.0], operand, x.shape[1], device) for device in ("cuda", "cpu"))
    assert torch.equal(on_gpu.values, on_cpu.values)
    assert torch.equal(on_gpu.relative, on_cpu.relative)
