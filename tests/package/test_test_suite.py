"""The rules that tests keep: where helpers stand, what GPU tests are called, and that nothing edits sys.path."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("*.py"))
IN_ANOTHER_PROCESS = {"support/processes/killed_writer.py"}  # imports a package as its user would


def name_of(file: Path) -> str:
    return file.relative_to(TESTS).as_posix()


def attributes_of(file: Path) -> set[str]:
    """Every dotted name that a file reads, such as sys.path.insert."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def imports_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_no_test_edits_the_path_or_imports_a_test(file: Path) -> None:
    edits = {f"sys.path.{change}" for change in ("insert", "append", "extend", "remove")}
    assert name_of(file) in IN_ANOTHER_PROCESS or not edits & attributes_of(file)
    assert not [name for name in imports_of(file) if name.split(".")[-1].startswith("test_")]


def test_gpu_tests_stand_in_files_of_their_own() -> None:
    """The GPU's machine is given these files alone: it need not have what other tests import."""
    marked = {name_of(file) for file in FILES if {"pytest.mark.gpu", "ON_GPU", "ON_HOPPER"} & names_of(file)}
    assert marked - {"support/gpu.py"} == {name_of(file) for file in FILES if file.stem.endswith("_gpu")}


def names_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return attributes_of(file) | {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def test_no_two_helpers_have_one_name() -> None:
    helpers = [file.stem for file in FILES if not file.stem.startswith(("test_", "__init__", "conftest"))]
    assert [name for name, count in Counter(helpers).items() if count > 1] == []
    outside = [name_of(file) for file in FILES if file.parts[len(TESTS.parts)] != "support"]
    assert [name for name in outside if not Path(name).stem.startswith(("test_", "__init__", "conftest"))] == []
