"""One long run: a training loop with an optimiser under autocast to bfloat16, its events, and its curve."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.long_runs.long_models import LongModel, batch_on
from loka.bench.quality.evaluation import normalised_entropy, predict, seeded
from loka.bench.quality.heads import ONLY
from loka.bench.quality.training_state import WeightAverage
from loka.zoo import click_loss
from loka.zoo.clicks import ClickStream

Patch = Callable[[nn.Module], object]  # changes the model in place

WARMUP = 200  # steps
DECAY = 0.999  # of the averaged weights that are evaluated: the last ones move NE by 0.2 % from point to point
WATCHED = 10  # steps from an event on, in which the loss is read: a step whose loss is not finite is left out


@dataclass(frozen=True, slots=True)
class Events:
    """What goes wrong, as shares of the run. A spike multiplies the learning rate by 3 for `spike_steps` steps (by
    10, DCNv2 is lost in BF16, too), an outlier batch has one dense feature in 64 a thousand times as large, a NaN is in
    one dense feature of one sample.
    """

    spikes: tuple[float, ...] = ()
    outliers: tuple[float, ...] = ()
    nans: tuple[float, ...] = ()
    spike_steps: int = 20


SCENARIOS = {
    "calm": Events(),
    "rough": Events(spikes=(0.25, 0.6), outliers=(0.4, 0.8), nans=(0.5,)),
}


@dataclass(frozen=True, slots=True)
class RunKey:
    """What tells runs apart. `precision`: bf16 or fp8; with `mods` it is another model, in both precisions."""

    model: str
    mods: bool
    precision: str
    scenario: str
    seed: int
    steps: int
    batch: int
    points: int  # of the curve
    test_rows: int


@dataclass(frozen=True, slots=True)
class Curve:
    """The results of a run: NE of the averaged weights on the test rows at `at` steps (the last is the
    final one), steps that were left out."""

    key: RunKey
    at: tuple[int, ...]
    ne: tuple[float, ...]
    left_out: tuple[int, ...]
    seconds: float


class CurveFile:
    """Finished curves, a line of JSON each, so that a stopped study goes on where it was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.curves: list[Curve] = [_curve(json.loads(line)) for line in lines]

    def has(self, key: RunKey) -> bool:
        """True if the run is finished."""
        return any(curve.key == key for curve in self.curves)

    def add(self, curve: Curve) -> None:
        """Append a curve."""
        self.curves.append(curve)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(curve)) + "\n")


def run(
    model: LongModel, key: RunKey, patch: Patch, device: str, compiled: bool, tell: Callable[[str], None]
) -> Curve:  # fmt: skip
    """Train one run; `patch` adapts the model and, for fp8, applies the package."""
    events = SCENARIOS[key.scenario]
    with seeded(key.seed, device):
        built = model.build().to(device)
    patch(built)
    forward: Any = torch.compile(built) if compiled else built
    optimizer = torch.optim.Adam(built.parameters(), lr=model.rate, foreach=True)
    average = WeightAverage(built, DECAY)
    spikes, outliers, nans = (_steps(shares, key.steps) for shares in (events.spikes, events.outliers, events.nans))
    watched = {step + later for step in (*spikes, *outliers, *nans) for later in range(WATCHED)}
    points = {max(1, key.steps * i // key.points) for i in range(1, key.points + 1)}
    at: list[int] = []
    ne: list[float] = []
    left_out: list[int] = []
    start = time.perf_counter()
    for step, ((dense, ids), click) in enumerate(_batches(key, device), start=1):
        spiked = any(first <= step < first + events.spike_steps for first in spikes)
        for group in optimizer.param_groups:
            group["lr"] = model.rate * min(1.0, step / WARMUP) * (3.0 if spiked else 1.0)
        dense = _disturbed(dense, step in outliers, step in nans)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = click_loss(forward(dense, ids), click)
        loss.backward()  # type: ignore[no-untyped-call]
        if step in watched and not bool(loss.isfinite()):
            left_out.append(step)
        else:
            optimizer.step()
            average.update()
        if step in points:
            at.append(step)
            with average.applied():
                ne.append(_evaluated(built, key, device))
            label = f"{key.model}{' with mods' if key.mods else ''} {key.precision} {key.scenario} seed {key.seed}"
            tell(f"{label}, step {step}: NE {ne[-1]:.5f}")
    return Curve(key, tuple(at), tuple(ne), tuple(left_out), time.perf_counter() - start)


def _batches(key: RunKey, device: str) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor]]:
    for batch in ClickStream("train", key.steps * key.batch, key.batch, key.seed):
        yield batch_on(device, batch)


def _disturbed(dense: Tensor, outlier: bool, nan: bool) -> Tensor:
    if outlier:
        dense = dense.clone()
        dense[::64, 0] *= 1e3
    if nan:
        dense = dense.clone()
        dense[0, 0] = torch.nan
    return dense


def _evaluated(model: nn.Module, key: RunKey, device: str) -> float:
    """NE of the test rows, under autocast as in training."""
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        logits, target = predict(model, ClickStream("test", key.test_rows, 4096, key.seed), device)[ONLY]
    return normalised_entropy(logits, target) if bool(logits.isfinite().all()) else float("nan")


def _steps(shares: tuple[float, ...], steps: int) -> frozenset[int]:
    return frozenset(max(1, round(share * steps)) for share in shares)


def _curve(data: dict[str, Any]) -> Curve:
    key = RunKey(**data["key"])
    return Curve(key, tuple(data["at"]), tuple(data["ne"]), tuple(data["left_out"]), data["seconds"])
