"""The scripts of examples/ run as their page says, on the CPU: they learn, verify, and save a plain checkpoint."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import runpy
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize("library", ["lightning", "accelerate", "transformers"])
def test_of_a_library(folder: Path, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    check(run_compiled(folder, f"train_{library}.py", 11), [0.71, 0.54], folder / "ranker.pt")


@pytest.mark.usefixtures("trained")
def test_serving_what_was_trained(folder: Path) -> None:
    scored = re.fullmatch(r"2 batches: loss ([\d.]+)\n", run_compiled(folder, "serve.py", 2))
    assert scored is not None
    assert float(scored[1]) == pytest.approx(0.54, abs=0.03)


class Asked:
    """A running service.py, asked as a client does; `module` is the script, in the folder that it runs in."""

    def __init__(self, module: Any, port: int) -> None:
        self.module, self.url = module, f"http://localhost:{port}"

    def get(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(self.url + path, data, timeout=60) as found:
                return found.status, json.load(found)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch, trained: str) -> Iterator[Asked]:
    """The service with the weights of step 5."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    with workers.own_modules():
        script = SimpleNamespace(**runpy.run_path("service.py"))
        script.publish(torch.load("ranker.pt"), 5)
        server = script.service(script.Scorer(), 0)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Asked(script, server.server_address[1])
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_service_takes_new_weights_and_refuses_stale_and_unfit_ones(asked: Asked) -> None:
    ranker, weights = asked.module.ranker, torch.load("ranker.pt")
    rows = 2100  # more than the largest size
    (dense, ids), _ = next(ranker.batches(rows, seed=3))
    body = {"dense": dense.tolist(), "ids": ids.tolist()}
    status, first = asked.get("/score", body)
    assert (status, first["step"], len(first["scores"])) == (200, 5, rows)
    model = ranker.build().eval()
    model.load_state_dict(weights)
    with torch.no_grad():
        expected = model(dense, ids).squeeze(1).sigmoid().tolist()
    assert first["scores"] == pytest.approx(expected, abs=0.05)
    assert asked.get("/score", {"dense": body["dense"][:3], "ids": body["ids"][:3]})[1]["scores"] == pytest.approx(
        first["scores"][:3]
    )

    weights["out.bias"] += 1
    asked.module.publish(weights, 6)
    second = asked.get("/score", body)[1]
    assert second["step"] == 6
    assert all(new > old for new, old in zip(second["scores"], first["scores"], strict=True))
    for step, change, why in (
        (6, {}, "step 6 is stale: step 6 is served"),
        (7, {"out.bias": torch.zeros(2)}, "step 7: the weights are of another model"),
        (8, {"out.bias": torch.tensor([torch.nan])}, "step 8: a weight is not finite"),
    ):
        asked.module.publish({**weights, **change}, step)
        assert asked.get("/score", body)[1] == second
        assert asked.get("/health")[1] == {"step": 6, "refused": why}
    torch.save(weights, "served.pt")  # without a step
    assert asked.get("/score", body)[1] == second
    assert "nothing that `publish` wrote" in asked.get("/health")[1]["refused"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"dense": [[0.0]], "ids": [[0] * 15]}, "dense has to be (rows, 16), ids (rows, 15)"),
        ({"dense": [[0.0] * 16], "ids": [[1000] * 15]}, "ids have to be from 0 to 999"),
        ({"dense": [[0.0] * 16], "ids": [[0.5] * 15]}, "ids have to be whole numbers"),
        ({"dense": [[0.0] * 16]}, "'ids'"),
    ],
)
def test_a_service_says_what_is_wrong_with_a_request(asked: Asked, body: dict[str, Any], error: str) -> None:
    assert asked.get("/score", body) == (400, {"error": error})


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
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml", ".ipynb")}
    assert set(re.findall(r"^\| \[(\S+)\]", PAGE, re.MULTILINE)) == files
    commands = re.findall(r"^    (\S.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    for script in files - {"ranker.py", "ranker.yaml", "first_verdict.ipynb"}:
        said = re.findall(r"^    (\S.*)$", markdown.read(EXAMPLES / script).split('"""')[1], re.MULTILINE)
        assert [command for command in commands if script in command or "generate" in command] == said
