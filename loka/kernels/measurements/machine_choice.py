"""Selection of one machine's measurements from all that a file has for a target: never a mix of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka.kernels.measurements.measurement import MeasuredSet, Measurement
from loka.kernels.measurements.parts import INTERACTIONS, PartKind
from loka.kernels.measurements.versions import Versions


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    """A measurement with the machine it was taken on, from a file."""

    versions: Versions  # with the version of the kernel's own library
    finished: bool  # a recording with these versions was completed
    recorded: str  # time, UTC: "2026-11-21T09:33:00.125Z"
    measurement: Measurement


def choose(rows: Sequence[RecordedMachine]) -> MeasuredSet:
    """The measurements of the latest complete machine in `rows` (at least one); a machine includes driver and versions.

    A machine is complete if a recording was completed and it has every kind of work that any machine in `rows` has,
    except interactions, which not every model has. If no machine is complete, the one with the most measurements is
    taken. For a kernel measured with several versions of its library, the one recorded last is used. `others` names
    everything that is not used.
    """
    machines: dict[Versions, list[RecordedMachine]] = {}
    for row in rows:
        machines.setdefault(row.versions.machine, []).append(row)
    works = _works(rows)

    def rank(machine: Versions) -> tuple[bool, str, int, Versions]:
        own = machines[machine]
        if any(row.finished for row in own) and _works(own) == works:
            return True, max(row.recorded for row in own), 0, machine
        return False, "", len(own), machine

    best = max(machines, key=rank)
    libraries: dict[str, tuple[str, str]] = {}  # by kernel: when it was recorded last, and with which library
    for row in machines[best]:
        kernel, seen = row.measurement.part.kernel, (row.recorded, row.versions.library)
        libraries[kernel] = max(libraries.get(kernel, seen), seen)
    used = [row for row in machines[best] if row.versions.library == libraries[row.measurement.part.kernel][1]]
    older = [row for row in machines[best] if row.versions.library != libraries[row.measurement.part.kernel][1]]
    rest = [row for machine, own in machines.items() if machine != best for row in own]
    return MeasuredSet.of(
        machine=best,
        libraries=[(kernel, library) for kernel, (_, library) in libraries.items() if library],
        date=max(row.recorded for row in used),
        measurements=[row.measurement for row in used],
        others=(*_other_machines(rest), *_older_libraries(older)),
    )


def _works(rows: Sequence[RecordedMachine]) -> frozenset[PartKind]:
    return frozenset(row.measurement.part.work for row in rows).difference(INTERACTIONS)


def _other_machines(rows: Sequence[RecordedMachine]) -> list[str]:
    found: dict[Versions, list[str]] = {}
    for row in rows:
        found.setdefault(row.versions.machine, []).append(row.recorded)
    return [
        f"{_counted(len(dates))} on {machine}, the last on {max(dates)[:10]}: not used"
        for machine, dates in sorted(found.items())
    ]


def _older_libraries(rows: Sequence[RecordedMachine]) -> list[str]:
    found: dict[tuple[str, str], int] = {}
    for row in rows:
        key = (row.measurement.part.kernel, row.versions.library or "of an unknown version")
        found[key] = found.get(key, 0) + 1
    return [f"{_counted(count)} of {kernel} {library}: not used" for (kernel, library), count in sorted(found.items())]


def _counted(count: int) -> str:
    return "1 measurement" if count == 1 else f"{count} measurements"
