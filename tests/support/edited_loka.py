"""Copies of LoKA with something added to it, as the checklists of CONTRIBUTING.md say."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Edit:
    """Text that goes into a file before a line that the file has once."""

    file: str
    before: str
    text: str


def write_edited_loka(folder: Path, edits: Sequence[Edit]) -> None:
    """A copy of the package and its templates with these edits. Raises ValueError where a line is not there once."""
    for name in ("loka", "templates"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in edits:
        path = folder / edit.file
        text = path.read_text(encoding="utf-8")
        if text.count(edit.before) != 1:
            raise ValueError(f"{edit.file} has {edit.before!r} {text.count(edit.before)} times")
        path.write_text(text.replace(edit.before, edit.text + edit.before), encoding="utf-8")
