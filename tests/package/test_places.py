"""Where files are put by a rename, every writer of LoKA: in the place of a file, never of a device or a pipe."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from loka.errors import InputError
from loka.paths import resolved_path, write_file


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe: what anyone can make that is neither a file nor a folder."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def test_what_is_no_file_stays_what_it_is(pipe):
    with pytest.raises(InputError, match=r"pipe: cannot be written: it is a device or a pipe, no file; choose another"):
        write_file(pipe, "text")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert list(pipe.parent.iterdir()) == [pipe]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_file(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_a_place_that_cannot_be_seen_is_an_error():
    with pytest.raises(InputError, match="cannot be written: File name too long; choose another place"):
        resolved_path(Path("n" * 5000))


def test_text_that_utf_8_does_not_have_is_an_error_and_leaves_the_file(tmp_path):
    """As a file's name with bytes of another encoding, which a report may have in it."""
    (tmp_path / "file").write_text("before")
    with pytest.raises(InputError, match=r"cannot be written .*surrogates not allowed"):
        write_file(tmp_path / "file", "caf\udce9")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
