"""The trackers of one site, and their snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from loka.errors import InputError
from loka.numerics.enums import Operand
from loka.probe.capture.live_sites import LiveSite
from loka.probe.capture.operand_views import column_amax, rows_of, take_rows
from loka.probe.stats.graph_replay import Replays
from loka.probe.stats.moments import JointTracker, Snapshot, joint_stats
from loka.probe.stats.operand_tracker import OperandTracker, operand_stats
from loka.probe.stats.site_stats import SiteStats
from loka.probe.stats.weight_tracker import WeightTracker, weight_stats
from loka.sites.site import GemmKind


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
    """Snapshot of a site's statistics at some step; None for a part that was never seen."""

    name: str
    k: int
    n: int
    input: Snapshot | None
    grad_output: Snapshot | None
    joint: Snapshot | None
    weight: Snapshot | None

    def parts(self) -> dict[str, Snapshot]:
        """The parts that were seen, by field."""
        parts = {field: getattr(self, field) for field in ("input", "grad_output", "joint", "weight")}
        return {field: part for field, part in parts.items() if part is not None}

    def with_parts(self, parts: dict[str, Snapshot]) -> SiteSnapshot:
        """The same with other snapshots."""
        return replace(
            self,
            input=parts.get("input"),
            grad_output=parts.get("grad_output"),
            joint=parts.get("joint"),
            weight=parts.get("weight"),
        )


def read(snapshot: SiteSnapshot) -> SiteStats:
    """The statistics of a site from a snapshot. Reads tensors to the host."""
    return SiteStats(
        name=snapshot.name,
        k=snapshot.k,
        n=snapshot.n,
        input=None if snapshot.input is None else operand_stats(snapshot.input),
        grad_output=None if snapshot.grad_output is None else operand_stats(snapshot.grad_output),
        joint=None if snapshot.joint is None else joint_stats(snapshot.joint),
        weight=None if snapshot.weight is None else weight_stats(snapshot.weight),
    )


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
        square = site.k == site.n
        self.transposed = site.kind is GemmKind.MATMUL if square else live.matrix.shape[0] != site.n
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

    def take_weight(self, step: int) -> None:
        """Record the weight after `step` steps, once."""
        if step == self._weight_step:
            return
        self._weight_step = step
        with apart(self.device):
            weight = self.live.matrix.detach()
            self.weight.update((weight.t() if self.transposed else weight).contiguous(), step)

    def snapshot(self) -> SiteSnapshot:
        """The statistics so far. If no call was seen, also without the weight."""
        seen = self.input.calls or self.grad_output.calls
        with apart(self.device):
            return SiteSnapshot(
                name=self.live.site.name,
                k=self.live.site.k,
                n=self.live.site.n,
                input=self.input.snapshot() if self.input.calls else None,
                grad_output=self.grad_output.snapshot() if self.grad_output.calls else None,
                joint=self.joint.snapshot() if self._joined else None,
                weight=self.weight.snapshot() if seen and self._weight_step >= 0 else None,
            )
