"""examples/torchrec_dmp in two processes on the CPU: the bound dense part learns as the plain one does."""

from __future__ import annotations

import re
import shutil

import pytest
from typer.testing import CliRunner

from loka.cli import main
from tests.support import markdown
from tests.support.processes import example_workers as workers

pytest.importorskip("torchrec", reason="torchrec is an extra; `make test` installs it on Linux x86_64")

EXAMPLE = markdown.REPOSITORY / "examples" / "torchrec_dmp"
RUNS = {name: ("train.py", "", "--bind", name) for name in ("never", "before", "after")}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses that each run printed, one in ten steps."""
    folder = tmp_path_factory.mktemp("user") / "torchrec_dmp"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("generated", "__pycache__"))
    with pytest.MonkeyPatch.context() as patch, workers.own_modules():
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        done = CliRunner().invoke(main.app, ["generate", "ranker.yaml"])
    assert done.exit_code == 0, done.output
    workers.start_all(folder, RUNS, steps=11)
    printed = {name: [markdown.read(folder / f"{name}.{rank}.txt") for rank in range(workers.WORLD)] for name in RUNS}
    assert all(second == "" for _, second in printed.values())
    return {
        name: [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", first, re.MULTILINE)]
        for name, (first, _) in printed.items()
    }


def test_the_bound_dense_part_learns_as_the_plain_one(losses: dict[str, list[float]]) -> None:
    plain, bound = losses["never"], losses["before"]
    assert len(plain) == 2
    assert plain[0] > 0.7
    assert plain[-1] < 0.6
    assert bound == pytest.approx(plain, abs=0.015)
    assert bound != plain


def test_apply_before_and_after_sharding_are_the_same(losses: dict[str, list[float]]) -> None:
    assert losses["before"] == losses["after"]
