"""`loka bench kernels --record` and `--export`: measure kernels into a file, and export its measurements."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path

from loka.bench.machine import require_gpu
from loka.bench.record.run_record import libraries, parts_of, run_record
from loka.bench.timing import Progress
from loka.devices.targets import DEFAULT_TARGET, GPU_TARGETS
from loka.errors import InputError
from loka.kernels.measurements.lookup import Recording, Versions, export


@dataclass(frozen=True, slots=True)
class RecordCommand:
    """The command-line options, unchecked."""

    what: str  # must be kernels; other benchmarks record nothing
    names: tuple[str, ...] = ()  # for --export without --record: the file of measurements
    record: Path | None = None  # file to record into
    parts: str | None = None  # kinds of parts, comma-separated
    policy: Path | None = None  # record the parts of its sites instead of the shipped grid
    seconds: float = math.inf  # recording stops after this; another run continues
    jobs: int = 0  # processes that compile; 0: by the number of CPUs
    export: Path | None = None  # file to export to
    target: str = DEFAULT_TARGET  # device whose measurements are exported

    @property
    def records(self) -> bool:
        """True if it records or exports; otherwise it is a comparison of `loka.bench.kernel_speed`."""
        return any(each is not None for each in (self.record, self.export, self.policy))


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The result of a command as text and as a dict for JSON."""

    text: str
    plain: dict[str, object]


def carry_out(command: RecordCommand, progress: Progress) -> CommandOutcome:
    """Record, export or both; returns the output to print.

    Raises InputError for a wrong argument, a missing or damaged file, and without a GPU to record on.
    """
    _check(command)
    outcomes = []
    if command.record is not None:
        outcomes.append(record(command, command.record, progress))
    if command.export is not None:
        outcomes.append(export_text(command, command.export))
    plain = {key: value for each in outcomes for key, value in each.plain.items()}
    return CommandOutcome("\n".join(each.text for each in outcomes), plain)


def _check(command: RecordCommand) -> None:
    """Raise InputError for wrong options and for options that exclude each other."""
    if command.what != "kernels":
        raise InputError(
            f"loka bench {command.what}: --record and --export are for `loka bench kernels`; leave them out"
        )
    if command.policy is not None and command.record is None:
        raise InputError("loka bench kernels: --policy says what is recorded; name the file with --record")
    if command.record is not None and command.names:
        raise InputError(f"loka bench kernels --record: name kinds of parts with --parts, not {command.names[0]!r}")
    if command.target not in GPU_TARGETS:
        known = " or ".join(GPU_TARGETS)
        raise InputError(f"loka bench --target: nothing is measured for {command.target!r}; write {known}")
    if math.isnan(command.seconds) or command.seconds <= 0:
        raise InputError(f"loka bench --seconds: {command.seconds:g} is no time to work in; write a number above 0")


def record(command: RecordCommand, file: Path, progress: Progress) -> CommandOutcome:
    """Measure the parts that are missing from the file."""
    works = tuple(filter(None, (command.parts or "").split(",")))
    versions = libraries()
    parts = parts_of(works, command.policy)
    require_gpu()
    with Recording(file, Versions.here(), versions) as recording:
        tally = run_record(recording, parts, progress, command.seconds, command.jobs)
        if tally.measured + tally.known + tally.failed < len(set(parts)):
            recording.stopped_early()
    return CommandOutcome(f"{file}: {tally}", {"recorded": str(file), **asdict(tally)})


def export_text(command: RecordCommand, text: Path) -> CommandOutcome:
    """Export measurements: of the file just recorded, or of the named one."""
    if command.record is None and len(command.names) != 1:
        raise InputError("loka bench kernels --export: name the one file of measurements that is to be exported")
    source = command.record if command.record is not None else Path(command.names[0])
    measured = export(source, text, command.target, f"loka bench kernels --record {source.name}")
    count = len(measured.measurements)
    return CommandOutcome(
        f"wrote {text}: {count} measurements on {measured.machine}", {"exported": str(text), "measurements": count}
    )
