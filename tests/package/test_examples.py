"""The scripts of examples/ run as their page says, on the CPU: they learn, verify, and save a plain checkpoint."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from loka.cli import main
from tests.support import markdown
from tests.support.processes import example_workers as workers

EXAMPLES = markdown.REPOSITORY / "examples"
PAGE = markdown.read(EXAMPLES / "README.md")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples with their package."""
    copied = tmp_path_factory.mktemp("user") / "examples"
    shutil.copytree(EXAMPLES, copied, ignore=shutil.ignore_patterns("generated", "__pycache__"))
    with pytest.MonkeyPatch.context() as patch, workers.own_modules():
        patch.chdir(copied)
        patch.syspath_prepend(str(copied))
        done = CliRunner().invoke(main.app, ["generate", "ranker.yaml"])
    assert done.exit_code == 0, done.output
    return copied


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Path:
    """The folder after the scripts for several processes ran in it."""
    workers.start_all(folder, workers.SCRIPTS, steps=2)
    return folder


def check(printed: str, expected: list[float], checkpoint: Path) -> None:
    """The losses printed, one in ten, are about these, and the checkpoint is one of the plain model."""
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", printed, re.MULTILINE)]
    assert losses == pytest.approx(expected, abs=0.03)
    state = torch.load(checkpoint)
    runpy.run_path(str(EXAMPLES / "ranker.py"))["build"]().load_state_dict(state)
    assert all(torch.isfinite(value).all() for value in state.values())


def run_compiled(folder: Path, script: str, steps: int) -> str:
    """What a script prints that runs in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        workers.run(folder, script, steps, functools.partial(torch.compile, backend="aot_eager"))
    return printed.getvalue()


@pytest.fixture(scope="module")
def trained(folder: Path) -> str:
    """What train.py printed, which left ranker.pt."""
    return run_compiled(folder, "train.py", 11)


def test_one_device(folder: Path, trained: str) -> None:
    check(trained, [0.71, 0.54], folder / "ranker.pt")


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_of_a_library(folder: Path, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    check(run_compiled(folder, f"train_{library}.py", 11), [0.71, 0.54], folder / "ranker.pt")


@pytest.mark.usefixtures("trained")
def test_serving_what_was_trained(folder: Path) -> None:
    scored = re.fullmatch(r"2 batches: loss ([\d.]+)\n", run_compiled(folder, "serve.py", 2))
    assert scored is not None
    assert float(scored[1]) == pytest.approx(0.54, abs=0.03)


@pytest.mark.parametrize("name", ["train_ddp", "train_fsdp"])
def test_two_processes(ranks: Path, name: str) -> None:
    first, second = (markdown.read(ranks / f"{name}.{rank}.txt") for rank in range(workers.WORLD))
    check(first, [0.71], ranks / f"{name}.pt")
    assert second == ""


def test_two_processes_with_a_guard_that_go_on_from_a_checkpoint(ranks: Path) -> None:
    first, resumed = (torch.load(ranks / f"guarded_{kind}.pt", weights_only=True) for kind in ("ddp", "fsdp"))
    assert (first["step"], resumed["step"]) == (2, 4)
    assert (first["guard"]["step"], resumed["guard"]["step"]) == (2, 4)
    for before, after in zip(first["guard"]["modules"], resumed["guard"]["modules"], strict=True):
        assert not after["fallen"]
        for (name, norms, *_), (same, more, *_) in zip(
            before["judge"]["figures"], after["judge"]["figures"], strict=True
        ):
            assert (name, norms) == (same, more[:2])
            assert len(more) == 4
    assert all(torch.isfinite(value).all() for value in resumed["model"].values())
    runpy.run_path(str(EXAMPLES / "ranker.py"))["build"]().load_state_dict(resumed["model"])
    assert re.fullmatch(r"step   0: loss 0\.\d+\n", markdown.read(ranks / "guarded_ddp.0.txt"))


def test_the_page_names_every_file_and_each_script_says_how_it_is_run() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml")}
    assert set(re.findall(r"^\| \[(\S+)\]", PAGE, re.MULTILINE)) == files
    commands = re.findall(r"^    (\S.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    for script in files - {"ranker.py", "ranker.yaml"}:
        said = re.findall(r"^    (\S.*)$", markdown.read(EXAMPLES / script).split('"""')[1], re.MULTILINE)
        assert [command for command in commands if script in command or "generate" in command] == said
