"""The trackers of one site, and their snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from loka.errors import InputError
from loka.graph.sites.site import GemmKind
from loka.numerics.enums import Operand
from loka.probe.capture.live_sites import LiveSite
from loka.probe.capture.operand_views import column_amax, rows_of, take_rows
from loka.probe.stats.graph_replay import Replays
from loka.probe.stats.moments import JointTracker, Snapshot, joint_stats
from loka.probe.stats.operand_tracker import OperandTracker, operand_stats
from loka.probe.stats.site_stats import SiteStats
from loka.probe.stats.weight_tracker import WeightTracker, weight_stats


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Isolates operations from the user's step: no gradients, no autocast, and no mode sees them.

    For example, selective checkpointing is a mode that counts operations.
    """
    with (
        torch._C.DisableTorchFunction(),
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        yield


@dataclass(frozen=True, slots=True)
class SiteSnapshot:
    """Snapshot of a site's statistics at some step."""

    name: str
    k: int
    n: int
    parts: dict[str, Snapshot]  # those that were seen, by field of SiteStats


_READERS: dict[str, Callable[[Snapshot], Any]] = {
    "input": operand_stats,
    "grad_output": operand_stats,
    "joint": joint_stats,
    "weight": weight_stats,
}


def read(snapshot: SiteSnapshot) -> SiteStats:
    """The statistics of a site from a snapshot. Reads tensors to the host."""
    parts = {name: read(snapshot.parts[name]) if name in snapshot.parts else None for name, read in _READERS.items()}
    return SiteStats(snapshot.name, snapshot.k, snapshot.n, **parts)


class Trackers:
    """All trackers of one site, on the device of its Parameter."""

    def __init__(self, live: LiveSite) -> None:
        site, device = live.site, live.weight.parameter.device
        self.live = live
        self.device = device
        self.input = OperandTracker(Operand.INPUT, site.k, device)
        self.grad_output = OperandTracker(Operand.GRAD_OUTPUT, site.n, device)
        self.joint = JointTracker(site.k, site.n, device)
        self.weight = WeightTracker(site.n, site.k, device)
        # x @ P has its Parameter as (K, N). For a square one, the calls decide.
        square, shape = site.k == site.n, live.weight.shape
        self.transposed = site.kind is GemmKind.MATMUL if square else len(shape) == 2 and shape[0] != site.n
        self._joined = 0
        self._weight_step = -1

    def capture(self, rows: int, replays: Replays) -> None:
        """Capture updates with this number of sampled rows as CUDA graphs of one launch. Waits for the device."""
        with apart(self.device):
            for tracker in (self.input, self.grad_output, self.joint):
                if not replays.full:
                    tracker.capture(rows, replays)

    def check_device(self, x: Tensor) -> None:
        """Raise InputError if an operand is on another device than the trackers."""
        if x.device != self.device:
            raise InputError(
                f"probe: site {self.live.site.name!r}: its input is on {x.device}, but its weight was on {self.device} "
                f"when the Probe was entered: move the model first, then enter `with Probe(...)`"
            )

    def take_input(self, x: Tensor, index: Tensor | None) -> Tensor:
        """Record a call's input (..., K); returns its sampled rows (R, K)."""
        rows = take_rows(x, index)
        self.input.update(rows, column_amax(x), rows_of(x))
        return rows

    def joint_part(self, rows: Tensor) -> Tensor:
        """The features of an input's sampled rows that are kept until the output gradient arrives."""
        return rows.index_select(1, self.joint.input_features)

    def take_gradient(self, grad: Tensor, index: Tensor | None, part: Tensor | None) -> None:
        """Record a call's output gradient (..., N); `part` is of the same rows of the input."""
        rows = take_rows(grad, index)
        self.grad_output.update(rows, column_amax(grad), rows_of(grad))
        if part is not None:
            self.joint.update(part, rows.index_select(1, self.joint.grad_features))
            self._joined += 1

    def take_weight(self, step: int, together: bool) -> None:
        """Record the weight after `step` steps, once; a sharded one if all ranks do so `together`."""
        if step == self._weight_step or (self.live.is_sharded and not together):
            return
        self._weight_step = step
        with apart(self.device):
            weight = self.live.matrix.detach()
            self.weight.update((weight.t() if self.transposed else weight).contiguous(), step)

    def snapshot(self) -> SiteSnapshot:
        """The statistics so far. If no call was seen, also without the weight."""
        trackers = {"input": self.input, "grad_output": self.grad_output}
        with apart(self.device):
            parts = {name: tracker.snapshot() for name, tracker in trackers.items() if tracker.calls}
            if parts and self._weight_step >= 0:
                parts["weight"] = self.weight.snapshot()
            if self._joined:
                parts["joint"] = self.joint.snapshot()
        return SiteSnapshot(self.live.site.name, self.live.site.k, self.live.site.n, parts)
