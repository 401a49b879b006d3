"""What has to hold for any input: it is taken or refused in few words with a place, soon, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import faulthandler
import re
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from loka.errors import LokaError
from loka.policy.problems import PolicyError
from tests.support.fuzz.subjects import PACKAGE, SUBJECTS, Subject

SECONDS = 5.0  # of the processor, for one case
PATIENCE = 60.0  # seconds after which a case that even this does not end takes the process with it
LONGEST = 2000  # characters of a message
WARNINGS = 5
PLACE = re.compile(r"^[^\n]+?(:\d+:\d+)?: ")


@dataclass(frozen=True, slots=True)
class Fault:
    """What does not hold. Two with one signature have one cause, as far as can be told."""

    signature: str
    text: str


class _HangError(BaseException):
    """A case takes too long; no `except Exception` of what is tested stops it."""


def judged(name: str, data: bytes, folder: Path) -> Fault | None:
    """Read one case in an empty folder; what is wrong with how that went, or None."""
    subject = SUBJECTS[name]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = folder / subject.file
    path.write_bytes(data)
    if name == "package":
        for other, text in PACKAGE.items():
            (folder / other).write_text(text)
    before = _files(folder)
    error: BaseException | None = None
    with warnings.catch_warnings(record=True) as warned, _limited():
        warnings.simplefilter("always")
        try:
            subject.read(path)
        except BaseException as caught:  # noqa: BLE001 - whatever it is, is judged
            error = caught
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, _HangError):
        return Fault("hang", f"it takes over {SECONDS:g} s of the processor:\n{_trace(error)}")
    if error is not None and not isinstance(error, LokaError):
        return Fault(f"{type(error).__name__} in {_origin(error)}", _trace(error))
    if len(warned) > WARNINGS:
        return Fault("warnings", f"{len(warned)} warnings; the first: {str(warned[0].message)[:300]}")
    if error is not None:
        return _of_message(error, path) or _of_files(subject, before, folder)
    return None if subject.writes else _of_files(subject, before, folder)


def _of_message(error: LokaError, path: Path) -> Fault | None:
    message = str(error)
    if len(message.replace(str(path), path.name)) >= LONGEST:
        return Fault(f"long message of {_origin(error)}", f"{len(message)} characters: {message[:600]}...")
    if path.name not in message and str(path.parent) not in message:
        return Fault(f"no place of {_origin(error)}", message)
    lines = message.split("\n") if isinstance(error, PolicyError) else []
    if not all(PLACE.match(line) for line in lines if not line.startswith("and ")):
        return Fault(f"no place of {_origin(error)}", message)
    return None


def _of_files(subject: Subject, before: dict[str, bytes], folder: Path) -> Fault | None:
    after = _files(folder)
    changed = sorted(name for name in before.keys() | after if before.get(name) != after.get(name))
    if not changed or (subject.file == "manifest.json" and changed == [".loka-journal.json"]):
        return None
    return Fault("written", f"a refused file changed {', '.join(changed)}")


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [each for each in traceback.extract_tb(error.__traceback__) if "/loka/" in each.filename]


def _origin(error: BaseException) -> str:
    frames = _frames(error)
    return f"{frames[-1].filename.rpartition('/loka/')[2]}:{frames[-1].name}" if frames else "no frame of loka"


def _trace(error: BaseException) -> str:
    lines = traceback.format_exception(error, limit=-12)
    return "".join(line if len(line) < LONGEST else f"{line[:LONGEST]}...\n" for line in lines)[-6000:]


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise _HangError in the block after `SECONDS` of the processor's time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _HangError

    handler = signal.signal(signal.SIGVTALRM, stop)
    faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        faulthandler.cancel_dump_traceback_later()
