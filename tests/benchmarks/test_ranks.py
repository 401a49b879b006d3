"""The study of several GPUs, tried out on two processes with gloo."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.processes.launch import environment

RUN = [sys.executable, "-m"]


@pytest.mark.slow
def test_each_variant_has_its_bytes_and_the_same_losses(tmp_path):
    variables = environment(WIDTH="128", LAYERS="2", BATCH="32", OMP_NUM_THREADS="1")
    torchrun = [*RUN, "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for command in (
        [*RUN, "benchmarks.ranks", "--generate"],
        [*torchrun, "-m", "benchmarks.ranks", "--out", "ranks.json", "--modes", "eager", "--kinds", "fsdp2"],
    ):
        subprocess.run(command, cwd=tmp_path, env=variables, check=True, timeout=200)
    found = json.loads((tmp_path / "ranks.json").read_text())
    assert (found["world"], found["width"]) == (2, 128)
    rows = {row["variant"]: row for row in found["rows"]}
    assert list(rows) == ["bf16", "loka", "gather"]
    assert rows["loka"]["losses"] == rows["gather"]["losses"]
    assert rows["loka"]["all_gather_bytes"] == rows["bf16"]["all_gather_bytes"]
    assert (
        rows["gather"]["all_gather_bytes"] < 0.55 * rows["loka"]["all_gather_bytes"]
    )  # with norms, biases and the head
    assert rows["gather"]["bare_all_gather_ms"] > 0
    assert rows["gather"]["report"].startswith("FP8 all-gather: 4 of 4 FP8 weights")
