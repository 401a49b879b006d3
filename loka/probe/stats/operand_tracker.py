"""Statistics of one activation operand, an input or an output gradient, on its device.

A call's sampled rows are cleaned (a non-finite element becomes zero) and padded with zeros to whole blocks of 128. All
binning uses the bits of float32, where the exponent and the top mantissa bit are the half octave, so that it is exact
and the same on every device. The zeros added by cleaning and padding are known, and are subtracted when the counts are
read: training never waits for data-dependent values.

Counts are added with one scatter over a table with a column for each feature (values) or for every LANES-th one
(relative): neighbouring threads then never add to the same element, and those in one bin write to one cache line.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.numerics.enums import Operand
from loka.numerics.quantize import AMAX_FLOOR
from loka.probe.stats.graph_replay import Replayed, Replays
from loka.probe.stats.moments import LARGEST, MomentsTracker, Snapshot, moments_stats
from loka.probe.stats.site_stats import (
    LOWEST,
    OCTAVES,
    RELATIVE_BINS,
    RELATIVE_LOWEST,
    ROW_RMS_BINS,
    SPREAD_BINS,
    SPREAD_STEPS,
    VALUE_BINS,
    VIEWS,
    ZERO_BIN,
    HistogramView,
    OperandStats,
)

BLOCK = 128
E4M3_MAX = 448.0
LANES = 256
TOGETHER = 2**20  # elements of a call up to which the views are binned at once; above, view by view to save memory
PENDING = 256  # maxima of calls that are kept before they are binned
OPERANDS = tuple(Operand)

_BIAS = 127  # of float32's exponent
_FIRST = _BIAS + RELATIVE_LOWEST - 1  # exponent field of the lowest bin that is not for zeros
_LAST = _FIRST + RELATIVE_BINS - 2


def zero_places(columns: Tensor, width: int) -> Tensor:
    """Indices where `count_values` counts a zero of each column, in a table of `width` columns."""
    return columns + ZERO_BIN * width


def value_limits(lowest: int) -> tuple[float, float, int]:
    """The smallest and largest magnitude that bins distinguish, and the offset from the top bits to a 1-based index."""
    return math.ldexp(1.0, lowest), math.ldexp(2.0 - 2.0**-23, lowest + OCTAVES - 1), 2 * (_BIAS + lowest) - 1


def count_values(values: Tensor, magnitude: Tensor, zero_places: Tensor, table: Tensor, lowest: int) -> None:
    """Count `values`, (R, C) finite float32 with absolute values `magnitude`, in `table`, (VALUE_BINS, W) integers.

    Column c is counted in the table's column of `zero_places[c]`. `lowest` is the exponent of the lowest octave.
    """
    smallest, largest, offset = value_limits(lowest)
    half_octave = magnitude.clamp(smallest, largest).view(torch.int32)
    half_octave.bitwise_right_shift_(22).sub_(offset)  # 1-based
    sign = values.sign().to(torch.int32)  # 0 for zeros, which gives the zero bin for any half octave
    index = torch.addcmul(zero_places, sign, half_octave, value=table.shape[1])
    count_at(table.view(-1), index)


def count_at(counts: Tensor, index: Tensor) -> None:
    """Add one to `counts`, (L,) integers, at every element of `index`, int64 of any shape."""
    counts.scatter_add_(0, index.view(-1), counts.new_ones(1).expand(index.numel()))


class OperandTracker(Replayed):
    """Learns an operand with `width` features. `update` queues work on the device and never waits for it."""

    def __init__(self, operand: Operand, width: int, device: torch.device | str) -> None:
        self.operand = operand
        self.width = width
        self.device = torch.device(device)
        self.calls = 0
        self.rows = 0
        self.sampled = 0
        self._block = min(BLOCK, width)
        self._blocks = -(-width // self._block)
        self._padded = self._blocks * self._block
        self._moments = MomentsTracker(width, device)
        zeros = torch.zeros
        # Sampled rows of a site stay far below 2^31, so counts by feature fit into int32; sums over features do not.
        self._values = zeros((VALUE_BINS, self._padded), dtype=torch.int32, device=device)
        self._relative = zeros((len(VIEWS), RELATIVE_BINS), dtype=torch.int64, device=device)
        self._spread = zeros(1 + ROW_RMS_BINS + 2 * SPREAD_BINS, dtype=torch.int64, device=device)
        self._call_amax_counts = zeros(ROW_RMS_BINS, dtype=torch.int64, device=device)
        self._amax = zeros((), dtype=torch.float32, device=device)  # of the last call
        self._lost_calls = zeros((), dtype=torch.int64, device=device)  # with non-finite elements, otherwise only zeros
        self._pending = zeros(PENDING, dtype=torch.float32, device=device)
        self._kept = 0
        self._nonfinite = zeros(width, dtype=torch.int64, device=device)
        self._finite_calls = zeros((), dtype=torch.int64, device=device)
        self._column_amax = zeros(width, dtype=torch.float32, device=device)
        self._zero = zeros((), dtype=torch.float32, device=device)
        self._place_constants(device)
        self._kernel = _kernel_for(torch.device(device))

    def capture(self, rows: int, replays: Replays) -> None:
        """Use a CUDA graph from now on for calls with this number of sampled rows. Waits for the device."""
        device = replays.device
        x, amax = (torch.zeros(size, dtype=torch.float32, device=device) for size in ((rows, self.width), self.width))
        OperandTracker(self.operand, self.width, device).update(x, amax, rows)  # compiles kernels and creates handles
        self._replay = replays.capture(self._take, x, amax)

    def _place_constants(self, device: torch.device | str) -> None:
        """Constants of updates, made once so that no update copies anything to the device."""
        column = torch.arange(self._padded)
        self._zero_places = zero_places(column, self._padded).to(device)
        lane = (torch.arange(len(VIEWS))[:, None] * RELATIVE_BINS + 1 - _FIRST) * LANES + column % LANES
        self._lanes = lane[:, None, :].to(device)  # (views, 1, columns); LANES times the exponent field is added
        sizes = torch.full((1 + self._blocks,), float(self._block), dtype=torch.float32)
        sizes[0] = self.width
        sizes[-1] = self.width - (self._blocks - 1) * self._block
        # The spread is log2 of 448 * sqrt(size) / norm(u): of the row, then of each of its blocks.
        self._log_sizes = sizes.sqrt().mul(E4M3_MAX).log2().to(device)
        # Spread counts are [unusable rows, row_rms, row_spread, block_spread]; a row gives its rms, then its spreads.
        kinds = 2 + self._blocks
        first = torch.ones(kinds, dtype=torch.float32)
        offset, highest = first.clone(), first * (SPREAD_BINS - 1)
        offset[0] -= SPREAD_STEPS * LOWEST[self.operand]
        highest[0] = ROW_RMS_BINS - 1
        start = torch.full((kinds,), 1 + ROW_RMS_BINS + SPREAD_BINS)
        start[0], start[1] = 1, 1 + ROW_RMS_BINS
        self._offset, self._first = offset.to(device), first.to(device)
        self._highest, self._start = highest.to(device), start.to(device)

    @torch.no_grad()
    def update(self, rows: Tensor, column_amax: Tensor, total: int) -> None:
        """Add one call of the site.

        `rows` are the sampled ones, (R, C) float32; `column_amax`, (C,) float32, is the largest |x| of each feature
        over all `total` rows of the call, non-finite if the feature has any non-finite element. R may be 0.
        """
        self.calls += 1
        self.rows += total
        self.sampled += rows.shape[0]
        if total == 0:
            self._settle()
            self._finite_calls += 1
            return
        with torch.autocast(rows.device.type, enabled=False):
            self._run(rows, column_amax, self._remember)

    def _take(self, rows: Tensor, column_amax: Tensor) -> None:
        clean = rows.nan_to_num(0.0, 0.0, 0.0)
        self._nonfinite += (clean != rows).sum(0)
        padded = F.pad(clean, (0, self._padded - self.width)) if self._padded > self.width else clean
        magnitude = padded.abs()
        amax, columns = self._call_amax(magnitude[:, : self.width], column_amax)
        self._amax.copy_(amax)
        if rows.shape[0] == 0:
            return
        largest = torch.linalg.vector_norm(rows, math.inf, dim=1, keepdim=True)  # NaN or infinite if an element is
        block_amax = magnitude.view(rows.shape[0], self._blocks, self._block).amax(2)
        row_amax = block_amax.amax(1, keepdim=True)
        if self._kernel is None:
            count_values(padded, magnitude, self._zero_places, self._values, LOWEST[self.operand])
            norms = self._count_relative(magnitude, amax, row_amax, columns, block_amax)
        else:
            norms = self._kernel.count(
                rows,
                row_amax,
                block_amax,
                columns,
                amax,
                self._values,
                self._relative,
                block=self._block,
                value_limits=(*value_limits(LOWEST[self.operand]), ZERO_BIN),
                relative_limits=(_FIRST, _LAST, AMAX_FLOOR),
            )
        self._count_spread(norms, torch.cat((row_amax, row_amax, block_amax), 1), largest < math.inf)
        self._moments.update_usable(clean, largest < LARGEST)

    def _remember(self) -> None:
        """Keep the call's amax; many are binned at once, with as many launches as for one."""
        if self._kept == PENDING:
            _count_amax(self._call_amax_counts, self._pending, LOWEST[self.operand])
            self._kept = 0
        self._pending[self._kept].copy_(self._amax)
        self._kept += 1

    def _call_amax(self, magnitude: Tensor, column_amax: Tensor) -> tuple[Tensor, Tensor]:
        """Largest |x| of the call, (), and of each feature, (C,); of the sampled rows where non-finite."""
        finite = column_amax < math.inf  # False for NaN
        if magnitude.shape[0] > 0:
            columns = torch.where(finite, column_amax, magnitude.amax(0))
        else:
            columns = torch.where(finite, column_amax, self._zero)
        throughout = finite.all()
        self._finite_calls += throughout
        torch.maximum(self._column_amax, torch.where(throughout, columns, self._zero), out=self._column_amax)
        amax = columns.amax()
        self._lost_calls += (amax == 0) > throughout  # and not
        return amax, columns

    def _count_relative(
        self, magnitude: Tensor, amax: Tensor, row_amax: Tensor, columns: Tensor, block_amax: Tensor
    ) -> Tensor:
        """Count the octaves of u = |x| * 448 / amax in each view.

        Returns the norms of u in each row, and in each block, (R, 1 + blocks).
        """
        rows = magnitude.shape[0]
        columns = F.pad(columns, (0, self._padded - self.width)) if self._padded > self.width else columns
        scales = torch.cat((amax.view(1), row_amax.view(-1), columns, block_amax.view(-1)))
        scales = scales.clamp_(min=AMAX_FLOOR).div_(E4M3_MAX)
        tensor, row, column, block = torch.split(scales, [1, rows, self._padded, rows * self._blocks])
        shape = (rows, self._blocks, self._block)
        divisors = {
            HistogramView.TENSORWISE: tensor.view(1, 1, 1),
            HistogramView.ROWWISE: row.view(rows, 1, 1),
            HistogramView.COLUMNWISE: column.view(1, self._blocks, self._block),
            HistogramView.BLOCKWISE: block.view(rows, self._blocks, 1),
        }
        norms: dict[HistogramView, Tensor] = {}
        counts = self._relative.new_zeros((len(VIEWS) * RELATIVE_BINS, LANES), dtype=torch.int32)
        step = len(VIEWS) if magnitude.numel() <= TOGETHER else 1
        for start in range(0, len(VIEWS), step):
            views = VIEWS[start : start + step]
            scaled = magnitude.new_empty((len(views), rows, self._padded))
            for place, view in zip(scaled, views, strict=True):
                torch.div(magnitude.view(shape), divisors[view], out=place.view(shape))
                if view is HistogramView.ROWWISE:
                    norms[view] = torch.linalg.vector_norm(place, dim=1, keepdim=True)
                elif view is HistogramView.BLOCKWISE:
                    norms[view] = torch.linalg.vector_norm(place.view(shape), dim=2)
            exponent = scaled.view(torch.int32).bitwise_right_shift_(23).clamp_(_FIRST, _LAST)
            index = torch.add(self._lanes[start : start + step], exponent, alpha=LANES)
            count_at(counts.view(-1), index)
        self._relative += counts.sum(1).view(len(VIEWS), RELATIVE_BINS)
        return torch.cat((norms[HistogramView.ROWWISE], norms[HistogramView.BLOCKWISE]), 1)

    def _count_spread(self, norms: Tensor, amax: Tensor, usable: Tensor) -> None:
        """Count log2 of the rms of rows, and of amax / rms of rows and of blocks; only rows with `usable` (R, 1) bool.

        `norms` is (R, 1 + blocks): of each row, then of each of its blocks. `amax`, (R, 2 + blocks), has the row twice.
        The spread of a row or block with a maximum below AMAX_FLOOR is too large, as its scale is the floor's.
        """
        spread = self._log_sizes - norms.log2()
        octaves = torch.cat((amax[:, :1].log2() - spread[:, :1], spread), 1)
        bins = torch.add(self._offset, octaves, alpha=SPREAD_STEPS).clamp_(self._first, self._highest).to(torch.int64)
        count_at(self._spread, bins.mul_(amax > 0).add_(self._start).mul_(usable))

    def totals(self) -> Tensor:
        """Usable rows, sum of squares, zeros, non-finite elements, amax of the last call, and counts of `relative`.

        All float64, (5 + len(VIEWS) * RELATIVE_BINS,), on the device; all but the amax are sums since the start.
        """
        self._settle()
        nonfinite = self._nonfinite.sum()
        zeros = self._values[ZERO_BIN, : self.width].sum() - nonfinite
        figures = (self._moments.usable, self._moments.power(), zeros, nonfinite, self._amax)
        return torch.cat((torch.stack([each.double() for each in figures]), self._relative.double().view(-1)))

    def snapshot(self) -> Snapshot:
        """The statistics so far."""
        self._settle()
        held = self._moments.snapshot()
        call_amax = self._call_amax_counts.clone()
        _count_amax(call_amax, self._pending[: self._kept], LOWEST[self.operand])
        call_amax[0] -= self._lost_calls  # their maximum is unknown; they are not calls of zeros
        ints = {
            "operand": OPERANDS.index(self.operand),
            "width": self.width,
            "calls": self.calls,
            "rows": self.rows,
            "sampled": self.sampled,
        }
        tensors = {
            "values": self._values,
            "relative": self._relative,
            "spread": self._spread,
            "nonfinite": self._nonfinite,
            "finite_calls": self._finite_calls,
            "column_amax": self._column_amax,
        }
        clones = {name: tensor.clone() for name, tensor in tensors.items()}
        return Snapshot(ints, {**held.tensors, **clones, "call_amax": call_amax})


def _count_amax(counts: Tensor, amax: Tensor, lowest: int) -> None:
    """Count log2 of maxima, (P,) float32, in the bins of row_rms."""
    octaves = (amax.log2() - lowest).mul_(SPREAD_STEPS)
    count_at(counts, octaves.clamp_(0.0, ROW_RMS_BINS - 2).to(torch.int64).add_(1).mul_(amax > 0))


def _kernel_for(device: torch.device) -> ModuleType | None:
    """The module that counts in one launch, on a GPU with Triton; None otherwise."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("loka.probe.stats.count_kernel")


def without_filling(relative: Tensor, zeros: int, nonfinite: int, elements: int) -> Tensor:
    """Counts of `relative` with zeros in their bin, and without those for non-finite elements and padding.

    As counted, all zeros are in the bin of the smallest. `elements` is the number of elements that were sampled.
    """
    relative = relative.clone()
    filling = int(relative[0].sum()) - elements
    relative[:, 0] = zeros
    relative[:, 1] -= zeros + nonfinite + filling
    return relative


def operand_stats(snapshot: Snapshot) -> OperandStats:
    """Read an OperandTracker's snapshot to the host, and subtract cleaned and padded elements from the counts."""
    ints = snapshot.ints
    tensors = {name: tensor.cpu() for name, tensor in snapshot.tensors.items()}
    width, sampled = ints["width"], ints["sampled"]
    nonfinite = tensors["nonfinite"]
    values = tensors["values"].to(torch.int64)[:, :width].t().contiguous()
    values[:, ZERO_BIN] -= nonfinite
    zeros = int(values[:, ZERO_BIN].sum())
    relative = without_filling(tensors["relative"], zeros, int(nonfinite.sum()), sampled * width)
    row_rms, row_spread, block_spread = torch.split(tensors["spread"][1:], [ROW_RMS_BINS, SPREAD_BINS, SPREAD_BINS])
    return OperandStats(
        operand=OPERANDS[ints["operand"]],
        calls=ints["calls"],
        rows=ints["rows"],
        sampled=sampled,
        nonfinite=int(nonfinite.sum()),
        nonfinite_calls=ints["calls"] - int(tensors["finite_calls"]),
        moments=moments_stats(snapshot),
        values=values,
        relative=relative,
        row_rms=row_rms.clone(),
        row_spread=row_spread.clone(),
        block_spread=block_spread.clone(),
        column_amax=tensors["column_amax"].double(),
        call_amax=tensors["call_amax"].clone(),
    )
