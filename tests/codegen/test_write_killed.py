"""After a kill at any moment a package imports as an old one or the new one, whole, or refuses and says what to run."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from loka.codegen import check_package, render_package, write_package
from loka.codegen import package_folder as write
from loka.codegen.package_text import text_hash
from tests.support.codegen import codegen_plans as plans

ROOT = Path(__file__).parents[2]
State = dict[str, str]


def with_more(files: State, name: str) -> State:
    """A package of one file more, which another package leaves over."""
    more = {**files, name: f"# {name}\n"}
    manifest = json.loads(files["manifest.json"])
    manifest["outputs"][name] = text_hash(more[name])
    return {**more, "manifest.json": json.dumps(manifest)}


A = with_more(render_package(plans.linear_plan()), "of_a.py")
B = with_more(render_package(plans.forward_plan()), "of_b.py")
C = render_package(plans.mixed_plan())


def stamp_of(files: State) -> str:
    return str(json.loads(files["manifest.json"])["stamp"])


STAMPS = {stamp_of(files): files for files in (A, B, C)}


@dataclass(frozen=True)
class Disk:
    """A folder, and a process that writes into it, dies, and imports from it."""

    folder: Path
    process: subprocess.Popen[str]

    def ask(self, *request: object) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return str(json.loads(self.process.stdout.readline()))

    def put(self, state: State) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, text in state.items():
            (self.folder / name).write_text(text, encoding="utf-8", newline="")

    def get(self) -> State:
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(self.folder.iterdir()) if path.is_file()}

    def cut_short(self, start: State, files: State) -> Iterator[State]:
        """What each kill leaves of a run that writes `files` over `start`, and last what the whole run leaves."""
        for operations in itertools.count():
            self.put(start)
            answer = self.ask("write", str(self.folder), files, operations)
            yield self.get()
            if answer == "written":
                return
            assert answer == "killed"

    def import_package(self, state: State) -> str:
        self.put(state)
        return self.ask("import", str(self.folder))


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """One process for all tests: it imports torch, and forks for each request. `put` empties the folder."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.processes.killed_writer"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Disk(tmp_path_factory.mktemp("killed") / "ranker", process)
    finally:
        process.communicate()


def distinct(states: Iterable[State]) -> list[State]:
    """Each state once. Names of temporary files hold the number of a process, which tells nothing."""
    found: dict[tuple[tuple[str, str], ...], State] = {}
    for state in states:
        kept = tuple((name, text) for name, text in state.items() if not name.endswith(write.TEMPORARY))
        found.setdefault(kept, state)
    return list(found.values())


def outcome(disk: Disk, state: State) -> str:
    """How a state imports: "refused", or the stamp of a package that is all there, with nothing of another."""
    answer = disk.import_package(state)
    if answer.startswith("refused: "):
        assert "run loka generate" in answer
        return "refused"
    visible = {name: text for name, text in state.items() if not name.startswith(".")}
    assert visible == STAMPS[answer]
    return answer


def written_over(disk: Disk, state: State, files: State) -> None:
    """Nothing that a run left counts as a person's edit: the next run writes over it, and removes the rest."""
    disk.put(state)
    write_package(files, disk.folder)
    assert disk.get() == files
    assert check_package(files, disk.folder) == ()


@pytest.mark.slow
def test_killed_at_any_moment_never_a_mix_that_imports(disk: Disk) -> None:
    once = distinct(disk.cut_short(A, B))
    outcomes = [outcome(disk, state) for state in once]
    assert [kind for kind, _ in itertools.groupby(outcomes)] == [stamp_of(A), "refused", stamp_of(B)]
    for state in once:
        written_over(disk, state, C)


@pytest.mark.slow
def test_killed_twice_in_a_row_never_a_mix_that_imports(disk: Disk) -> None:
    once = distinct(disk.cut_short(A, B))
    twice = distinct(itertools.chain.from_iterable(disk.cut_short(state, A) for state in once))
    assert {outcome(disk, state) for state in twice} == {"refused", stamp_of(A), stamp_of(B)}
    for state in twice:
        written_over(disk, state, C)


@pytest.mark.slow
def test_killed_in_the_first_run_it_refuses_as_soon_as_there_is_something_to_import(disk: Disk) -> None:
    states = [state for state in distinct(disk.cut_short({}, A)) if "__init__.py" in state]
    outcomes = [outcome(disk, state) for state in states]
    assert [kind for kind, _ in itertools.groupby(outcomes)] == ["refused", stamp_of(A)]
