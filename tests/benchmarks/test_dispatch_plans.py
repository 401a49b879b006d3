"""Regions under plans that measurements decide: which plans there are, and how they are measured and shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cells import MeasuredStep
from benchmarks.dispatch import dispatch_cases, dispatch_run
from benchmarks.dispatch.dispatch_bound import bound_us
from benchmarks.dispatch.dispatch_cases import (
    COMPILED,
    DISPATCH,
    FUSED,
    SHAPES,
    SINGLES,
    decisions,
    format_gemm,
    is_rendered,
)
from benchmarks.dispatch.dispatch_run import AS_COMPILED, Line, read_lines, run_dispatch
from benchmarks.dispatch.dispatch_table import best_words, means, times, to_markdown, variants_of
from benchmarks.packages import StudyWorkshop
from benchmarks.region.region import Shape
from benchmarks.replays import Timing
from benchmarks.roofline import peaks_of
from loka.codegen import render_package
from loka.codegen.chains import chain_shapes
from loka.errors import InputError
from loka.kernels.measurements.part_bounds import bound_us as part_us
from loka.kernels.measurements.parts import Part, PartKind
from tests.support.plan.bound_costs import MACHINE, SHAPE, known

WIDE = Shape(256, 64, 20000)  # wider than a program holds


@pytest.fixture
def workshop() -> Iterator[StudyWorkshop]:
    with StudyWorkshop() as opened:
        yield opened


@pytest.mark.slow
def test_plans_follow_the_measurements(workshop: StudyWorkshop) -> None:
    plans = decisions(SHAPE, workshop, known(fp8=0.3, fast=0.8))
    assert set(plans) == {FUSED, "cublas-precise", "cublas-fast", DISPATCH}
    assert {gemm.kernel for gemm in plans[FUSED].sites[0].gemms} == {"as-is"}
    assert plans[FUSED].runs == "fprop as-is, dgrad as-is, wgrad as-is"
    precise = "fprop torch.scaled_mm rowwise precise, dgrad torch.scaled_mm rowwise precise"
    assert plans["cublas-precise"].runs == f"{precise}, wgrad torch.scaled_mm tensorwise precise"
    assert plans[DISPATCH].runs == plans["cublas-fast"].runs
    made = plans[DISPATCH].plan()
    assert format_gemm(made.sites) == plans[DISPATCH].runs
    assert is_rendered(made)


@pytest.mark.slow
def test_libraries_are_combined_for_each_gemm(workshop: StudyWorkshop) -> None:
    plans = decisions(SHAPE, workshop, known(fp8=0.3, fbgemm=0.9))
    assert set(plans) == {FUSED, *(name for name in SINGLES if not name.startswith("mslk")), DISPATCH}
    chosen = {gemm.gemm.value: gemm.kernel for gemm in plans[DISPATCH].sites[0].gemms}
    assert chosen == {"fprop": "fbgemm.rowwise", "dgrad": "fbgemm.rowwise", "wgrad": "torch.scaled_mm"}
    alone = {gemm.kernel for gemm in plans["fbgemm-precise"].sites[0].gemms}
    assert "torch.scaled_mm" not in alone
    assert is_rendered(plans[DISPATCH].plan())


@pytest.mark.slow
def test_where_fp8_loses_everything_stays_in_bf16(workshop: StudyWorkshop) -> None:
    plans = decisions(SHAPE, workshop, known(fp8=1.5))
    assert {plan.runs for plan in plans.values()} == {"fprop as-is, dgrad as-is, wgrad as-is"}


@pytest.mark.slow
def test_wide_regions_are_rendered_in_chunks(workshop: StudyWorkshop) -> None:
    made = decisions(WIDE, workshop, known(fp8=0.01))[DISPATCH].plan()
    assert is_rendered(made)
    files = render_package(made)
    operators = ("layer_norm_e4m3_20000", "layer_norm_backward_20000")
    assert [n for n in operators if f"\n{n} = kernel(" not in files["fused.py"]] == []
    assert "def wide_forward(" in files["triton_kernels.py"]


@pytest.mark.slow
def test_regions_wider_than_any_kernel_need_the_compiler(
    workshop: StudyWorkshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dispatch_cases, chain_shapes):
        monkeypatch.setattr(module, "LARGEST_WIDTH", 10000)
    plans = decisions(WIDE, workshop, known(fp8=0.01))
    assert not is_rendered(plans["cublas-precise"].plan())


def test_the_bound_is_bytes_and_the_best_gemms() -> None:
    peaks = peaks_of("NVIDIA H100 80GB HBM3")
    fast, slow = (bound_us(SHAPE, known(fp8=share), peaks) for share in (0.1, 0.2))
    gemms = sum(
        part_us(Part(PartKind.GEMM, "as-is", *sizes))
        for sizes in ((8192, 2048, 1024), (8192, 1024, 2048), (2048, 1024, 8192))
    )
    assert fast is not None
    assert slow is not None
    assert slow - fast == pytest.approx(0.1 * gemms, rel=1e-4)
    plain = bound_us(SHAPE, known(fp8=100.0), peaks)
    assert plain == bound_us(SHAPE, known(fp8=200.0), peaks)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """A device on which what is compiled takes 10 us and anything else 5; what ran, and whether it was compiled."""
    ran: list[tuple[str, bool]] = []

    def measure(work, variant, training, package, compiled=True) -> MeasuredStep:  # type: ignore[no-untyped-def]
        ran.append((variant.name, compiled))
        if variant.name == "cublas-fast":
            raise RuntimeError("out of memory")
        us = 10.0 if compiled else 5.0
        return MeasuredStep(Timing(us, us, us, 9), None, None)

    monkeypatch.setattr(dispatch_run, "measure", measure)
    monkeypatch.setattr(dispatch_run, "work_of", lambda form, shape, modes: None)
    monkeypatch.setattr(dispatch_run.torch.cuda, "get_device_name", lambda: MACHINE.device)
    return ran


@pytest.mark.slow
def test_lines_are_written_and_read_again(tmp_path: Path, on_a_device: list[tuple[str, bool]]) -> None:
    file, variants = tmp_path / "lines.jsonl", (COMPILED, FUSED, *SINGLES, DISPATCH)
    costs = known(fp8=0.3)
    lines = run_dispatch(file, costs, [SHAPE], variants, lambda line: None, lambda: False)
    assert {line.variant: line.us for line in lines} == {
        COMPILED: 10.0, FUSED: 5.0, "cublas-precise": 5.0, "cublas-fast": None, DISPATCH: 5.0,
    }  # fmt: skip
    assert on_a_device == [(COMPILED, True), (FUSED, False), ("cublas-precise", False), ("cublas-fast", False)]
    assert read_lines(file) == lines
    by_name = {line.variant: line for line in lines}
    assert by_name[DISPATCH].runs == by_name["cublas-precise"].runs
    assert by_name["cublas-fast"].failure == "RuntimeError: out of memory"
    assert by_name[COMPILED].runs == AS_COMPILED
    assert by_name[DISPATCH].predicted_us is not None
    again = run_dispatch(file, costs, [SHAPE], (COMPILED, FUSED), lambda line: None, lambda: False)
    assert again == lines
    assert len(on_a_device) == 4
    retried = run_dispatch(file, costs, [SHAPE], variants, lambda line: None, lambda: False)
    assert [each.variant for each in retried[len(lines) :]] == ["cublas-fast"]
    assert len(on_a_device) == 5


def test_no_region_is_begun_when_the_time_is_over(tmp_path: Path, on_a_device: list[tuple[str, bool]]) -> None:
    told: list[str] = []
    lines = run_dispatch(tmp_path / "lines", known(), [SHAPE], (COMPILED,), told.append, lambda: True)
    assert lines == []
    assert on_a_device == []
    assert "run it again" in told[0]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"m": 1}\n')
    with pytest.raises(InputError, match=r"lines.jsonl:1: no line of `python -m benchmarks.dispatch`"):
        read_lines(file)


def line(shape: Shape, variant: str, us: float, bound: float = 50.0) -> Line:
    return Line(shape.m, shape.k, shape.n, variant, "gemms", us, us, us, us, bound, 30.0, 28.0)


def test_means_are_over_the_regions_that_all_variants_have() -> None:
    first, second, third = SHAPES[:3]
    lines = [
        line(first, COMPILED, 200.0), line(first, "cublas-precise", 100.0), line(first, DISPATCH, 100.0),
        line(second, COMPILED, 200.0), line(second, "cublas-precise", 125.0), line(second, DISPATCH, 100.0),
        line(third, COMPILED, 100.0),
    ]  # fmt: skip
    names = variants_of(lines)
    assert names == (COMPILED, "cublas-precise", DISPATCH)
    _, rows = means(lines, names)
    assert [row[1:] for row in rows] == [("2", "1.000x", "0.250"), ("2", "1.789x", "0.447"), ("2", "2.000x", "0.500")]
    assert best_words(lines, names).endswith("cublas-precise: 1.118x in geometric mean.")
    _, table = times(lines, names)
    assert table[0] == ("2048, 256, 768", "200.0", "100.0", "100.0", "50.0", "50 %")
    assert table[2] == ("2048, 512, 3456", "100.0", "-", "-", "50.0", "-")
    slower = [*lines, line(first, "torchao-rowwise", 300.0), line(second, "torchao-rowwise", 160.0)]
    _, rows = means(slower, variants_of(slower))
    assert rows[1] == ("torchao-rowwise", "2", "1.118x", "0.280")
    assert "## " not in to_markdown(lines, "A device", "made up")
    assert json.dumps(to_markdown(lines, "A device", "made up"))
