"""The rules that tests keep: where helpers stand, what GPU tests are called, and that nothing edits sys.path."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
EDITS = {f"sys.path.{change}" for change in ("insert", "append", "extend", "remove")}
IN_ANOTHER_PROCESS = {  # as users would
    f"support/processes/{name}.py" for name in ("killed_writer", "gather_workers", "torchrec_workers")
}


def name_of(file: Path) -> str:
    return file.relative_to(TESTS).as_posix()


def dotted(node: ast.expr) -> str:
    """A name such as sys.path.insert; "" for any other expression."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def names_in(file: Path) -> set[str]:
    return {dotted(node) for node in nodes_of(file) if isinstance(node, ast.Attribute | ast.Name)}


@pytest.mark.slow
def test_no_test_edits_the_path() -> None:
    assert {name_of(file) for file in FILES if EDITS & names_in(file)} == IN_ANOTHER_PROCESS


@pytest.mark.slow
def test_no_test_imports_another() -> None:
    found = []
    for file in FILES:
        modules = [node.module or "" for node in nodes_of(file) if isinstance(node, ast.ImportFrom)]
        found += [(name_of(file), module) for module in modules if module.split(".")[-1].startswith("test_")]
    assert found == []


def test_gpu_tests_stand_in_files_of_their_own() -> None:
    """The GPU's machine is given these files alone: it need not have what other tests import."""
    marked = {name_of(file) for file in FILES if {"pytest.mark.gpu", "ON_GPU", "ON_HOPPER"} & names_in(file)}
    assert marked - {"support/gpu.py"} == {name_of(file) for file in FILES if file.stem.endswith("_gpu")}


def test_no_two_helpers_have_one_name() -> None:
    helpers = [file.stem for file in FILES if not file.stem.startswith(("test_", "__", "conftest"))]
    assert [name for name, count in Counter(helpers).items() if count > 1] == []
    outside = [name_of(file) for file in FILES if file.parts[len(TESTS.parts)] != "support"]
    assert [name for name in outside if not Path(name).stem.startswith(("test_", "__", "conftest"))] == []


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_name_of_a_failing_test_is_printed_at_once(workers: str, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    waits = (
        f"import pathlib, time\nseen, end = pathlib.Path({str(seen)!r}), time.monotonic() + 60\n"
        "def test_bad():\n    assert False\n"
        "def test_waits():\n    while not seen.exists() and time.monotonic() < end:\n        time.sleep(0.05)\n"
    )
    (tmp_path / "test_two.py").write_text(waits)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.support.failure_names",
        "-n",
        workers,
        "--rootdir",
        tmp_path,
        tmp_path,
    ]
    with subprocess.Popen(
        [*command, "--rootdir", tmp_path, tmp_path], cwd=TESTS.parent, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout is not None
            assert any(line.startswith("FAILED test_two.py::test_bad\n") for line in running.stdout)
        finally:
            seen.touch()  # the other test has been waiting for this
