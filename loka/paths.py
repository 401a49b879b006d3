"""Files that are read and written: plain ones, never a device or a pipe."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

from loka.errors import InputError

_LONGEST = 300  # characters of a path in a message
LARGEST_TEXT = 1 << 29  # bytes of a policy, a plan, a manifest or exported measurements
_START = 1 << 16  # bytes of a file by which its kind is known


def open_plain(path: str | os.PathLike[str], largest: int | None = LARGEST_TEXT) -> BufferedReader:
    """Open a file for reading, in binary.

    Raises OSError where it cannot be opened, or is no plain file: opening or reading a pipe would wait for a writer.
    So too where it has more than `largest` bytes (None: any number), which whoever reads it whole had no memory for.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    about = os.fstat(file.fileno())
    refused = None
    if not stat.S_ISREG(about.st_mode):
        refused = OSError(errno.EINVAL, "it is a device or a pipe, no plain file", os.fspath(path))
    elif largest is not None and about.st_size > largest:
        refused = OSError(errno.EFBIG, f"it has {about.st_size} bytes, more than any such file", os.fspath(path))
    if refused is not None:
        file.close()
        raise refused
    return file


def path_argument(value: object, what: str, expected: str = "a path") -> str:
    """An argument of the Python API that names a file, as text; `what` names it in messages.

    Raises InputError for another type than str or os.PathLike of str.
    """
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str):
        raise InputError(f"{what} must be {expected}, not {'None' if value is None else f'a {type(value).__name__}'}")
    return text


def shown(path: str | os.PathLike[str]) -> str:
    """A path as messages repeat it: one of thousands of characters is cut in its middle."""
    text = os.fspath(path)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_replaceable(
    path: str | os.PathLike[str], kind: str, is_kind: Callable[[bytes], bool], option: str = "-o"
) -> None:
    """Raise InputError where a result would replace a file of another kind, as judged by its first 64 KiB.

    `kind` names what the verb writes, as in "a profile". Empty files, devices and folders are left to the writer.
    """
    try:
        with open_plain(path, largest=None) as file:
            start = file.read(_START)
    except (OSError, ValueError):  # there is none, or none that can be read
        return
    if start and not is_kind(start):
        raise InputError(
            f"{option}: {shown(path)} is there already, and is not {kind}; name another file, or remove that one"
        )


def resolved_path(path: Path) -> Path:
    """The path to rename a finished file to: behind its links, so that a link stays a link.

    Raises InputError where something stands there that is neither a file nor a folder: a rename would take the place
    of the device itself. A folder is left to the rename, which refuses it.
    """
    try:
        device = path.exists() and not path.is_file() and not path.is_dir()
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}; choose another place") from error
    if device:
        raise InputError(f"{path}: cannot be written: it is a device or a pipe, no file; choose another place")
    return Path(os.path.realpath(path))


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, creating its directory: a reader sees the old file or all of the new one, a crash included.

    Raises InputError if the directory or file cannot be written, or the path is a device.
    """
    try:
        data = content.encode() if isinstance(content, str) else content
        place = resolved_path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, place)
        except BaseException:
            os.unlink(temporary)
            raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or no UTF-8
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path}: cannot be written ({reason}); free space, or choose another place") from error
    sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the file system can; the files are complete in any case."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
