"""What a person may ask for, and what is refused, before anything is measured."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from loka.bench import kernel_speed, machine
from loka.bench.cells import Cell
from loka.bench.kernel_speed import FAMILIES, KernelRequest, check, run
from loka.bench.library_gemms import NAMES
from loka.bench.machine import require_gpu
from loka.bench.results import Section
from loka.bench.timing import Timing
from loka.errors import InputError


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (KernelRequest(("norm",)), "no family 'norm'.*there are norm-forward"),
        (KernelRequest(("requantize-transpose",), "bf16"), "those of the family gemm"),
        (KernelRequest(variants="loka-fp8"), "--variants: there is no 'loka-fp8'"),
        (KernelRequest(variants="bf17"), "--variants: there is no 'bf17'.*did you mean bf16"),
        (KernelRequest(variants=" , "), "--variants: names none"),
    ],
)
def test_mistakes_are_told_before_anything_runs(asked: KernelRequest, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(asked)


def test_families_and_gemms_keep_their_order() -> None:
    assert check(KernelRequest()) == (FAMILIES, NAMES)
    families, gemms = check(KernelRequest(("gemm", "requantize-transpose"), "scaled-mm-rowwise, bf16"))
    assert (families, gemms) == (("requantize-transpose", "gemm"), ("bf16", "scaled-mm-rowwise"))


@pytest.mark.parametrize(
    ("there", "capability", "triton", "message"),
    [
        (False, (9, 0), "3.6", r"no CUDA device is visible.*run it on a machine with an H100"),
        (True, (8, 0), "3.6", "an older one has compute capability 8.0"),
        (True, (9, 0), None, "Triton is not installed"),
    ],
)
def test_a_machine_that_cannot_run_the_kernels_is_told_so(
    there: bool, capability: tuple[int, int], triton: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "an older one")
    monkeypatch.setattr(machine, "version_of", lambda *names: triton)
    with pytest.raises(InputError, match=message):
        require_gpu()


def test_a_run_reports_what_was_asked_and_where_it_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    section = Section("one", (Cell("work", "bf16", Timing(1.0, 1.0, 1.0, 1)),), "bf16")
    monkeypatch.setattr(kernel_speed, "require_gpu", lambda: None)
    monkeypatch.setattr(kernel_speed, "run_kernels", lambda families, gemms, progress: (section,))
    report = run(KernelRequest(("gemm",), "bf16"), tmp_path, print, datetime(2026, 11, 21, 8, 12, 30, tzinfo=UTC))
    assert (report.what, report.date, report.sections) == ("kernels", "2026-11-21T08:12Z", (section,))
    assert report.command == "loka bench kernels gemm --variants bf16"
    assert report.environment == machine.environment()
