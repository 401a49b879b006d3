"""Figures of single steps, for `Probe(on_statistics=...)`: differences of what the trackers have summed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.numerics.enums import Format, Operand
from loka.probe.profile.summarise import share_of
from loka.probe.stats.bins import VIEWS, HistogramView
from loka.probe.stats.operand_tracker import OperandTracker, without_filling
from loka.probe.stats.site_trackers import Trackers, apart

FORMAT = Format.E4M3  # that underflow is of
UNDERFLOW = (HistogramView.TENSORWISE, HistogramView.ROWWISE)  # by dynamic scales of this kind


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a tracker had summed: host counters, and `OperandTracker.totals` on the host."""

    calls: int
    sampled: int
    totals: Tensor


class StepFigures:
    """The figures of what trackers saw since the last reading."""

    def __init__(self) -> None:
        self._before: dict[str, _Seen] = {}

    def read(self, sites: Iterable[Trackers]) -> dict[str, float]:
        """Figures by `SITE/OPERAND/FIGURE`, of operands that were seen since. Waits for the devices, once each."""
        sites = [each for each in sites if each.input.calls or each.grad_output.calls]
        trackers = {
            f"{each.live.site.name}/{tracker.operand.value}": tracker
            for each in sites
            for tracker in (each.input, each.grad_output)
        }
        figures: dict[str, float] = {}
        for name, totals in _on_host({name: _totals(tracker) for name, tracker in trackers.items()}).items():
            tracker, before = trackers[name], self._before.get(name)
            now = _Seen(tracker.calls, tracker.sampled, totals)
            self._before[name] = now
            if now.calls > (0 if before is None else before.calls):
                found = _between(tracker, before, now)
                figures |= {f"{name}/{figure}": value for figure, value in found.items()}
        weights = _on_host({f"{each.live.site.name}/{Operand.WEIGHT.value}": _weight(each) for each in sites})
        for name, both in weights.items():
            figures |= {f"{name}/amax": float(both[0]), f"{name}/rms": float(both[1])}
        return figures


def _totals(tracker: OperandTracker) -> Tensor:
    with apart(tracker.device):
        return tracker.totals()


def _weight(site: Trackers) -> Tensor:
    """amax and rms of the weight, (2,) float64; non-finite if an element is."""
    with apart(site.device):
        weight = site.live.weight.value.detach().to(torch.float32)
        return torch.stack((weight.abs().amax(), weight.square().mean().sqrt())).double()


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of different lengths on the host, with one copy from each device."""
    found: dict[str, Tensor] = {}
    for device in {tensor.device for tensor in tensors.values()}:
        names = [name for name, tensor in tensors.items() if tensor.device == device]
        joined = torch.cat([tensors[name] for name in names]).cpu()
        found |= zip(names, torch.split(joined, [tensors[name].numel() for name in names]), strict=True)
    return {name: found[name] for name in tensors}


def _between(tracker: OperandTracker, before: _Seen | None, now: _Seen) -> dict[str, float]:
    """The figures of what came between two readings."""
    totals = now.totals if before is None else now.totals - before.totals
    sampled = now.sampled - (0 if before is None else before.sampled)
    elements = sampled * tracker.width
    rows, power, zeros, nonfinite = totals[:4].tolist()
    figures = {
        "amax": float(now.totals[4]),
        "rms": (max(power, 0.0) / (rows * tracker.width)) ** 0.5 if rows >= 0.5 else 0.0,
        "zeros": zeros / elements if elements else 0.0,
        "nonfinite": nonfinite / elements if elements else 0.0,
    }
    relative = totals[5:].round().to(torch.int64).view(len(VIEWS), -1)
    counts = without_filling(relative, round(zeros), round(nonfinite), elements)
    for view in UNDERFLOW:
        figures[f"underflow_{view.value}"] = share_of(view, FORMAT, counts[VIEWS.index(view)]).underflow
    return figures
