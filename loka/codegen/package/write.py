"""Files onto the disk, so that a kill at any moment leaves the old package, the new one, or one that refuses to import.

Every file is written beside its place and renamed into it. manifest.json, which carries the stamp that the package
checks while it is imported, is removed before the first rename and comes back last: in between the package refuses to
import, whatever runs that were cut short had left. A journal keeps what the old manifest said of the files, and what is
about to be written, so that the next run knows a half-written generation from a person's edit.
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

from loka.codegen.package.render_package import MANIFEST
from loka.errors import InputError
from loka.paths import open_plain

JOURNAL = ".loka-journal.json"
TEMPORARY = ".loka-tmp"
_WAIT = 10.0  # seconds for which a second run waits for the first


@dataclass(frozen=True, slots=True)
class WrittenPackage:
    """What a run changed in the folder."""

    written: tuple[str, ...]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]


def write_package(files: Mapping[str, str], folder: Path, force: bool = False) -> WrittenPackage:
    """Put a rendered package into `folder`, which is made where it is missing.

    Files that LoKA did not write stay. Raises InputError where a file was edited since it was generated (unless
    `force`), where another run holds the folder, and where the disk refuses.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
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
    """The hashes under which LoKA may have written each file: the manifest's, and those of a run that was cut short."""
    found: dict[str, set[str]] = {}
    for record in (MANIFEST, JOURNAL):
        for name, digests in _outputs(folder / record).items():
            found.setdefault(name, set()).update(digests)
    return {name: frozenset(digests) for name, digests in found.items()}


def file_hash(path: Path) -> str | None:
    """sha256 of a file, None where there is none."""
    try:
        with open_plain(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def text_hash(text: str) -> str:
    """sha256 of what will be written."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def edited_files(files: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    """Files on the disk that are neither what LoKA wrote nor what it is about to write."""
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
            "instead, move the files away, or overwrite them with --force"
        )
    _remove_cache(folder)
    order = [*sorted(name for name in files if name != MANIFEST), MANIFEST]
    changed = [name for name in order if file_hash(folder / name) != text_hash(files[name])]
    obsolete = sorted(name for name in recorded_outputs(folder) if name not in files and (folder / name).is_file())
    if changed or obsolete:
        changed = [*(name for name in changed if name != MANIFEST), MANIFEST]  # it is removed, and so written anew
        _commit(files, folder, changed, obsolete)
    with contextlib.suppress(FileNotFoundError):
        (folder / JOURNAL).unlink()
    _remove_cache(folder)
    return WrittenPackage(tuple(changed), tuple(name for name in order if name not in changed), tuple(obsolete))


def _commit(files: Mapping[str, str], folder: Path, changed: list[str], obsolete: list[str]) -> None:
    """Everything onto the disk first, so that a full disk changes nothing; then the renames, without a manifest.

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
        _sync_folder(folder)
        for name in changed[:-1]:
            temporaries[name].replace(folder / name)
        for name in obsolete:
            (folder / name).unlink(missing_ok=True)
        _sync_folder(folder)
        temporaries[MANIFEST].replace(folder / MANIFEST)
        _sync_folder(folder)
    finally:
        for path in temporaries.values():
            path.unlink(missing_ok=True)


def _write_journal(files: Mapping[str, str], folder: Path) -> None:
    """What this run will write, with what earlier runs wrote or may have left."""
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


def _sync_folder(folder: Path) -> None:
    """Make renames last through a power cut, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_temporaries(folder: Path) -> None:
    """What a killed run left; the folder is locked, so no other run is using it."""
    for path in folder.glob(f".*{TEMPORARY}"):
        path.unlink(missing_ok=True)


def _remove_cache(folder: Path) -> None:
    """Byte code is taken for a source file's by size and second; two generations can agree in both."""
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)


def _outputs(record: Path) -> dict[str, list[str]]:
    """The outputs that a manifest or journal lists: plain file names only; {} where it cannot be read."""
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
        if Path(name).name == name and name not in ("", ".", "..") and all(isinstance(item, str) for item in listed):
            found[name] = listed
    return found


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One run at a time for each folder, where the system can lock a folder; elsewhere renames alone keep it whole."""
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
