"""Bins for magnitudes: fixed for all sites, ranks and runs, so that counts can be added exactly.

Three kinds of histogram are kept of an operand, a matrix (rows, C):

- values: for each feature, the number of its values in each of VALUE_BINS bins, ordered by value. Half an octave each:
  [1, 1.5) x 2^e and [1.5, 2) x 2^e, over OCTAVES octaves of each sign, zero in the middle. An operand's lowest octave
  begins at 2^LOWEST[operand]; smaller magnitudes count in the bin next to zero, larger ones in the outermost.
- relative: the distance of each value below the largest magnitude of its scale's block. With u = |x| * 448 / amax, the
  magnitude that e4m3 would round, the bins are octaves of u: bin 0 counts zeros, bin 1 u < 2^-32, and bin 2 + i u in
  [2^(i-32), 2^(i-31)). 448 = 1.75 * 2^8 and 57344 = 1.75 * 2^15, so that every boundary of e4m3 and of e5m2 (subnormal,
  underflow) is a boundary of these bins, for dynamic scales that are not rounded to powers of two.
- spread: of rows, log2 of the root mean square in steps of 1/8 octave over the operand's range; and log2 of amax / rms
  of each row and of each 128 neighbours in a row, in the same steps from 0 to 16 octaves.
"""

from __future__ import annotations

from enum import StrEnum

from loka.numerics.enums import Operand

OCTAVES = 64
PER_OCTAVE = 2
MAGNITUDE_BINS = OCTAVES * PER_OCTAVE  # of one sign
ZERO_BIN = MAGNITUDE_BINS
VALUE_BINS = 2 * MAGNITUDE_BINS + 1
LOWEST = {Operand.INPUT: -40, Operand.WEIGHT: -40, Operand.GRAD_OUTPUT: -56}  # exponent of the lowest octave

RELATIVE_LOWEST = -32
RELATIVE_BINS = 2 + 41  # zeros, below 2^-32, octaves up to [2^8, 2^9)

SPREAD_STEPS = 8  # an octave
SPREAD_OCTAVES = 16
ROW_RMS_BINS = OCTAVES * SPREAD_STEPS + 1  # bin 0: rows of zeros
SPREAD_BINS = SPREAD_OCTAVES * SPREAD_STEPS + 1  # bin 0: rows (blocks) of zeros


class HistogramView(StrEnum):
    """The block of an operand (rows, C) that shares a scale. A GEMM with its transpose has `COLUMNWISE` scales."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    COLUMNWISE = "columnwise"  # one per feature, over all rows: rowwise scaling of the transpose
    BLOCKWISE = "blockwise_1x128"


VIEWS = tuple(HistogramView)
