"""Selection of one machine's measurements from all that a file has for a target: never a mix of several."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from loka.kernels.measurements.measurement import MeasuredSet, Measurement
from loka.kernels.measurements.parts import INTERACTIONS, Part, PartKind
from loka.kernels.measurements.versions import Versions


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

    def rank(machine: Versions) -> tuple[bool, str, int, Versions]:
        own = machines[machine]
        if machine in finished and works[machine] == all_works:
            return True, max(each.date for _, each in own), 0, machine
        return False, "", len(own), machine

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
