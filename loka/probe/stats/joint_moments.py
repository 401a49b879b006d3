"""Joint moments of an input and its output gradient, for some features of each: the terms of a weight gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loka.probe.capture.graph_replay import GraphReplay, Replays
from loka.probe.stats.moments import LARGEST, MomentsTracker, Snapshot, moments_stats
from loka.probe.stats.site_stats import JOINT, JointStats

SUBSET_SEED = 20240918


def subset(width: int, limit: int) -> Tensor:
    """At most `limit` of `width` indices, ascending int64 on the CPU; deterministic.

    Random rather than evenly spaced: concatenated embeddings are periodic in their features, and a stride could match
    the period.
    """
    if width <= limit:
        return torch.arange(width)
    generator = torch.Generator().manual_seed(SUBSET_SEED + width)
    return torch.randperm(width, generator=generator)[:limit].sort().values


class JointTracker:
    """Learns the moments of [input[:, input_features], grad_output[:, grad_features]] over rows."""

    def __init__(self, input_width: int, grad_width: int, device: torch.device | str) -> None:
        self.input_features = subset(input_width, JOINT).to(device)
        self.grad_features = subset(grad_width, JOINT).to(device)
        self._moments = MomentsTracker(self.input_features.numel() + self.grad_features.numel(), device)
        self._features = (self.input_features, self.grad_features)
        self._coherence = torch.zeros(2, dtype=torch.float64, device=device)  # JointStats.coherent, .incoherent
        self._replay: GraphReplay | None = None

    @torch.no_grad()
    def update(self, x: Tensor, grad: Tensor) -> None:
        """Add the chosen features of the same R rows: `x` (R, J) and `grad` (R, I), float32."""
        if self._replay is not None and self._replay.fits(x, grad):
            self._replay.run(x, grad, lambda: None)
        else:
            self._settle()
            self._take(x, grad)

    def capture(self, rows: int, replays: Replays) -> None:
        """Use a CUDA graph from now on for calls with this number of sampled rows. Waits for the device."""
        x, grad = (torch.zeros((rows, part.numel()), device=replays.device) for part in self._features)
        JointTracker(x.shape[1], grad.shape[1], replays.device).update(x, grad)  # creates handles
        self._replay = replays.capture(self._take, x, grad)

    def _settle(self) -> None:
        """Make the current stream wait for the graphs' work."""
        if self._replay is not None:
            self._replay.join()

    def _take(self, x: Tensor, grad: Tensor) -> None:
        both = torch.cat((x, grad), 1)
        usable = torch.linalg.vector_norm(both, math.inf, dim=1, keepdim=True) < LARGEST  # False for NaN
        clean = both.nan_to_num(0.0, 0.0, 0.0) * usable
        self._moments.update_usable(clean, usable)
        own_x, own_grad = clean.double().split((x.shape[1], grad.shape[1]), 1)
        self._count_coherence(own_x, own_grad, usable)

    def _count_coherence(self, x: Tensor, grad: Tensor, usable: Tensor) -> None:
        """Add the means of (x.x')(g.g') over pairs of different rows, and over each row with itself."""
        rows = usable.sum(dtype=torch.float64)
        own = (x.square().sum(1) * grad.square().sum(1)).sum()
        pairs = (grad.t() @ x).square().sum() - own
        self._coherence += torch.stack((pairs / (rows * (rows - 1)).clamp(min=1.0), own / rows.clamp(min=1.0)))

    def snapshot(self) -> Snapshot:
        """The statistics so far."""
        self._settle()
        held = self._moments.snapshot()
        features = {"input_features": self.input_features.clone(), "grad_features": self.grad_features.clone()}
        own = {**features, "coherence": self._coherence.clone()}
        return Snapshot(ints=held.ints, tensors={**held.tensors, **own})


def joint_stats(snapshot: Snapshot) -> JointStats:
    """Read a JointTracker's snapshot to the host."""
    tensors = dict(snapshot.tensors)
    input_features, grad_features = tensors.pop("input_features").cpu(), tensors.pop("grad_features").cpu()
    coherent, incoherent = tensors.pop("coherence").tolist()
    moments = moments_stats(Snapshot(snapshot.ints, tensors))
    return JointStats(input_features, grad_features, moments, coherent, incoherent)
