"""One measurement, and a set of them from one machine: what files of measurements hold and look-ups are made from."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from loka.errors import InputError
from loka.kernels.measurements.interaction_forms import moved
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartKind
from loka.kernels.measurements.versions import Versions

DIGITS = 6  # significant ones that are kept of a figure; the spread of a time is far above
SPREAD_DIGITS = 2  # of the spread itself
MOST = 1 << 53  # rows, columns and contraction; a float holds each exactly


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one part cost, and how its result erred.

    `us` is the median over `runs`, `spread` half of the distance between the quartiles as a share of it. A kernel whose
    numbers are wrong need not be timed: `us` is 0 then. `mere` and `sqnr_db` of a GEMM are against float64 of the
    unquantised operands (numerics.metrics), None for other work.
    """

    part: Part
    us: float
    spread: float
    runs: int
    mere: float | None
    sqnr_db: float | None
    wrong: str = ""  # why its numbers are wrong: such a kernel is never chosen; "" where they are right

    def check(self) -> None:
        """Raises InputError where a figure makes no sense."""
        wrong = self._nonsense()
        if wrong:
            part = self.part
            raise InputError(
                f"measurement of {part.kernel} {part.work.value} {size_words(part)}: {wrong}; measure it again"
            )

    def _nonsense(self) -> str:
        part = self.part
        is_gemm = part.work is PartKind.GEMM
        if part.rows < 1 or part.columns < 1 or (part.contraction < 1 if is_gemm else part.contraction != 0):
            return "sizes are 1 or more, and the contraction of what is no GEMM is 0"
        if max(part.rows, part.columns, part.contraction) > MOST or (
            part.work in INTERACTIONS and not 1 <= moved(part) <= MOST**3
        ):
            return "no matrix has these sizes"
        if not 0 <= self.us < math.inf or (self.us == 0 and not self.wrong):
            return f"{self.us} us is no time of a kernel"
        if not 0 <= self.spread < math.inf or self.runs < 0:
            return f"{self.spread} is no spread, or {self.runs} no number of runs"
        if self.mere is not None and self.mere < 0:
            return f"{self.mere} is no MERE"
        if self.mere != self.mere or self.sqnr_db != self.sqnr_db:
            return "its error is not a number, where one that is not finite has inf as its MERE"
        return ""

    def rounded(self) -> Measurement:
        """The same with its figures as files keep them."""
        return replace(
            self,
            us=rounded(self.us),
            spread=rounded(self.spread, SPREAD_DIGITS),
            mere=None if self.mere is None else rounded(self.mere),
            sqnr_db=None if self.sqnr_db is None else rounded(self.sqnr_db),
        )


@dataclass(frozen=True, slots=True, order=True)
class PartSeries:
    """What parts must share for the time of one to say something of another's."""

    work: PartKind
    kernel: str
    dtype: str
    recipe: str
    around: str

    @classmethod
    def of(cls, part: Part) -> PartSeries:
        """The kind of a part."""
        return cls(part.work, part.kernel, part.dtype, part.recipe, part.around)


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """All measurements of one machine, in the order of their kinds and sizes."""

    machine: Versions
    libraries: tuple[tuple[str, str], ...]  # (kernel, version of its own library), where it has one
    date: str  # of the newest measurement, UTC: "2026-11-21T09:33:00.125Z"
    measurements: tuple[Measurement, ...]  # checked and rounded
    others: tuple[str, ...] = ()  # what the file has beside it, in words: not used

    @classmethod
    def of(
        cls,
        machine: Versions,
        libraries: Iterable[tuple[str, str]],
        date: str,
        measurements: Iterable[Measurement],
        others: Iterable[str] = (),
    ) -> MeasuredSet:
        """Sorted and rounded, so that equal contents make equal sets."""
        ordered = sorted(
            (each.rounded() for each in measurements), key=lambda each: (PartSeries.of(each.part), each.part)
        )
        return cls(machine, tuple(sorted(libraries)), date, tuple(ordered), tuple(others))


def rounded(figure: float, digits: int = DIGITS) -> float:
    """With so many significant digits."""
    return float(f"{figure:.{digits}g}")


def size_words(part: Part) -> str:
    """`4096 x 512 x 256` of a GEMM, else `4096 x 512`."""
    sizes = (part.rows, part.columns, part.contraction) if part.work is PartKind.GEMM else (part.rows, part.columns)
    return " x ".join(map(str, sizes))


def digest(lines: Iterable[str]) -> str:
    """The sha256 of lines as a file has them."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()
