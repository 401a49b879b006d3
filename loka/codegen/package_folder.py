"""Writing of packages: a kill at any moment leaves the old package, the new one, or one that refuses to import.

Every file is written to a temporary file and renamed. manifest.json has the stamp that the package checks on import; it
is removed before the first rename and written last, so in between the package refuses to import, whatever interrupted
runs left behind. A journal keeps the hashes of the old manifest and of the new files, so that the next run can tell a
half-written generation from a user's edit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from loka.codegen.package_text import MANIFEST, text_hash
from loka.errors import Code, InputError
from loka.paths import open_plain, sync_folder

JOURNAL = ".loka-journal.json"
TEMPORARY = ".loka-tmp"
_WAIT = 10.0  # seconds that a second run waits for the first


@dataclass(frozen=True, slots=True)
class WrittenPackage:
    """Changes of a run in the folder, as file names."""

    written: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]


def write_package(files: Mapping[str, str], folder: Path, force: bool = False) -> WrittenPackage:
    """Write a rendered package into `folder`, which is created if missing.

    Files that LoKA did not write stay. Raises InputError if a file was edited since it was generated (unless `force`),
    if another run has locked the folder, and if writing fails.
    """
    missing = [place for place in (folder, *folder.parents) if not os.path.exists(place)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            return _write(files, folder, force)
    except OSError as error:
        with contextlib.suppress(OSError):  # one that is not empty stays
            for place in missing:
                place.rmdir()
        where = error.filename or folder
        raise InputError(
            f"{where}: cannot write the package: {error.strerror or error}; nothing was committed: free space, or "
            "choose another folder with --out"
        ) from error


def recorded_outputs(folder: Path) -> dict[str, frozenset[str]]:
    """Hashes of each file as LoKA may have written it: from the manifest, and from an interrupted run's journal."""
    found: dict[str, set[str]] = {}
    for record in (MANIFEST, JOURNAL):
        for name, digests in _outputs(folder / record).items():
            found.setdefault(name, set()).update(digests)
    return {name: frozenset(digests) for name, digests in found.items()}


def file_hash(path: Path) -> str | None:
    """sha256 of a file; None if it does not exist."""
    try:
        with open_plain(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def edited_files(files: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    """Files in the folder that differ from what LoKA wrote and from what it is about to write."""
    recorded = recorded_outputs(folder)
    names = sorted({*files, *recorded} - {MANIFEST})
    edited = []
    for name in names:
        found = file_hash(folder / name)
        mine = set(recorded.get(name, ())) | ({text_hash(files[name])} if name in files else set())
        if found is not None and found not in mine:
            edited.append(name)
    return tuple(edited)


def _write(files: Mapping[str, str], folder: Path, force: bool) -> WrittenPackage:
    _remove_temporaries(folder)
    edited = edited_files(files, folder)
    if edited and not force:
        raise InputError(
            f"{folder}: edited since it was generated, or not written by LoKA: {', '.join(edited)}; change the policy "
            "instead, move the files away, or overwrite them with --force",
            Code.PACKAGE,
        )
    _remove_cache(folder)
    order = [*sorted(name for name in files if name != MANIFEST), MANIFEST]
    changed = [name for name in order if file_hash(folder / name) != text_hash(files[name])]
    obsolete = sorted(name for name in recorded_outputs(folder) if name not in files and (folder / name).is_file())
    if changed or obsolete:
        changed = [*(name for name in changed if name != MANIFEST), MANIFEST]  # always rewritten: _commit removes it
        _commit(files, folder, changed, obsolete)
    with contextlib.suppress(FileNotFoundError):
        (folder / JOURNAL).unlink()
    _remove_cache(folder)
    return WrittenPackage(tuple(changed), tuple(name for name in order if name not in changed), tuple(obsolete))


def _commit(files: Mapping[str, str], folder: Path, changed: list[str], obsolete: list[str]) -> None:
    """Write all temporary files first, so that a full disk changes nothing; then rename them, without a manifest.

    `changed` ends with the manifest.
    """
    temporaries: dict[str, Path] = {}
    killed_before = (folder / JOURNAL).exists()
    try:
        try:
            _write_journal(files, folder)
            for name in changed:
                temporaries[name] = _write_temporary(folder, name, files[name])
        except OSError:
            if not killed_before:
                (folder / JOURNAL).unlink(missing_ok=True)
            raise
        (folder / MANIFEST).unlink(missing_ok=True)
        sync_folder(folder)
        for name in changed[:-1]:
            temporaries[name].replace(folder / name)
        for name in obsolete:
            (folder / name).unlink(missing_ok=True)
        sync_folder(folder)
        temporaries[MANIFEST].replace(folder / MANIFEST)
        sync_folder(folder)
    finally:
        for path in temporaries.values():
            path.unlink(missing_ok=True)


def _write_journal(files: Mapping[str, str], folder: Path) -> None:
    """Write the journal: hashes that this run will write, and those of earlier runs."""
    outputs = {name: set(digests) for name, digests in recorded_outputs(folder).items()}
    for name, text in files.items():
        if name != MANIFEST:
            outputs.setdefault(name, set()).add(text_hash(text))
    record = {"outputs": {name: sorted(digests) for name, digests in sorted(outputs.items())}}
    _write_temporary(folder, JOURNAL, json.dumps(record)).replace(folder / JOURNAL)


def _write_temporary(folder: Path, name: str, text: str) -> Path:
    path = folder / f".{name.lstrip('.')}.{os.getpid()}{TEMPORARY}"
    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return path


def _remove_temporaries(folder: Path) -> None:
    """Remove files of a killed run; the folder is locked, so no other run uses them."""
    for path in folder.glob(f".*{TEMPORARY}"):
        path.unlink(missing_ok=True)


def _remove_cache(folder: Path) -> None:
    """Remove cached byte code: it is matched by size and second of the source, which two generations can share."""
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


def _outputs(record: Path) -> dict[str, list[str]]:
    """The outputs that a manifest or journal lists, plain file names only; {} if it cannot be read."""
    try:
        with open_plain(record) as file:
            data = json.loads(file.read().decode())
    except (OSError, ValueError, RecursionError):
        return {}
    outputs = data.get("outputs") if isinstance(data, dict) else None
    if not isinstance(outputs, dict):
        return {}
    found: dict[str, list[str]] = {}
    for name, digests in outputs.items():
        listed = digests if isinstance(digests, list) else [digests]
        if (
            _is_name(name)
            and Path(name).name == name
            and name not in ("", ".", "..")
            and all(isinstance(item, str) for item in listed)
        ):
            found[name] = listed
    return found


def _is_name(text: str) -> bool:
    """Whether the system takes a text as a file's name: no NUL in it, and nothing that has no bytes."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock of the folder against other runs; without effect on systems that cannot lock folders."""
    try:
        import fcntl  # not on Windows
    except ImportError:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + _WAIT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"{folder}: another `loka generate` is writing there; wait for it to end"
                    ) from None
                time.sleep(0.05)
            except OSError:  # a network file system without locks
                break
        yield
    finally:
        os.close(descriptor)
