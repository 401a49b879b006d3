"""Check of a kernel's results before it is timed: the fastest kernel may be a wrong one.

A product is sampled on up to 512 rows and 512 columns, evenly spaced, which meets every 128 x 128 tile up to sizes of
65536, and compared with two float64 products. That of the operands before quantization gives the recorded error. That
of the kernel's own operands tells a wrong kernel from an imprecise one: by the energy of the difference, and by single
elements that are much further off than the rest, as in one bad tile of thousands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.numerics.metrics import mere, sqnr

SPACED = 512  # rows and columns of a product that are compared
LEAST_DB = 40.0  # of a product against that of its own operands; rounding it to bfloat16 leaves 53 to 56
LEAST_FAST_DB = 15.0  # the same where the tensor core keeps about 14 bits of a long sum
OUTLIER = 60.0  # multiple of the median error above which an element is wrong; rounding to bfloat16 gives up to 20
LEAST_PRODUCER_DB = 30.0  # of other kernels against the reference: single values may round to a neighbouring FP8 value
LEAST_SUM_DB = 30.0  # of sums over rows: a float32 sum of values that cancel


@dataclass(frozen=True, slots=True)
class Check:
    """Error of a kernel's results. `wrong` is the reason if they are wrong, "" otherwise."""

    mere: float | None = None
    sqnr_db: float | None = None
    wrong: str = ""


def check_of(reasons: Iterable[str]) -> Check:
    """A check that is wrong for each of these reasons, named once; empty ones are none."""
    return Check(wrong="; ".join(dict.fromkeys(filter(None, reasons))))


def results_of(made: Any) -> Sequence[Any]:
    """The results of a call, of which there may be one or several."""
    return made if isinstance(made, tuple | list) else (made,)


def spaced(size: int, most: int = SPACED) -> Tensor:
    """Up to `most` indices from 0 to size - 1, evenly spaced, first and last among them."""
    if size <= most:
        return torch.arange(size)
    return torch.linspace(0, size - 1, most, dtype=torch.float64).round().long()


def check_product(found: Tensor, exact: Tensor, own: Tensor, fast: bool) -> Check:
    """Check a sampled product against float64 ones: `exact` of unquantized operands, `own` of the kernel's operands."""
    if not bool(found.isfinite().all()):
        return Check(wrong="its product is not finite where its operands are")
    least = LEAST_FAST_DB if fast else LEAST_DB
    close, worst = sqnr(found, own), outlier(found, own)
    wrong = ""
    if close < least:
        wrong = f"{close:.1f} dB against a float64 product of its operands, {least:g} is the least"
    elif worst > OUTLIER:
        wrong = f"one element is {worst:.0f} times as far off as half of them are, {OUTLIER:g} is the most"
    return Check(mere(found, exact).value, sqnr(found, exact), wrong)


def outlier(found: Tensor, own: Tensor) -> float:
    """Largest error beyond the rounding of its own element, over the median error; 0 if half of the elements have none.

    Products of few terms differ so much in size that rounding alone is 80 times the median for the largest.
    """
    error = (found.double() - own.double()).abs()
    beyond = error - torch.finfo(found.dtype).eps * own.double().abs()
    median = float(error.median())
    return max(float(beyond.max()), 0.0) / median if median > 0 else 0.0


def check_values(what: str, found: Tensor, expected: Tensor, least: float = LEAST_PRODUCER_DB) -> str:
    """Reason why a kernel's result disagrees with its reference, or ""."""
    if found.shape != expected.shape:
        return f"{what} has shape {tuple(found.shape)}, its reference {tuple(expected.shape)}"
    if not bool(found.isfinite().all()):
        return f"{what} is not finite where its reference is"
    close = sqnr(found, expected)
    return "" if close >= least else f"{what}: {close:.1f} dB against its reference, {least:g} is the least"
