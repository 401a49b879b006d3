"""The pages that a reader follows step by step: their files and commands, in a folder, at sizes that take seconds."""

from __future__ import annotations

import contextlib
import importlib
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loka.cli import main
from loka.dispatch import LokaWarning
from tests.support import markdown

# The guide's sizes are those of a real layer. At these FP8 has to be forced to be used at all.
SMALL = {
    "16384": "64",
    "2048": "64",
    "1024": "32",
    "batch_size: 256": "batch_size: 32",
    "batches(256": "batches(32",
    "every=1000": "every=5",
    "compute: auto": "compute: fp8",
}
_STEP = re.compile(
    r"^```(python|yaml)\n(?P<text>.*?\n)```$|^    (?P<command>(?:loka|python) [^\n]+)$", re.DOTALL | re.MULTILINE
)
_FILE = re.compile(r"`([\w/]+\.(?:py|yaml))`")
COMPARED = (0, 1, 3)  # parity, lost and undecided: so few pairs show nothing


@dataclass(frozen=True, slots=True)
class Step:
    """A file that a page shows, or a command. `file`: its path, "" for a command."""

    file: str
    text: str


def steps(page: str) -> list[Step]:
    """What a reader does, in order: a block is the file that the paragraph before it names last."""
    found = []
    for match in _STEP.finditer(page):
        if (command := match["command"]) is not None:
            found.append(Step("", command))
            continue
        before = page[: match.start()].rstrip().rpartition("\n\n")[2]
        found.append(Step(_FILE.findall(before)[-1], match["text"]))
    return found


def small(text: str) -> str:
    """A text of a page with its sizes made small."""
    for size, little in SMALL.items():
        text = text.replace(size, little)
    return text


@contextlib.contextmanager
def reading_in(folder: Path) -> Iterator[None]:
    """`folder` is the current directory; what is imported from it is forgotten afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr(importlib.import_module("generated"), "__path__", [str(folder / "generated")])
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if name.startswith("generated.") or (folder / f"{name}.py").exists():
                    del sys.modules[name]


def loka(command: str) -> tuple[int, str]:
    """The exit status of a verb, and all that it printed."""
    done = CliRunner().invoke(main.app, command.split())
    return done.exit_code, done.output


def follow(page: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Write the files of a page and run its commands, within `reading_in`; the names that each script made."""
    made = {}
    for step in steps(page):
        program, _, rest = step.text.partition(" ")
        if step.file:
            (folder / step.file).parent.mkdir(exist_ok=True)
            (folder / step.file).write_text(small(step.text), encoding="utf-8")
        elif program == "loka":
            status, output = loka(small(rest.partition(" # ")[0]))
            assert status in (COMPARED if rest.startswith("compare") else (0,)), output
        else:
            with pytest.warns(LokaWarning, match="reference path"):
                made[rest] = runpy.run_path(str(folder / rest), run_name="__main__")
    return made


def tower_in(folder: Path) -> None:
    """The guide's model and policy, small, in a folder."""
    for step in steps(markdown.read(markdown.GUIDE)):
        if step.file in ("tower.py", "policies/tower.yaml"):
            (folder / step.file).parent.mkdir(exist_ok=True)
            (folder / step.file).write_text(small(step.text), encoding="utf-8")
