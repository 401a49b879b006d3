"""Mean and covariance of rows, learned batch by batch: the paper's batched Welford update, exact merging, a sketch.

For a batch of B rows with mean mu_b and summed outer products S_b of deviations, after n rows:

    n' = n + B,  d = mu_b - mu,  mu' = mu + (B / n') d,  S' = S + S_b + (n B / n') d d^T

in float32 on the device. The last term is part of the product as an additional row, sqrt(n B / n') d. With more than
FULL_WIDTH features, only S @ sketch_matrix and the diagonal of S are kept. Both are linear in S, so the same update and
merge apply to them, and no (C, C) matrix is ever made.

The sketch gives a low-rank plus diagonal covariance (Nystroem): with Y = S @ T for the first SKETCH columns T, S is
about Y (T^T Y)^+ Y^T; the missing diagonal is added. Nearly independent features would fill that low rank with random
directions, so the diagonal found is subtracted and the fit repeated, ROUNDS times, each from the sketch alone, since (S
- D) T = Y - D T. The remaining CHECKS columns, which are not used for fits, measure the relative Frobenius error of
each, since E ||A t||^2 = ||A||_F^2 for a standard normal t, and the best is kept: S - D need not be positive, so a
later round may be worse.

`JointTracker` learns those of an input and its output gradient together, the terms of a weight gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.probe.stats.graph_replay import Replayed, Replays
from loka.probe.stats.site_stats import (
    CHECKS,
    FULL_WIDTH,
    JOINT,
    SKETCH,
    JointStats,
    LowRank,
    Moments,
    comoment_columns,
)

TEST_SEED = 20240917
LARGEST = 2.0**48  # rows with a larger |x| are excluded from moments: their squares might overflow float32 sums
ROUNDS = 8
TEST_STEPS = 64  # entries of the test matrix are multiples of 1 / 64: exact in TF32, and the same on every machine


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a tracker: host counters, and clones of its tensors, still on their device."""

    ints: dict[str, int]
    tensors: dict[str, Tensor]


def sketch_matrix(width: int) -> Tensor:
    """The (width, SKETCH + CHECKS) float32 standard normal matrix of the sketch, on the CPU, the same for a width."""
    generator = torch.Generator().manual_seed(TEST_SEED + width)
    drawn = torch.randn((width, SKETCH + CHECKS), generator=generator, dtype=torch.float64)
    return ((drawn * TEST_STEPS).round() / TEST_STEPS).to(torch.float32)


class MomentsTracker:
    """Learns the moments of rows with `width` features on `device`. Never waits for the device."""

    def __init__(self, width: int, device: torch.device | str) -> None:
        self.width = width
        # Never exactly zero, to avoid a division by zero; vanishes with the first row, as 1e-300 + 1 is 1.
        self._count = torch.full((), 1e-300, dtype=torch.float64, device=device)
        self._mean = torch.zeros(width, dtype=torch.float32, device=device)
        self._test = sketch_matrix(width).to(device) if width > FULL_WIDTH else None
        self._comoment = torch.zeros((width, comoment_columns(width)), dtype=torch.float32, device=device)
        # Stays zero if the full comoment includes it.
        self._diagonal = torch.zeros(width, dtype=torch.float32, device=device)

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Add `rows`, (R, width) float32.

        Rows with a non-finite element, or one beyond LARGEST, are excluded.
        """
        usable = torch.linalg.vector_norm(rows, math.inf, dim=1, keepdim=True) < LARGEST  # False for NaN
        self.update_usable(rows.nan_to_num(0.0, 0.0, 0.0), usable)

    @torch.no_grad()
    def update_usable(self, rows: Tensor, usable: Tensor) -> None:
        """The same for `rows` (R, width) with finite elements; only rows with `usable` (R, 1) bool count."""
        with torch.autocast(rows.device.type, enabled=False):
            self._take(rows, usable)

    def _take(self, rows: Tensor, usable: Tensor) -> None:
        batch = usable.sum(dtype=torch.float64)
        kept = rows * usable
        batch_mean = kept.sum(0) / batch.clamp(min=1.0)
        shift = batch_mean - self._mean
        share = batch / (self._count + batch)
        between = torch.sqrt(self._count * share) * shift
        # One additional row: the deviations from the batch's mean, and the step between the means.
        deviations = torch.cat((torch.addcmul(kept, usable, batch_mean, value=-1.0), between[None]))
        if self._test is None:
            self._comoment.addmm_(deviations.t(), deviations)
        else:
            self._comoment.addmm_(deviations.t(), deviations @ self._test)
            norms = torch.linalg.vector_norm(deviations, dim=0)
            self._diagonal.addcmul_(norms, norms)
        self._mean.addcmul_(shift, share)
        self._count += batch

    @property
    def usable(self) -> Tensor:
        """Number of rows so far, () float64."""
        return self._count

    def power(self) -> Tensor:
        """Sum of the squares of all elements so far, () float64."""
        diagonal = self._comoment.diagonal() if self._test is None else self._diagonal
        return self._count * self._mean.double().square().sum() + diagonal.double().sum()

    def snapshot(self) -> Snapshot:
        """The statistics so far."""
        return Snapshot(
            ints={"width": self.width},
            tensors={
                "count": self._count.clone(),
                "mean": self._mean.clone(),
                "diagonal": self._diagonal.clone(),
                "comoment": self._comoment.clone(),
            },
        )


def moments_stats(snapshot: Snapshot) -> Moments:
    """Read a MomentsTracker's snapshot to the host, in float64."""
    held = {name: value.detach().to("cpu", torch.float64) for name, value in snapshot.tensors.items()}
    comoment, diagonal = held["comoment"], held["diagonal"]
    if snapshot.ints["width"] <= FULL_WIDTH:
        comoment = (comoment + comoment.t()) / 2
        diagonal = comoment.diagonal().clone()
    return Moments(count=int(held["count"]), mean=held["mean"], diagonal=diagonal, comoment=comoment)


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of the rows of both, of the same features, as from one pass, in float64."""
    if not a.count or not b.count:
        return a if a.count else b
    count = a.count + b.count
    share = b.count / count
    shift = b.mean.double() - a.mean.double()
    width = shift.numel()
    across = shift if width <= FULL_WIDTH else sketch_matrix(width).double().t() @ shift
    weight = a.count * share
    return Moments(
        count=count,
        mean=a.mean.double() + share * shift,
        diagonal=a.diagonal.double() + b.diagonal.double() + weight * shift.square(),
        comoment=a.comoment.double() + b.comoment.double() + weight * torch.outer(shift, across),
    )


def covariance(moments: Moments) -> Tensor | LowRank:
    """The covariance S / (count - 1): (C, C) float64 up to FULL_WIDTH features, otherwise low rank plus diagonal.

    Zero for fewer than two rows.
    """
    degrees = max(moments.count - 1, 1)
    width = moments.mean.numel()
    if width <= FULL_WIDTH:
        return moments.comoment.double() / degrees
    return low_rank(moments.comoment.double() / degrees, moments.diagonal.double() / degrees)


def low_rank(sketch: Tensor, diagonal: Tensor) -> LowRank:
    """A symmetric positive semidefinite matrix A from A @ sketch_matrix and its diagonal.

    `sketch` is (C, SKETCH + CHECKS), `diagonal` (C,), both float64. The result has exactly this diagonal, and a factor
    of at most SKETCH columns.
    """
    test = sketch_matrix(diagonal.numel()).double()
    norm = float(sketch[:, SKETCH:].norm())
    if norm == 0.0:
        return LowRank(diagonal.new_zeros((diagonal.numel(), 0)), diagonal.clamp(min=0.0), 0.0)
    rest = torch.zeros_like(diagonal)
    found: list[LowRank] = []
    for _ in range(ROUNDS):
        factor, rest = _fit(sketch, diagonal.clamp(min=0.0), rest, test)
        check = test[:, SKETCH:]
        missed = sketch[:, SKETCH:] - factor @ (factor.t() @ check) - rest[:, None] * check
        found.append(LowRank(factor, rest, float(missed.norm()) / norm))
    return min(found, key=lambda fit: fit.error)


def _fit(sketch: Tensor, variance: Tensor, apart: Tensor, test: Tensor) -> tuple[Tensor, Tensor]:
    """Factor and diagonal of A, with the diagonal matrix `apart` subtracted before the low-rank fit."""
    factor = _nystroem(sketch[:, :SKETCH] - apart[:, None] * test[:, :SKETCH], test[:, :SKETCH])
    explained = factor.square().sum(1)
    # A row may have more than its variance: it is scaled down to it, so that no diagonal is negative.
    over = torch.where(explained > variance, variance / explained.clamp(min=torch.finfo(torch.float64).tiny), 1.0)
    factor = factor * over.sqrt()[:, None]
    return factor, (variance - factor.square().sum(1)).clamp(min=0.0)


def _nystroem(sketch: Tensor, test: Tensor) -> Tensor:
    """F with F F^T = Y (T^T Y)^+ Y^T, for Y = sketch and T = test, without directions that are rounding noise."""
    core = test.t() @ sketch
    values, vectors = torch.linalg.eigh((core + core.t()) / 2)
    largest = float(values[-1])
    # T^T Y is symmetric up to rounding (float32, or TF32 if enabled by the user), which gives the size of the noise.
    noise = float((core - core.t()).norm())
    kept = values > max(4.0 * noise, 1e-12 * largest, 0.0)
    factor: Tensor = sketch @ (vectors[:, kept] / values[kept].sqrt())
    return factor


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


class JointTracker(Replayed):
    """Learns the moments of [input[:, input_features], grad_output[:, grad_features]] over rows."""

    def __init__(self, input_width: int, grad_width: int, device: torch.device | str) -> None:
        self.input_features = subset(input_width, JOINT).to(device)
        self.grad_features = subset(grad_width, JOINT).to(device)
        self._moments = MomentsTracker(self.input_features.numel() + self.grad_features.numel(), device)
        self._features = (self.input_features, self.grad_features)
        self._coherence = torch.zeros(2, dtype=torch.float64, device=device)  # JointStats.coherent, .incoherent

    @torch.no_grad()
    def update(self, x: Tensor, grad: Tensor) -> None:
        """Add the chosen features of the same R rows: `x` (R, J) and `grad` (R, I), float32."""
        self._run(x, grad, lambda: None)

    def capture(self, rows: int, replays: Replays) -> None:
        """Use a CUDA graph from now on for calls with this number of sampled rows. Waits for the device."""
        sizes = [(rows, part.numel()) for part in self._features]
        x, grad = (torch.zeros(size, dtype=torch.float32, device=replays.device) for size in sizes)
        JointTracker(x.shape[1], grad.shape[1], replays.device).update(x, grad)  # creates handles
        self._replay = replays.capture(self._take, x, grad)

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
