"""Comparison of a folder with the package that would be generated now, for `loka generate --check`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from loka.codegen.package.render_package import MANIFEST
from loka.codegen.package.write import file_hash, recorded_outputs, text_hash
from loka.errors import InputError


class DifferenceKind(StrEnum):
    """Kind of difference of a file."""

    MISSING = "missing"  # it would be generated, but does not exist
    STALE = "stale"  # unchanged since it was generated, but would be different or absent now
    EDITED = "edited"  # changed since it was generated
    FOREIGN = "foreign"  # not written by LoKA


@dataclass(frozen=True, slots=True)
class Difference:
    """A file that differs from what would be generated, with advice."""

    name: str
    kind: DifferenceKind
    advice: str

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}: {self.advice}"


_ADVICE = {
    DifferenceKind.MISSING: "run loka generate",
    DifferenceKind.STALE: "the policy, its profile, measurements, the model or LoKA changed since: run loka generate",
    DifferenceKind.EDITED: "change the policy instead, and run loka generate --force",
    DifferenceKind.FOREIGN: "LoKA did not write it: move it out of the generated package",
}


def check_package(files: Mapping[str, str], folder: Path) -> tuple[Difference, ...]:
    """Compare a rendered package with a folder; () if it is fresh. Hidden files and `__pycache__` are ignored.

    Raises InputError if the folder cannot be read.
    """
    try:
        recorded = recorded_outputs(folder)
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        found = {name: _kind(name, files, folder, recorded) for name in sorted({*files, *recorded, *present})}
    except OSError as error:
        raise InputError(
            f"{error.filename or folder}: cannot be read: {error.strerror or error}; remove it, or give it back its "
            "permissions, and run loka generate again"
        ) from error
    return tuple(Difference(name, kind, _ADVICE[kind]) for name, kind in found.items() if kind is not None)


def _kind(
    name: str, files: Mapping[str, str], folder: Path, recorded: Mapping[str, frozenset[str]]
) -> DifferenceKind | None:
    path = folder / name
    if name not in files and (name.startswith(".") or name == "__pycache__"):
        return None
    if name not in files and name not in recorded:
        return DifferenceKind.FOREIGN
    digest = file_hash(path)
    if digest is None:
        return DifferenceKind.MISSING if name in files else None
    if name in files and digest == text_hash(files[name]):
        return None
    # The manifest does not list itself: a readable one that differs is from an older generation.
    if name == MANIFEST:
        return DifferenceKind.STALE if recorded else DifferenceKind.EDITED
    return DifferenceKind.STALE if digest in recorded.get(name, ()) else DifferenceKind.EDITED
