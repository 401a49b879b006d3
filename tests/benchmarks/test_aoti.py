"""`python -m benchmarks.aoti` on the CPU: packages run without LoKA, and what ends a process is said."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from torch import nn

from benchmarks.aoti import __main__ as aoti
from benchmarks.aoti.__main__ import AotiRun, failure_of, line_of, outcome, outcomes, table, write_package
from benchmarks.aoti.compiler import cpp_compiler, fault_of
from benchmarks.aoti.jobs import (
    BF16,
    FP8,
    LINEAR,
    PACKAGE,
    Action,
    AotiModel,
    Job,
    Outcome,
    compiling,
    running,
    timing,
)
from benchmarks.aoti.worker import RefusingLoka, made
from loka.errors import InputError

MODEL = "tests.support.models.aoti_model"


def subject(folder: Path, factory: str = "build", device: str = "cpu") -> AotiModel:
    return AotiModel(f"{MODEL}:{factory}", f"{MODEL}:inputs", 16, device, str(folder))


@pytest.mark.slow
def test_the_package_of_fp8_runs_without_loka(tmp_path: Path) -> None:
    model = subject(tmp_path)
    write_package(model, "CPU")
    form = replace(FP8, options={"aot_inductor.compile_wrapper_opt_level": "O0"})  # half of the compiler's time
    assert outcome(Job("compile", model, form, Action.COMPILE)).failure == ""
    job = Job("run", model, form, Action.RUN, environment={"OMP_NUM_THREADS": "1"})
    timed = Job("time", model, form, Action.TIME_PACKAGE, rounds=3)
    ran, time = outcomes((job, timed), 2)
    assert (ran.failure, time.failure) == ("", "")
    assert ran.largest_error is not None
    assert ran.scale is not None
    assert 0 <= ran.largest_error < 0.1 * ran.scale  # another order of sums moves values over ties of FP8
    assert time.ms is not None
    assert time.ms > 0


@pytest.mark.slow
def test_a_process_that_crashes_is_an_outcome(tmp_path: Path) -> None:
    found = outcome(Job("crash", subject(tmp_path, "crashing"), BF16, Action.TIME_COMPILED))
    words = ("ended by SIGSEGV", "frame #0: ", "Fatal Python error: Segmentation fault", "aoti_model.py")
    assert [word for word in words if word not in found.failure] == []
    assert found.ms is None


def test_a_process_has_its_job_and_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Job, str]] = []

    def ran(command: list[str], env: dict[str, str], **options: object) -> CompletedProcess[str]:
        asked.append((Job.from_json(command[-1]), env["CUDA_LAUNCH_BLOCKING"]))
        return CompletedProcess(command, 1, "", "RuntimeError: no such table\n")

    monkeypatch.setattr(aoti.subprocess, "run", ran)
    job = Job("one", subject(tmp_path), BF16, Action.RUN, environment={"CUDA_LAUNCH_BLOCKING": "1"})
    assert outcome(job).failure == "ended with status 1\nRuntimeError: no such table"
    assert asked == [(job, "1")]


def test_the_linear_form_is_one_layer(tmp_path: Path) -> None:
    model, inputs = made(subject(tmp_path), LINEAR)
    assert type(model) is nn.Linear
    assert model(*inputs).shape == inputs[0].shape


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti, "LIMIT", 0.1)
    assert outcome(Job("slow", subject(tmp_path), BF16, Action.TIME_COMPILED)).failure == "not done after 0 s"


def test_a_model_without_fp8_is_no_subject(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no GEMM of .*:narrow would run in FP8"):
        write_package(subject(tmp_path, "narrow"), "CPU")


def test_every_package_that_runs_or_is_timed_was_compiled(tmp_path: Path) -> None:
    model = subject(tmp_path, device="cuda")
    compiled = {job.form.name for job in compiling(model) if job.action is Action.COMPILE}
    assert {job.form.name for job in running(model)} == compiled
    assert {job.form.name for job in timing(model, 3) if job.action is Action.TIME_PACKAGE} <= compiled
    (alone,) = (job for job in compiling(model) if job.action is Action.COMPILE_AND_RUN)
    assert alone.form.name not in compiled  # processes side by side write different files
    assert [job.name for job in timing(model, 3)][-1] == "FP8 CUDA graph"
    assert not any(job.action is Action.TIME_GRAPH for job in timing(subject(tmp_path), 3))


def test_loka_and_the_generated_package_are_refused() -> None:
    finder = RefusingLoka()
    for name in ("loka", "loka.dispatch", PACKAGE, f"{PACKAGE}.modules"):
        with pytest.raises(ImportError, match="is refused here"):
            finder.find_spec(name)
    finder.find_spec("lokalize")


def test_the_last_lines_of_a_process_are_kept() -> None:
    lines = failure_of(-11, "\n".join(f"line {number}" for number in range(100)) + "\n\n").splitlines()
    assert lines[0] == "ended by SIGSEGV"
    assert lines[1:] == [f"line {number}" for number in range(100 - aoti.LAST_LINES, 100)]


def test_the_table_has_the_wanted_ratios_and_every_failure() -> None:
    names = ("BF16 torch.compile", "BF16 AOTInductor", "FP8 torch.compile", "FP8 AOTInductor", "FP8 CUDA graph")
    timed = tuple(Outcome(name, 9.0, ms) for name, ms in zip(names, (5.0, 4.5, 3.5, 3.0, 2.85), strict=True))
    bad = Outcome("bf16: fresh process", 3.0, failure="ended by SIGSEGV\nFatal Python error")
    run = AotiRun("GPU", "2.11", "m:f", 8, "g++", (Outcome("compile bf16", 66.0),), (bad,), timed)
    lines = table(run).splitlines()
    assert "speed of FP8 AOTInductor over our CUDA graph: 0.950x" in lines
    assert "speed of FP8 AOTInductor over BF16 AOTInductor: 1.500x" in lines
    assert "compile bf16: 66 s" in lines
    assert lines[-2:] == ["bf16: fresh process: ended by SIGSEGV", "  Fatal Python error"]
    broken = tuple(Outcome(name, 1.0, failure="ended by SIGABRT") for name in names[1:2])
    lines = table(AotiRun("GPU", "2.11", "m:f", 8, "", (), (), (*timed[3:], *broken))).splitlines()
    assert lines[0].endswith("C++: none")
    assert not any("over BF16 AOTInductor" in line for line in lines)
    assert lines[-1] == "BF16 AOTInductor: ended by SIGABRT"


def test_an_outcome_on_a_line() -> None:
    assert line_of(Outcome("run", 4.4, None, 0.0125, 1.25)) == "run: differs by 0.013 of 1.2, 4 s"


def compiler_with(folder: Path, flags: str) -> str:
    """A command that is the compiler, with more flags where it links a shared object."""
    path, compiler = folder / "cxx", shutil.which(cpp_compiler())
    linking = f'case "$*" in *-shared*) exec {compiler} "$@" {flags};; esac'
    path.write_text(f'#!/bin/sh\n{linking}\nexec {compiler} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_a_compiler_of_this_machine_links_the_shared_runtime() -> None:
    assert fault_of(cpp_compiler()) == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [("-static-libstdc++", "links libstdc++ statically"), ("-no-such-option", "ends with status 1: ")],
)
def test_a_compiler_whose_packages_cannot_be_loaded_is_named(tmp_path: Path, flags: str, words: str) -> None:
    compiler = compiler_with(tmp_path, flags)
    fault = fault_of(compiler)
    assert compiler in fault
    assert words in fault
    assert "set CXX" in fault


def test_a_machine_without_a_compiler_is_told_so() -> None:
    assert "no C++ compiler is found" in fault_of("")
