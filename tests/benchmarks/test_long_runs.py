"""The study of long runs, with a tiny model on the CPU: its scenarios, its file and its report."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks.long_runs.__main__ import main
from benchmarks.long_runs.long_models import MODELS
from benchmarks.long_runs.long_run import CurveFile, RunKey, run

SHORT = ["tiny", "--steps", "10", "--batch", "64", "--points", "2", "--test-rows", "512", "--device", "cpu"]


@pytest.mark.slow
def test_all_runs_are_kept_reported_and_not_run_again(tmp_path, capsys):
    path = tmp_path / "curves.jsonl"
    arguments = [*SHORT, "--no-compile", "--scenarios", "rough", "-o", str(path)]
    assert main(arguments) == 0
    first = capsys.readouterr()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 2 * 2  # mods, precisions
    assert [row["at"] for row in rows] == [[5, 10]] * 4
    assert [row["left_out"] for row in rows] == [[5]] * 4  # the NaN
    final = {(row["key"]["mods"], row["key"]["precision"]): row["ne"][-1] for row in rows}
    assert all(math.isfinite(ne) for ne in final.values())
    assert len(set(final.values())) == 4  # FP8 and the mods each change something
    assert first.out.count("| tiny |") == 2
    assert main(arguments) == 0
    second = capsys.readouterr()
    assert (second.out, second.err) == (first.out, "")


def test_a_run_without_a_patch_is_repeatable_and_events_happen():
    def of(scenario):
        key = RunKey("tiny", False, "bf16", scenario, 3, 8, 32, 1, 256)
        return run(MODELS["tiny"], key, lambda model: None, "cpu", False, lambda line: None)

    calm, rough = of("calm"), of("rough")
    assert calm.left_out == ()
    assert rough.left_out == (4,)  # the step with the NaN, and no other: the optimiser did not see it
    assert of("calm").ne == calm.ne
    assert of("rough").ne != calm.ne


def test_an_unknown_model_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["huge", "-o", str(tmp_path / "curves.jsonl")])
    assert "no model huge; there are wukong, dcnv2, tiny" in capsys.readouterr().err


def test_a_file_gives_back_its_curves(tmp_path):
    key = RunKey("tiny", False, "bf16", "calm", 3, 2, 16, 1, 64)
    curve = run(MODELS["tiny"], key, lambda model: None, "cpu", False, lambda line: None)
    file = CurveFile(tmp_path / "curves.jsonl")
    file.add(curve)
    again = CurveFile(tmp_path / "curves.jsonl")
    assert again.curves == [curve]
    assert again.has(key)
    assert not again.has(RunKey("tiny", True, "bf16", "calm", 3, 2, 16, 1, 64))
