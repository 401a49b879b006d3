"""examples/hstu on a few ratings: a user's sequence holds what came before, and the guard names what has no scales."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loka.cli import main
from tests.support import markdown
from tests.support.processes import example_workers as workers

EXAMPLE = markdown.REPOSITORY / "examples" / "hstu"

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example, with 1,000 ratings of 20 users, and a smaller model."""
    copied = tmp_path / "hstu"
    shutil.copytree(EXAMPLE, copied, ignore=shutil.ignore_patterns("generated", "profiles", "build", "__pycache__"))
    model = copied / "sequences.py"
    model.write_text(markdown.read(model).replace("length=32, dim=64", "length=8, dim=32"))
    ratings = (f"{i % 20}::{i % 7}::{1 + 9 * (i % 7 > 3)}::{1_400_000_000 + i}\n" for i in range(1000))
    (tmp_path / "ratings.dat").write_text("".join(ratings))
    (tmp_path / "movies.dat").write_text("".join(f"{i}::Film (2013)::Drama\n" for i in range(7)))
    monkeypatch.setenv("LOKA_DATA", str(tmp_path))
    monkeypatch.chdir(copied)
    monkeypatch.syspath_prepend(str(copied))
    return copied


def test_the_guard_names_what_a_cast_without_scales_harms(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with workers.own_modules():
        done = CliRunner().invoke(main.app, ["generate", "unscaled.yaml"])
    assert done.exit_code == 0, done.output
    with contextlib.redirect_stdout(io.StringIO()) as printed, caplog.at_level(logging.WARNING, "loka"):
        workers.run(folder, "train.py", 10, torch.compile, "unscaled", "--every", "1")
    assert re.search(r"NE of the future: \d", printed.getvalue())
    assert re.search(r"guard: step \d+: 'hstu.layers.\d.uvqk' fell back: its gradient", caplog.text)


def test_sequences_hold_what_came_before_and_not_the_label(folder: Path) -> None:
    with workers.own_modules():
        sequences = importlib.import_module("sequences")

        (movies, labels), _ = next(iter(sequences.test_batches(4, 0)))
        assert movies.shape == labels.shape == (4, sequences.SIZES.length)
        assert (labels[:, -1] == sequences.UNKNOWN).all()
        assert (labels[:, :-1] != sequences.UNKNOWN).all()


def test_forward_only_is_planned(folder: Path) -> None:
    with workers.own_modules():
        done = CliRunner().invoke(main.app, ["plan", "forward_only.yaml", "--json"])
    assert done.exit_code == 0, done.output
