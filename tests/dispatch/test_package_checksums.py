"""What a training machine needs, torch and a package that is whole: others are refused, and their plans when read."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from loka import dispatch
from loka.errors import InputError
from loka.kernels.fused import operators
from loka.plan.planner import read_plan
from tests.support.flips import FLIPS, flipped
from tests.support.importing import import_folder

RANKER = Path(__file__).parents[2] / "generated" / "ranker"
CODE = sorted(path.name for path in RANKER.glob("*.py"))
STAMP = json.loads((RANKER / "manifest.json").read_text())["stamp"]


FORBIDDEN = ("pydantic", "jinja2", "yaml", "typer", "rich", "safetensors", "loka.codegen", "loka.plan", "loka.policy")


@pytest.mark.slow
def test_dispatch_imports_torch_and_the_standard_library_only() -> None:
    program = (
        "import sys; import torch; before = set(sys.modules); import loka.dispatch;"
        "print(*sorted({n.split('.')[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names)));"
        f"print(*(n for n in {FORBIDDEN!r} if n in set(sys.modules) - before))"
    )
    new, forbidden = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert set(new.split()) <= {"loka", "torch"}
    assert forbidden == ""


@pytest.fixture(autouse=True)
def _nothing_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOKA_EDITED_PACKAGES", raising=False)


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "checked_ranker"
    shutil.copytree(RANKER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = dict(operators._cuda)
    yield folder
    operators._cuda.update(before)  # a copy that was imported made the ranker's operators its own


@pytest.fixture
def check(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `dispatch.check_stamps("checked_ranker", ...)` look at the package without importing it."""
    module = ModuleType("checked_ranker")
    module.__file__ = str(package / "__init__.py")
    monkeypatch.setitem(sys.modules, "checked_ranker", module)


@pytest.mark.usefixtures("check")
@pytest.mark.parametrize("name", CODE)
def test_every_flipped_bit_of_code_is_refused(package: Path, name: str) -> None:
    dispatch.check_stamps("checked_ranker", STAMP)
    path = package / name
    for changed in flipped(path.read_bytes(), FLIPS // len(CODE) + 1):
        path.write_bytes(changed)
        with pytest.raises(dispatch.BindError, match=rf"changed since it was generated .*: {name}: run loka generate"):
            dispatch.check_stamps("checked_ranker", STAMP)


@pytest.mark.usefixtures("check")
def test_every_flipped_bit_of_the_manifest_is_refused_or_changes_nothing_that_is_read(package: Path) -> None:
    path = package / "manifest.json"
    known, refused = path.read_bytes(), 0
    for changed in flipped(known):
        path.write_bytes(changed)
        try:
            dispatch.check_stamps("checked_ranker", STAMP)
        except dispatch.BindError:
            refused += 1
            continue
        # Accepted: all code was compared with what the manifest lists, and is what it was.
        mine, theirs = json.loads(known), json.loads(changed)
        listed = {name for name in theirs["outputs"] if name.endswith(".py")}
        assert mine["stamp"] == theirs["stamp"]
        assert all(theirs["outputs"][name] == mine["outputs"][name] for name in listed)
        assert len(set(CODE) - listed) <= 1
    assert 0 < refused < FLIPS


def test_every_flipped_bit_of_a_plan_in_its_package_is_refused(package: Path) -> None:
    path = package / "plan.json"
    for changed in flipped(path.read_bytes()):
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"plan\.json: changed since it was generated .* run loka generate"):
            read_plan(path)


def test_a_flipped_bit_of_the_manifest_leaves_the_plan_or_has_it_refused(package: Path) -> None:
    known = read_plan(package / "plan.json")
    for changed in flipped((package / "manifest.json").read_bytes(), 40):
        (package / "manifest.json").write_bytes(changed)
        try:
            found = read_plan(package / "plan.json")
        except InputError:
            continue
        assert found == known


def test_a_plan_beside_no_manifest_or_another_one_is_read(package: Path, tmp_path: Path) -> None:
    known = read_plan(package / "plan.json")
    text = (package / "plan.json").read_text().replace('"batch_size": 16384', '"batch_size": 2048')
    (tmp_path / "plan.json").write_text(text)
    for manifest in (None, "", "[]", '{"format": "somebody.else", "outputs": {"plan.json": "0"}}', '{"outputs": 3}'):
        if manifest is not None:
            (tmp_path / "manifest.json").write_text(manifest)
        assert read_plan(tmp_path / "plan.json").batch_size == 2048
    assert known.batch_size == 16384


def edited(package: Path) -> None:
    path = package / "modules.py"
    path.write_text(path.read_text() + "EDITED = True\n")


def test_edited_code_is_imported_only_where_the_environment_says_so(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edited(package)
    with pytest.raises(dispatch.BindError, match=r"modules\.py: run loka generate .* set LOKA_EDITED_PACKAGES=allow"):
        import_folder(package)
    monkeypatch.setenv("LOKA_EDITED_PACKAGES", "allow")
    assert import_folder(package).modules.EDITED


@pytest.mark.parametrize("name", ["__init__.py", "kernels.py", "modules.py", "fused.py", "manifest.json"])
def test_nor_does_the_environment_excuse_a_mixed_package(
    package: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOKA_EDITED_PACKAGES", "allow")
    path = package / name
    path.write_text(path.read_text().replace(STAMP, "1" * 64))
    with pytest.raises(dispatch.BindError, match=r"not of one generation.*run loka generate"):
        import_folder(package)


@pytest.mark.usefixtures("check")
@pytest.mark.parametrize("manifest", [None, "", "{", "[]", '{"stamp": 3}'])
def test_a_package_without_a_good_manifest_is_refused(package: Path, manifest: str | None) -> None:
    (package / "manifest.json").unlink()
    if manifest is not None:
        (package / "manifest.json").write_text(manifest)
    with pytest.raises(dispatch.BindError, match="not of one generation"):
        dispatch.check_stamps("checked_ranker", STAMP)


@pytest.mark.parametrize("damage", ["def", "1 / 0"])
def test_damaged_code_is_not_run(package: Path, damage: str) -> None:
    path = package / "modules.py"
    path.write_text(f"{damage}\n{path.read_text()}")
    with pytest.raises(dispatch.BindError, match="changed since it was generated"):
        import_folder(package)


def test_a_file_that_is_not_there_is_named(package: Path) -> None:
    (package / "fused.py").unlink()
    with pytest.raises(dispatch.BindError, match=r"changed since it was generated .*: fused\.py: "):
        import_folder(package)


@pytest.mark.usefixtures("check")
@pytest.mark.parametrize("names", [["kernels.py"], CODE])
def test_code_whose_hash_was_taken_out_of_the_manifest_is_refused(package: Path, names: list[str]) -> None:
    path = package / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["outputs"] = {name: found for name, found in manifest["outputs"].items() if name not in names}
    path.write_text(json.dumps(manifest))
    with pytest.raises(dispatch.BindError, match=rf"changed since it was generated .*: {', '.join(names)}: "):
        dispatch.check_stamps("checked_ranker", STAMP)


@pytest.mark.usefixtures("check")
def test_files_that_somebody_put_beside_it_are_left_alone(package: Path) -> None:
    (package / "mine.py").write_text("1 / 0\n")
    (package / "plan.json").write_text("{}")
    dispatch.check_stamps("checked_ranker", STAMP)
