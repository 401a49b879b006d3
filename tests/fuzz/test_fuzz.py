"""Odd and damaged files of every kind: taken or refused with a place, never a traceback, a hang or a file left behind.

`make test` draws the same cases each time; `make fuzz` draws others for as long as it is told, and writes what fails
into `corpus`, from where every run replays it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.fuzz import fuzz_corpus
from tests.support.fuzz.judge import Fault, judged
from tests.support.fuzz.mutations import BYTE_CHANGES, CHANGES, NUMBER, Change, damaged
from tests.support.fuzz.subjects import SUBJECTS

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("LOKA_FUZZ_SECONDS", "0"))  # for each kind of file; 0: one round, the same each time
SEED = int(os.environ.get("LOKA_FUZZ_SEED", "15"))
CASES = sorted(fuzz_corpus.CORPUS.glob("*.json"))


class Finds:
    """What fails, by its signature; one round looks for the smallest case of one of them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.found: dict[str, str] = {}
        self.sought: tuple[Fault, bytes] | None = None

    def look(self, data: bytes) -> None:
        """Raises AssertionError at a fault that is new, or the one that this round is after."""
        fault = judged(self.name, data, self.folder)
        if fault is None or fault.signature in self.found:
            return
        if self.sought is None or self.sought[0].signature == fault.signature:
            self.sought = fault, data
            raise AssertionError(fault.signature)

    def round(self, number: int) -> None:
        """Draw cases once; what fails is written into the corpus where `make fuzz` runs."""
        subject = SUBJECTS[self.name]
        seeds = subject.seeds()

        @seed(number)
        @settings(
            max_examples=4 * settings().max_examples,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(which=NUMBER, changes=CHANGES, bytes_too=BYTE_CHANGES, bare=st.booleans())
        def draw(which: int, changes: list[Change], bytes_too: list[Change], bare: bool) -> None:
            data = seeds[which % len(seeds)]
            if not bare or not bytes_too:
                data = subject.mutate(data, changes)
            self.look(damaged(data, bytes_too) if bare else data)

        try:
            draw()
        except AssertionError:
            if self.sought is None:
                raise
            fault, data = self.sought
            where = fuzz_corpus.CORPUS if SECONDS else self.folder.parent
            case = fuzz_corpus.write(fuzz_corpus.Case(self.name, data, fault.signature), where)
            self.found[fault.signature] = f"{case}: {fault.signature}: {fault.text}"
            self.sought = None


@pytest.mark.parametrize("name", SUBJECTS)
def test_any_change_of_a_file_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    end = time.monotonic() + SECONDS
    finds = Finds(name, tmp_path / "case")
    number = SEED
    while True:
        finds.round(number)
        number += 1
        if time.monotonic() >= end:
            break
    assert not finds.found, "\n\n".join(finds.found.values())


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_what_failed_once(path: Path, tmp_path: Path) -> None:
    case = fuzz_corpus.read(path)
    fault = judged(case.subject, case.data, tmp_path / "case")
    assert fault is None, f"{fault.signature}: {fault.text}"


@pytest.mark.parametrize("name", SUBJECTS)
def test_whole_files_are_taken(name: str, tmp_path: Path) -> None:
    """The control of the tests above."""
    for index, data in enumerate(SUBJECTS[name].seeds()):
        folder = tmp_path / str(index)
        assert judged(name, data, folder) is None
        path = tmp_path / "taken" / SUBJECTS[name].file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        if name == "policy":
            continue  # patterns for other sites
        SUBJECTS[name].read(path)
