"""Packages reach the disk whole or not at all, and what a person wrote survives."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from loka.codegen import DifferenceKind, check_package, render_package, write_package
from loka.codegen import package_folder as write
from loka.codegen.package_text import text_hash
from loka.errors import InputError
from tests.support.codegen import codegen_plans as plans

A = render_package(plans.linear_plan())
B = render_package(plans.forward_plan())
C = render_package(plans.mixed_plan())


def kinds(files: dict[str, str], folder: Path) -> dict[str, DifferenceKind]:
    return {difference.name: difference.kind for difference in check_package(files, folder)}


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir()) if path.is_file()}


def test_writes_what_was_rendered_and_nothing_twice(tmp_path: Path) -> None:
    folder = tmp_path / "generated" / "ranker"
    assert set(write_package(A, folder).written) == set(A)
    assert contents(folder) == A
    assert (folder / "kernels.py").read_bytes() == A["kernels.py"].encode()
    assert not (folder.parent / "__init__.py").exists()
    assert kinds(A, folder) == {}
    before = (folder / "kernels.py").stat().st_mtime_ns
    assert write_package(A, folder).written == ()
    assert (folder / "kernels.py").stat().st_mtime_ns == before


def test_check_tells_missing_stale_edited_and_foreign(tmp_path: Path) -> None:
    folder = tmp_path / "ranker"
    assert kinds(A, folder) == dict.fromkeys(A, DifferenceKind.MISSING)
    write_package(A, folder)
    assert kinds(B, folder) == dict.fromkeys(A, DifferenceKind.STALE)
    (folder / "kernels.py").write_text(A["kernels.py"] + "# mine\n", encoding="utf-8")
    (folder / "notes.md").write_text("mine", encoding="utf-8")
    (folder / "modules.py").unlink()
    (folder / "__pycache__").mkdir()
    (folder / ".DS_Store").touch()
    assert kinds(A, folder) == {
        "kernels.py": DifferenceKind.EDITED,
        "modules.py": DifferenceKind.MISSING,
        "notes.md": DifferenceKind.FOREIGN,
    }
    assert "loka generate" in str(check_package(A, folder)[0])


def test_an_edit_is_not_overwritten_without_force(tmp_path: Path) -> None:
    write_package(A, tmp_path)
    (tmp_path / "kernels.py").write_text("# mine\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"kernels\.py.*--force"):
        write_package(B, tmp_path)
    assert (tmp_path / "kernels.py").read_text() == "# mine\n"
    assert (tmp_path / "modules.py").read_text() == A["modules.py"]
    write_package(B, tmp_path, force=True)
    assert contents(tmp_path) == B


def test_a_file_that_was_there_first_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "modules.py").write_text("# somebody's\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"modules\.py"):
        write_package(A, tmp_path)
    assert contents(tmp_path) == {"modules.py": "# somebody's\n"}


def test_others_files_stay_and_obsolete_ones_go(tmp_path: Path) -> None:
    older = {**A, "regions.py": "# of an older version\n"}
    manifest = json.loads(A["manifest.json"])
    manifest["outputs"]["regions.py"] = text_hash(older["regions.py"])
    manifest["outputs"]["../outside.py"] = text_hash("outside")
    older["manifest.json"] = json.dumps(manifest)
    folder = tmp_path / "ranker"
    write_package(older, folder)
    (tmp_path / "outside.py").write_text("outside", encoding="utf-8")
    (folder / "notes.md").write_text("mine", encoding="utf-8")
    assert kinds(A, folder)["regions.py"] is DifferenceKind.STALE
    assert write_package(A, folder).removed == ("regions.py",)
    assert contents(folder) == {**A, "notes.md": "mine"}
    assert (tmp_path / "outside.py").exists()


def test_byte_code_and_what_a_killed_run_left_are_cleaned(tmp_path: Path) -> None:
    write_package(A, tmp_path)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "kernels.cpython-311.pyc").write_bytes(b"old")
    (tmp_path / f".kernels.py.123{write.TEMPORARY}").write_text("half", encoding="utf-8")
    write_package(A, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(A)


def test_a_run_cut_short_is_no_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(A, tmp_path)

    class Killed(BaseException):
        pass

    renamed: list[str] = []
    replace = Path.replace

    def dying(self: Path, target: Path) -> Path:
        if len(renamed) == 3:
            raise Killed
        renamed.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    with pytest.raises(Killed):
        write_package(B, tmp_path)
    monkeypatch.undo()
    assert renamed == [write.JOURNAL, "__init__.py", "kernels.py"]
    assert kinds(A, tmp_path) == {
        "__init__.py": DifferenceKind.STALE,
        "kernels.py": DifferenceKind.STALE,
        "manifest.json": DifferenceKind.MISSING,
    }
    write_package(C, tmp_path)  # neither A nor B, and nothing was edited
    assert contents(tmp_path) == C


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_leaves_the_old_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    write_package(A, tmp_path)
    synced: list[int] = []

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 3:
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=os.strerror(error)):
        write_package(B, tmp_path)
    monkeypatch.undo()
    assert {name: text for name, text in contents(tmp_path).items() if not name.startswith(".")} == A
    assert not list(tmp_path.glob(f".*{write.TEMPORARY}"))
    write_package(B, tmp_path)
    assert contents(tmp_path) == B


def test_a_disk_that_refuses_a_first_package_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device; nothing was committed: free space, or choose"):
        write_package(A, tmp_path / "generated" / "ranker")
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_folders_place_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "ranker").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="ranker"):
        write_package(A, tmp_path / "ranker")


def test_a_damaged_manifest_is_a_hand_edit_only_where_files_differ(tmp_path: Path) -> None:
    write_package(A, tmp_path)
    for text in ("{", "[]", '{"outputs": 3}', '{"outputs": {"kernels.py": 3}}'):
        (tmp_path / "manifest.json").write_text(text, encoding="utf-8")
        assert kinds(A, tmp_path) == {"manifest.json": DifferenceKind.EDITED}
        write_package(A, tmp_path)
        assert contents(tmp_path) == A


def test_two_runs_at_once_leave_one_whole_package(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def run(files: dict[str, str]) -> None:
        try:
            for _ in range(5):
                write_package(files, tmp_path)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(files,)) for files in (A, B, C)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert contents(tmp_path) in (A, B, C)


def test_a_held_folder_is_waited_for_and_then_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl", reason="folders are locked with fcntl")
    monkeypatch.setattr(write, "_WAIT", 0.1)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another"):
            write_package(A, tmp_path)
    finally:
        os.close(descriptor)
    write_package(A, tmp_path)
