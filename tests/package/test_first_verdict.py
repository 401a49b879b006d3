"""The notebook of examples/ runs from top to bottom, in a folder of its own, and what it says of the report is so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import markdown

NOTEBOOK = json.loads(markdown.read(markdown.REPOSITORY / "examples" / "first_verdict.ipynb"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
LINES = 20  # most of a cell, but for that of the model

# What Jupyter does: cells in order, in one namespace; two of its commands.
RUNNER = """\
import json, subprocess, sys
sys.path.insert(0, "")
for text in json.loads(sys.argv[1]):
    if text.startswith("%%writefile "):
        head, _, body = text.partition("\\n")
        open(head.split()[1], "w").write(body)
    elif text.startswith("!"):
        for line in text.splitlines():
            subprocess.run(line.removeprefix("!"), shell=True, check=True)
    else:
        exec(compile(text, "cell", "exec"))
print(patch.sites)
"""


def test_it_is_plain_and_its_cells_are_short() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert [cell["id"] for cell in CODE if len(cell["source"]) > LINES] == [CODE[0]["id"]]


@pytest.mark.slow
def test_it_runs_from_the_model_to_the_package(tmp_path: Path) -> None:
    cells = ["".join(cell["source"]) for cell in CODE]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(cells)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(markdown.REPOSITORY), "COLUMNS": "160"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for said in (
        "mmoe for h100 at batch size 8192: 1.",
        "of which fusing gains 1.",
        "FP8 itself gains 1.",
        "4 of 8 sites in FP8",
        "gates.click: keep by mmoe.yaml",
        "The model is bound, mode='train'; patch.remove() undoes it.",
        "LokaWarning: mmoe_fp8_1: the model is on cpu",
    ):
        assert said in done.stderr
    error = float(done.stdout.partition("relative error: ")[2].partition("%")[0])
    assert 0 < error < 15
    assert 'factory: "mmoe:build", inputs: "mmoe:example_inputs"' in done.stdout
    assert done.stdout.splitlines()[-1] == "('experts.0.0', 'experts.0.3', 'experts.1.0', 'experts.1.3')"
    assert (tmp_path / "generated" / "mmoe" / "modules.py").is_file()
