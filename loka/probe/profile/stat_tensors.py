"""Requirements on the tensors of a site's statistics: shapes, dtypes and values, whoever wrote the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.errors import InputError
from loka.numerics.enums import Operand
from loka.probe.stats.bins import RELATIVE_BINS, ROW_RMS_BINS, SPREAD_BINS, VALUE_BINS, VIEWS
from loka.probe.stats.site_stats import (
    CHECKS,
    FULL_WIDTH,
    JOINT,
    SKETCH,
    WEIGHT_ROWS,
    LowRank,
    Moments,
    SiteStats,
)


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements on the tensors of one kind: `below` is of indices; not `signed` are maxima and sums of squares."""

    dtype: torch.dtype
    below: int | None = None
    finite: bool = True
    signed: bool = True

    def wrong(self, tensor: Tensor, shape: tuple[int, ...]) -> str | None:
        """The first error of a tensor, in words; None if it is as expected."""
        if tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
            return f"is {tensor.dtype} of shape {tuple(tensor.shape)}, but must be {self.dtype} of shape {shape}"
        if not tensor.numel():
            return None
        if self.finite and not bool(tensor.isfinite().all()):
            return "holds NaN or infinity"
        if not self.signed and float(tensor.min()) < 0:
            return "holds a negative number"
        if self.below is not None and int(tensor.max()) >= self.below:
            return f"holds {int(tensor.max())}, but must stay below {self.below}"
        return None


COUNTS = Expected(torch.int64, signed=False)
REAL = Expected(torch.float64)
POSITIVE = Expected(torch.float64, signed=False)
ELEMENTS = Expected(torch.float32, finite=False)  # of a weight, unmodified

_Row = tuple[str, Tensor, tuple[int, ...], Expected]


def check(stats: SiteStats) -> None:
    """Raise InputError at the first tensor of a site's statistics that no Probe writes."""
    for name, tensor, shape, expected in _rows(stats):
        wrong = expected.wrong(tensor, shape)
        if wrong is not None:
            raise InputError(f"site {stats.name!r}: {name} {wrong}")


def _rows(stats: SiteStats) -> Iterator[_Row]:
    k, n = stats.k, stats.n
    for operand, seen, width in ((Operand.INPUT, stats.input, k), (Operand.GRAD_OUTPUT, stats.grad_output, n)):
        if seen is None:
            continue
        if seen.operand is not operand:
            raise InputError(f"site {stats.name!r}: the statistics of its {operand} are of its {seen.operand}")
        for part, counts, shape in (
            ("values", seen.values, (width, VALUE_BINS)),
            ("relative", seen.relative, (len(VIEWS), RELATIVE_BINS)),
            ("row_rms", seen.row_rms, (ROW_RMS_BINS,)),
            ("row_spread", seen.row_spread, (SPREAD_BINS,)),
            ("block_spread", seen.block_spread, (SPREAD_BINS,)),
            ("call_amax", seen.call_amax, (ROW_RMS_BINS,)),
        ):
            yield f"{operand}/{part}", counts, shape, COUNTS
        yield f"{operand}/column_amax", seen.column_amax, (width,), POSITIVE
        yield from _moments(f"{operand}/moments", seen.moments, width)
    if (joint := stats.joint) is not None:
        yield from _indices("joint/input_features", joint.input_features, JOINT, k)
        yield from _indices("joint/grad_features", joint.grad_features, JOINT, n)
        yield from _moments("joint/moments", joint.moments, joint.input_features.numel() + joint.grad_features.numel())
    if (weight := stats.weight) is not None:
        yield from _indices("weight/row_index", weight.row_index, WEIGHT_ROWS, n)
        yield from _indices("weight/column_index", weight.column_index, WEIGHT_ROWS, k)
        yield "weight/rows", weight.rows, (weight.row_index.numel(), k), ELEMENTS
        yield "weight/columns", weight.columns, (n, weight.column_index.numel()), ELEMENTS
        yield "weight/row_mean", weight.row_mean, (n,), REAL
        yield "weight/column_mean", weight.column_mean, (k,), REAL
        yield "weight/row_amax", weight.row_amax, (n,), POSITIVE
        yield "weight/column_amax", weight.column_amax, (k,), POSITIVE
        yield "weight/values", weight.values, (VALUE_BINS,), COUNTS
        yield from _low_rank("weight/u", weight.u, n)
        yield from _low_rank("weight/v", weight.v, k)


def _indices(name: str, index: Tensor, most: int, below: int) -> Iterator[_Row]:
    yield name, index, (min(index.numel(), most, below),), Expected(torch.int64, below=below, signed=False)


def _moments(name: str, moments: Moments, width: int) -> Iterator[_Row]:
    yield f"{name}/mean", moments.mean, (width,), REAL
    yield f"{name}/diagonal", moments.diagonal, (width,), POSITIVE
    yield f"{name}/comoment", moments.comoment, (width, width if width <= FULL_WIDTH else SKETCH + CHECKS), REAL


def _low_rank(name: str, found: LowRank, size: int) -> Iterator[_Row]:
    yield f"{name}/factor", found.factor, (size, min(found.factor.shape[-1], size)), REAL
    yield f"{name}/diagonal", found.diagonal, (size,), POSITIVE
