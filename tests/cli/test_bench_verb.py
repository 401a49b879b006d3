"""`loka bench`: what it refuses, and exports of measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loka.bench import machine
from loka.kernels.measurements.lookup import Measurements
from tests.support.plan.made_recordings import small_recording

KNOWN = str(Path(__file__).parents[2] / "policies" / "small_ranker.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernels",), "add --record FILE to measure kernels, or --export FILE to write them out"),
        (("regions",), "there is no 'regions' to measure; write one of kernels, model"),
        (("kernels", "--parts", "gemm"), "--parts goes with --record; add one, or leave --parts out"),
        (("kernels", "--jobs", "2"), "--jobs goes with --record; add one, or leave --jobs out"),
        (("kernels", "--only", "train"), "--only goes with loka bench model; add one, or leave --only out"),
        (("kernels", "--batch", "2"), "--batch goes with loka bench model; add one, or leave --batch out"),
        (("kernels", "--gpus", "2"), "--gpus goes with loka bench model; add one, or leave --gpus out"),
        (("model", KNOWN, "--gpus", "2", "--casting", "autocast"), "in bfloat16 alone; leave --casting out"),
        (("model", KNOWN, "--gpus", "2"), "no CUDA device is visible"),
        (("model", "missing.yaml"), "missing.yaml"),
        (("kernels", "--record", "x.jsonl", "--variants", "bf16"), "--variants goes with loka bench model"),
        (("model", KNOWN, "--variants", "bf17"), "--variants: there is no 'bf17'; there are "),
        (("model", KNOWN, "--variants", " , "), "--variants: names none"),
        (("model", KNOWN), "no CUDA device is visible"),
        (("model", "x.yaml", "--record", "x.jsonl"), "--record goes with loka bench kernels"),
        (("kernels", "gemm", "--record", "x.jsonl"), "name kinds of parts with --parts, not 'gemm'"),
        (("kernels", "--record", "x.jsonl", "--parts", "gemms"), "no parts of the kind 'gemms'"),
        (("kernels", "--record", "x.jsonl", "--seconds", "nan"), "--seconds: nan is no time to work in"),
        (("kernels", "--record", "x.jsonl"), "no CUDA device is visible"),
        (("kernels", "--policy", "x.yaml"), "--policy goes with --record"),
        (("kernels", "--export", "x.jsonl"), "name the one file of measurements"),
        (("kernels", "nowhere.jsonl", "--export", "x.jsonl"), "is not there"),
        (
            ("kernels", "a", "--export", "x", "--target", "reference"),
            "for 'reference'; write one of h100, ",
        ),
    ],
)
def test_what_cannot_be_measured_leaves_with_2_and_writes_nothing(
    loka: Callable[..., Any],
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = loka("bench", *arguments)
    assert ran.status == 2
    assert message in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("capability", "triton", "message"),
    [
        ((8, 0), "3.6", "an older one has compute capability 8.0"),
        ((9, 0), None, "Triton is not installed"),
        ((12, 0), "3.6", "GeForce RTX and RTX PRO GPUs of compute capability 12.0 are no target: missing are"),
    ],
)
def test_a_machine_that_cannot_run_the_kernels_is_told_so(
    loka: Callable[..., Any],
    capability: tuple[int, int],
    triton: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "an older one")
    monkeypatch.setattr(machine, "version_of", lambda *names: triton)
    ran = loka("bench", "kernels", "--record", "x.jsonl")
    assert (ran.status, message in ran.err) == (2, True)


@pytest.mark.slow
def test_measurements_are_exported_without_a_gpu(loka: Callable[..., Any], tmp_path: Path) -> None:
    recorded, text = small_recording(tmp_path / "h100.jsonl"), tmp_path / "exported.jsonl"
    ran = loka("bench", "kernels", str(recorded), "--export", str(text))
    assert "measurements on NVIDIA H100 80GB HBM3" in ran.out
    assert '"loka bench kernels --record h100.jsonl"' in text.read_text().splitlines()[0]
    assert Measurements.open(text, "h100").sha256 == Measurements.open(recorded, "h100").sha256
