"""The matrix normal of a weight, learned at save time by the paper's flip-flop, and a few of its rows and columns.

For a weight W (N, K), W_c = W - mean with the additive mean row_mean[:, None] + column_mean[None, :]:

    U' = (1 / K) W_c V^-1 W_c^T        U <- m U + (1 - m) U'     (then V' with the new U)
    V' = (1 / N) W_c^T U^-1 W_c        V <- m V + (1 - m) V'

each then made symmetric and given 1e-6 of its mean diagonal as a ridge; at the end s = trace(U) / N, U <- U / s, V <- s
V. Two points are more precise here than in the paper:

- The start is U = I, V = mean(W_c^2) I. It counts as one update, and m is t / (t + 1) at update t until that exceeds
  the average's momentum: a few saves are then not dominated by the start, and V is never singular although a single W_c
  has at most min(N, K) directions.
- A side longer than FULL_WIDTH is never stored in full, but as U @ sketch_matrix and the diagonal of U; both are linear
  in U, so averaging, ridge and rescaling are exact. Where the other side's update needs U^-1, U is taken as low rank
  plus diagonal (Nystroem, rank SKETCH), which inverts cheaply (Woodbury). The diagonal then tends to be too small, so
  the inverse is too large: the result is scaled so that trace(U) trace(V) = N K mean(W_c^2), as in expectation.
  LowRank.error, measured on columns not used in the fit, is the quality of the rest.

Non-finite elements are counted, excluded from the histogram of values, and treated as zero elsewhere. `update` never
waits for the device: `cholesky_ex` reports failure as a tensor, and an update that fails or becomes non-finite does not
change U and V.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loka.numerics.enums import Operand
from loka.probe.stats.moments import Snapshot, low_rank, sketch_matrix, subset
from loka.probe.stats.operand_tracker import LANES, count_values, zero_places
from loka.probe.stats.site_stats import (
    FULL_WIDTH,
    LOWEST,
    SKETCH,
    VALUE_BINS,
    WEIGHT_ROWS,
    ZERO_BIN,
    LowRank,
    WeightStats,
)

MOMENTUM = 0.95
RIDGE = 1e-6  # relative to the mean diagonal
LEAST_DIAGONAL = 1e-3  # of the mean diagonal: lower bound in low rank plus diagonal, so that the inverse is bounded
PRECISE = 2**22  # elements of a weight up to which the flip-flop is in float64; float32 above, to bound memory


@dataclass(frozen=True, slots=True)
class _Side:
    """U or V: in full, (C, C), or its product with the sketch matrix, (C, SKETCH + CHECKS); and its diagonal (C,)."""

    product: Tensor
    diagonal: Tensor

    def blend(self, other: _Side, momentum: float) -> _Side:
        """The average's next value."""
        return _Side(
            momentum * self.product + (1.0 - momentum) * other.product,
            momentum * self.diagonal + (1.0 - momentum) * other.diagonal,
        )

    def scaled(self, factor: Tensor) -> _Side:
        """The side times a number on the device."""
        return _Side(self.product * factor, self.diagonal * factor)

    def to(self, dtype: torch.dtype) -> _Side:
        """The side in another precision."""
        return _Side(self.product.to(dtype), self.diagonal.to(dtype))

    def finite(self) -> Tensor:
        """True, as a () bool tensor, if every element is finite."""
        return self.product.isfinite().all() & self.diagonal.isfinite().all()

    def where(self, good: Tensor, other: _Side) -> _Side:
        """This side if `good`, otherwise the other."""
        return _Side(torch.where(good, self.product, other.product), torch.where(good, self.diagonal, other.diagonal))


def _basis(width: int, device: torch.device | str) -> Tensor | None:
    """The sketch matrix that a side's product is with; None for the identity."""
    return sketch_matrix(width).to(device) if width > FULL_WIDTH else None


def _identity(width: int, basis: Tensor | None, device: torch.device | str) -> _Side:
    product = torch.eye(width, dtype=torch.float32, device=device) if basis is None else basis.clone()
    return _Side(product, torch.ones(width, dtype=torch.float32, device=device))


def _gram(centred: Tensor, given: _Side, given_basis: Tensor | None, basis: Tensor | None) -> tuple[_Side, Tensor]:
    """X A^-1 X^T / C for X = centred, (R, C), and A the side `given` of C; and true if A could be inverted.

    The result is the side of R in the form given by `basis`, with the ridge.
    """
    if given_basis is None:
        factor, failed = torch.linalg.cholesky_ex(given.product)
        white = torch.linalg.solve_triangular(factor, centred.t(), upper=False).t()
        less = None
    else:
        low, diagonal, failed = _low_rank(given, given_basis)
        scale = diagonal.rsqrt()
        white = centred * scale
        # (I + F F^T)^-1 = I - Q Q^T with Q = F L^-T, where L L^T = I + F^T F.
        low = low * scale[:, None]
        inner, failed_inner = torch.linalg.cholesky_ex(
            low.t() @ low + torch.eye(SKETCH, dtype=low.dtype, device=low.device)
        )
        less = white @ torch.linalg.solve_triangular(inner, low.t(), upper=False).t()
        failed = failed + failed_inner.abs()
    divisor = torch.full((), centred.shape[1], dtype=centred.dtype, device=centred.device)
    diagonal = white.square().sum(1)
    right = white.t() if basis is None else white.t() @ basis
    product = white @ right
    if less is not None:
        diagonal = (diagonal - less.square().sum(1)).clamp(min=0.0)
        product = product - less @ (less.t() if basis is None else less.t() @ basis)
        # In expectation mean(X^2) = trace(A) / C * trace(result) / R.
        power = centred.square().mean()
        divisor = (diagonal.mean() * given.diagonal.mean() / power.clamp(min=1e-30)).clamp(min=1e-30)
    return _with_ridge(_Side(product / divisor, diagonal / divisor), basis), failed == 0


def _with_ridge(side: _Side, basis: Tensor | None) -> _Side:
    """Adds RIDGE of the mean diagonal; a full side is also made symmetric."""
    ridge = RIDGE * side.diagonal.mean()
    if basis is not None:
        return _Side(side.product + ridge * basis, side.diagonal + ridge)
    product = (side.product + side.product.t()) / 2
    diagonal = product.diagonal() + ridge
    return _Side(product.diagonal_scatter(diagonal), diagonal)


def _low_rank(side: _Side, basis: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Factor (C, SKETCH) and positive diagonal (C,) of a sketched side, and cholesky_ex's report. Does not wait."""
    sketch, test = side.product[:, :SKETCH], basis[:, :SKETCH]
    core = test.t() @ sketch
    core = (core + core.t()) / 2
    shift = 10.0 * torch.finfo(core.dtype).eps * core.diagonal().sum()
    core = core + shift * torch.eye(SKETCH, dtype=core.dtype, device=core.device)
    inner, failed = torch.linalg.cholesky_ex(core)
    factor = torch.linalg.solve_triangular(inner, sketch.t(), upper=False).t()
    rest = side.diagonal - factor.square().sum(1)
    return factor, torch.maximum(rest, LEAST_DIAGONAL * side.diagonal.mean()), failed


class WeightTracker:
    """Learns a weight of `n` rows and `k` columns from its values at a few points of training."""

    def __init__(self, n: int, k: int, device: torch.device | str, momentum: float = MOMENTUM) -> None:
        self.n = n
        self.k = k
        self.updates = 0
        self.step = 0
        self._momentum = momentum
        self._dtype = torch.float64 if n * k <= PRECISE else torch.float32
        self._u_basis, self._v_basis = _basis(n, device), _basis(k, device)
        self._u, self._v = _identity(n, self._u_basis, device), _identity(k, self._v_basis, device)
        self._row_index, self._column_index = subset(n, WEIGHT_ROWS).to(device), subset(k, WEIGHT_ROWS).to(device)
        self._zero_places = zero_places(torch.arange(k) % LANES, LANES).to(device)
        self._seen: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, weight: Tensor, step: int) -> None:
        """One flip-flop with `weight`, (N, K) of any float type, at step `step`."""
        with torch.autocast(weight.device.type, enabled=False):
            values = weight.detach().float()
            clean = values.nan_to_num(0.0, 0.0, 0.0)
            self.updates += 1
            self.step = step
            row_mean, column_mean = self._look(values, clean)
            self._flip_flop(clean.to(self._dtype) - row_mean[:, None] - column_mean)

    def _look(self, values: Tensor, clean: Tensor) -> tuple[Tensor, Tensor]:
        """Record the statistics of this step alone; returns the additive mean."""
        row_mean = clean.mean(1, dtype=self._dtype)
        column_mean = clean.mean(0, dtype=self._dtype) - row_mean.mean()
        magnitude = clean.abs()
        counts = torch.zeros((VALUE_BINS, LANES), dtype=torch.int64, device=clean.device)
        count_values(clean, magnitude, self._zero_places, counts, LOWEST[Operand.WEIGHT])
        self._seen = {
            "amax": magnitude.amax(),
            "nonfinite": (clean != values).sum(),
            "row_mean": row_mean,
            "column_mean": column_mean,
            "rows": clean.index_select(0, self._row_index),
            "columns": clean.index_select(1, self._column_index),
            "row_amax": magnitude.amax(1),
            "column_amax": magnitude.amax(0),
            "values": counts.sum(1),
        }
        return row_mean, column_mean

    def _flip_flop(self, centred: Tensor) -> None:
        momentum = min(self._momentum, self.updates / (self.updates + 1))
        kept_u, kept_v = self._u.to(self._dtype), self._v.to(self._dtype)
        if self.updates == 1:  # the isotropic start; an all-zero weight must not cause a division by zero
            kept_v = kept_v.scaled(centred.square().mean().clamp(1e-30, 1e30))
        u_basis = None if self._u_basis is None else self._u_basis.to(self._dtype)
        v_basis = None if self._v_basis is None else self._v_basis.to(self._dtype)
        new_u, good_v = _gram(centred, kept_v, v_basis, u_basis)
        u = kept_u.blend(new_u, momentum)
        new_v, good_u = _gram(centred.t(), u, u_basis, v_basis)
        v = kept_v.blend(new_v, momentum)
        scale = u.diagonal.mean()
        u, v = u.scaled(1.0 / scale).to(torch.float32), v.scaled(scale).to(torch.float32)
        good = good_u & good_v & u.finite() & v.finite()
        self._u = u.where(good, kept_u.to(torch.float32))
        self._v = v.where(good, kept_v.to(torch.float32))

    def snapshot(self) -> Snapshot:
        """The statistics so far; `weight_stats` needs at least one update."""
        tensors = {
            **self._seen,
            "u": self._u.product,
            "u_diagonal": self._u.diagonal,
            "v": self._v.product,
            "v_diagonal": self._v.diagonal,
            "row_index": self._row_index,
            "column_index": self._column_index,
        }
        return Snapshot(
            ints={"n": self.n, "k": self.k, "updates": self.updates, "step": self.step},
            tensors={name: tensor.clone() for name, tensor in tensors.items()},
        )


def weight_stats(snapshot: Snapshot) -> WeightStats:
    """Read a WeightTracker's snapshot to the host. Needs at least one update."""
    ints = snapshot.ints
    held = {name: tensor.cpu() for name, tensor in snapshot.tensors.items()}
    values = held["values"].clone()
    values[ZERO_BIN] -= held["nonfinite"]  # counted as zeros
    return WeightStats(
        step=ints["step"],
        updates=ints["updates"],
        amax=float(held["amax"]),
        nonfinite=int(held["nonfinite"]),
        row_mean=held["row_mean"].double(),
        column_mean=held["column_mean"].double(),
        u=_read_side(held["u"], held["u_diagonal"]),
        v=_read_side(held["v"], held["v_diagonal"]),
        row_index=held["row_index"],
        rows=held["rows"],
        column_index=held["column_index"],
        columns=held["columns"],
        row_amax=held["row_amax"].double(),
        column_amax=held["column_amax"].double(),
        values=values,
    )


def _read_side(product: Tensor, diagonal: Tensor) -> LowRank:
    """A full side as a square root without a diagonal; a sketched one as low rank plus diagonal."""
    product, diagonal = product.double(), diagonal.double()
    if diagonal.numel() > FULL_WIDTH:
        return low_rank(product, diagonal)
    values, vectors = torch.linalg.eigh(product)
    return LowRank(factor=vectors * values.clamp(min=0.0).sqrt(), diagonal=torch.zeros_like(diagonal), error=0.0)
