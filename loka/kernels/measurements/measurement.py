"""One measurement, a set of them from one machine, and the choice of the machine: never a mix of several."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from loka.errors import InputError
from loka.kernels.measurements.interaction_forms import moved
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartKind
from loka.kernels.measurements.versions import Versions

DIGITS = 6  # significant digits kept of a figure; the spread of a time is far larger
SPREAD_DIGITS = 2  # of the spread itself
MOST = 1 << 53  # rows, columns and contraction; a float holds each exactly


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measured time and error of one part.

    `us` is the median over `runs`, in microseconds; `spread` is half the interquartile range as a share of it. A kernel
    with wrong results need not be timed: `us` is 0 then. `mere` and `sqnr_db` of a GEMM are against float64 of the
    unquantized operands (numerics.metrics), None for other work.
    """

    part: Part
    us: float
    spread: float
    runs: int
    mere: float | None
    sqnr_db: float | None
    wrong: str = ""  # why its results are wrong, and it is never chosen; "" where they are right

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
        if not (1e-6 <= self.us <= 1e12 or (self.us == 0 and self.wrong)):
            return f"{self.us} us is no time of a kernel"
        if not 0 <= self.spread < math.inf or self.runs < 0:
            return f"{self.spread} is no spread, or {self.runs} no number of runs"
        if self.mere is not None and self.mere < 0:
            return f"{self.mere} is no MERE"
        if self.mere != self.mere or self.sqnr_db != self.sqnr_db:
            return "its error is not a number, where one that is not finite has inf as its MERE"
        return ""

    def rounded(self) -> Measurement:
        """The same with its figures rounded as in files."""
        return replace(
            self,
            us=rounded(self.us),
            spread=rounded(self.spread, SPREAD_DIGITS),
            mere=None if self.mere is None else rounded(self.mere),
            sqnr_db=None if self.sqnr_db is None else rounded(self.sqnr_db),
        )


@dataclass(frozen=True, slots=True, order=True)
class PartSeries:
    """The key that parts share if the time of one can be derived from another's."""

    work: PartKind
    kernel: str
    dtype: str
    recipe: str
    around: str

    @classmethod
    def of(cls, part: Part) -> PartSeries:
        """The series of a part."""
        return cls(part.work, part.kernel, part.dtype, part.recipe, part.around)


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """All measurements of one machine, sorted by kind and size."""

    machine: Versions
    libraries: tuple[tuple[str, str], ...]  # (kernel, version of its own library), where it has one
    date: str  # of the newest measurement, UTC: "2026-11-21T09:33:00.125Z"
    measurements: tuple[Measurement, ...]  # checked and rounded
    others: tuple[str, ...] = ()  # other contents of the file, in words: not used

    @classmethod
    def of(
        cls,
        machine: Versions,
        libraries: Iterable[tuple[str, str]],
        date: str,
        measurements: Iterable[Measurement],
        others: Iterable[str] = (),
    ) -> MeasuredSet:
        """A sorted and rounded set, so that equal contents make equal sets."""
        ordered = sorted(
            (each.rounded() for each in measurements), key=lambda each: (PartSeries.of(each.part), each.part)
        )
        return cls(machine, tuple(sorted(libraries)), date, tuple(ordered), tuple(others))


def rounded(figure: float, digits: int = DIGITS) -> float:
    """The figure rounded to that many significant digits."""
    return float(f"{figure:.{digits}g}")


def size_words(part: Part) -> str:
    """Sizes as text: `4096 x 512 x 256` for a GEMM, otherwise `4096 x 512`."""
    sizes = (part.rows, part.columns, part.contraction) if part.work is PartKind.GEMM else (part.rows, part.columns)
    return " x ".join(map(str, sizes))


def digest(lines: Iterable[str]) -> str:
    """The sha256 of lines, each with its newline."""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


class Recorded(NamedTuple):
    """A measurement with the time at which its recording began, UTC: "2026-11-21T09:33:00.125Z"."""

    date: str
    measurement: Measurement


def choose(tables: Mapping[Versions, Mapping[Part, Recorded]], finished: Collection[Versions]) -> MeasuredSet:
    """The measurements of the latest complete machine in `tables` (at least one); a machine includes driver and
    versions, and those of `tables` also the version of the kernel's own library.

    A machine is complete if it is `finished`, which says that a recording came to its end, and has every kind of work
    that any machine has, except interactions, which not every model has. If no machine is complete, the one with the
    most measurements is taken. For a kernel measured with several versions of its library, the one recorded last is
    used. `others` names everything that is not used.
    """
    machines: dict[Versions, list[tuple[str, Recorded]]] = {}  # each measurement with the version of its library
    for versions, table in tables.items():
        machines.setdefault(versions.machine, []).extend((versions.library, each) for each in table.values())
    works = {machine: _works(each for _, each in own) for machine, own in machines.items()}
    all_works = frozenset().union(*works.values())

    order = {machine: place for place, machine in enumerate(machines)}  # in a file: a later one in the same moment wins

    def rank(machine: Versions) -> tuple[bool, str, int, int]:
        own = machines[machine]
        if machine in finished and works[machine] == all_works:
            return True, max(each.date for _, each in own), 0, order[machine]
        return False, "", len(own), order[machine]

    best = max(machines, key=rank)
    libraries: dict[str, tuple[str, str]] = {}  # by kernel: when it was recorded last, and with which library
    for library, each in machines[best]:
        kernel, seen = each.measurement.part.kernel, (each.date, library)
        libraries[kernel] = max(libraries.get(kernel, seen), seen)
    used = [each for library, each in machines[best] if library == libraries[each.measurement.part.kernel][1]]
    older: dict[tuple[str, str], int] = {}
    for library, each in machines[best]:
        kernel = each.measurement.part.kernel
        if library != libraries[kernel][1]:
            older[kernel, library] = older.get((kernel, library), 0) + 1
    return MeasuredSet.of(
        machine=best,
        libraries=[(kernel, library) for kernel, (_, library) in libraries.items() if library],
        date=max(each.date for each in used),
        measurements=[each.measurement for each in used],
        others=(
            *(
                f"{_counted(len(machines[machine]))} on {machine}, the last on "
                f"{max(each.date for _, each in machines[machine])[:10]}: not used"
                for machine in sorted(machines)
                if machine != best
            ),
            *(
                f"{_counted(count)} of {kernel} {library or 'of an unknown version'}: not used"
                for (kernel, library), count in sorted(older.items())
            ),
        ),
    )


def _works(recorded: Iterable[Recorded]) -> frozenset[PartKind]:
    return frozenset(each.measurement.part.work for each in recorded).difference(INTERACTIONS)


def _counted(count: int) -> str:
    return "1 measurement" if count == 1 else f"{count} measurements"
