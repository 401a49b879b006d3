"""`python -m benchmarks.serving`: what is measured of each variant, and what is said of it."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch

from benchmarks import serving
from benchmarks.serving import FORMS, Latency, ServingJob, answer, compiled, latency_of, main, table
from loka.bench.packages import Workshop
from loka.plan.planner import make_plan

MODEL = "tests.support.models.aoti_model"
POLICY = f"""\
version: 1
name: served
model: {{factory: "{MODEL}:build", inputs: "{MODEL}:inputs", batch_size: 64}}
target: reference
defaults: {{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}}
"""
LOKA, PLAIN = (next(form for form in FORMS if form.name == name) for name in ("loka-fp8", "graphs-bf16"))


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Two batch sizes of a small model, whose package is there; nothing is compiled."""
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    path = tmp_path / "served.yaml"
    path.write_text(POLICY)
    with Workshop() as workshop:
        workshop.package(make_plan(path))
        yield ServingJob(path, workshop.folder, "cpu", (16, 64), 0.01)


@torch.no_grad()
def test_calls_are_those_of_the_bound_model_at_each_batch_size(job):
    bound, plain = (compiled(job, form) for form in (LOKA, PLAIN))
    for batch in (16, 64):
        found, expected = bound[batch](), plain[batch]()
        assert (len(found), found.dtype) == (batch, torch.bfloat16)
        assert 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()


def test_a_process_says_that_it_is_ready_and_what_it_measured(job):
    ours, theirs = Pipe()
    ours.send(True)
    answer(job, LOKA, theirs)
    assert ours.recv() == ""
    assert [(each.variant, each.batch) for each in ours.recv()] == [("loka-fp8", 16), ("loka-fp8", 64)]


def test_a_process_says_why_there_is_no_variant(job, monkeypatch):
    monkeypatch.setattr(serving, "compiled", lambda *_: 1 / 0)
    ours, theirs = Pipe()
    answer(job, LOKA, theirs)
    assert ours.recv() == "ZeroDivisionError: division by zero"


def test_percentiles():
    found = latency_of("a", 64, [*map(float, range(1, 100))])
    assert (found.p50, found.p99, found.per_second) == (50.0, 99.0, 1280.0)


def test_the_table_has_the_most_samples_within_the_bound():
    found = [Latency("a", 64, 1, 2), Latency("a", 512, 4, 5), Latency("a", 4096, 5, 6), Latency("b", 64, 7, 9)]
    assert table(found, 5.0).splitlines() == [
        "p50; p99 in ms                 a               b",
        "64                  1.000; 2.000    7.000; 9.000",
        "512                 4.000; 5.000               -",
        "4096                5.000; 6.000               -",
        "samples a second, p99 within 5 ms",
        "a                       128000  at 512",
        "b               none",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--variants", "aoti-fp8"), "--variants: aoti-fp8: there are aoti-fp16, aoti-bf16, graphs-fp16"),
        (("--batches", "1,64"), "--batches: 1,64: numbers above 1"),
        ((), "benchmarks.serving"),
    ],
)
def test_what_is_refused(tmp_path, capsys, monkeypatch, arguments, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([str(tmp_path / "served.yaml"), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_packages_that_would_crash_are_refused(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(serving, "fault_of", lambda compiler: "no C++ compiler is found")
    assert main([str(tmp_path / "served.yaml"), "--device", "cpu"]) == 2
    assert "no C++ compiler is found, or leave out the variants of AOTInductor" in capsys.readouterr().err


def test_a_policy_without_fp8_is_no_variant_in_fp8(tmp_path: Path, capsys):
    path = tmp_path / "kept.yaml"
    path.write_text(POLICY.replace("compute: fp8", "compute: keep"))
    assert main([str(path), "--device", "cpu", "--variants", "loka-fp8"]) != 0
    assert "no GEMM can run in FP8" in capsys.readouterr().err
