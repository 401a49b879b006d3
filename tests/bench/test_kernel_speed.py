"""The kernels that are measured: that they are called as they want to be, and that GEMMs of libraries mean the same."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

from loka.bench import kernel_speed, library_gemms
from loka.bench.kernel_speed import CASES, FAMILIES, GEMM, SHAPES, KernelCase
from loka.bench.packages import Workshop
from loka.bench.record.gemm_parts import Gemms
from loka.bench.roofline import GemmMath, peaks_of, product_us
from loka.bench.timing import Timing, rotations, size_of


@pytest.fixture(scope="module")
def module() -> Any:
    with Workshop() as workshop:
        yield workshop.kernels([case.spec(width) for case in CASES for _, width in SHAPES])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_every_kernel_can_be_called_as_it_is_measured(
    case: KernelCase, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CPU tensors, through the operator's reference."""
    width = SHAPES[0][1]
    spec = case.spec(width)
    _place_on_the_cpu(monkeypatch)
    arguments = case.arguments(16, width)
    inspect.signature(getattr(module, spec.function)).bind(*arguments)
    results = getattr(module, spec.function)(*arguments)
    results = results if isinstance(results, tuple | list) else (results,)
    assert len(results) == len(spec.results)
    assert all(value.float().isfinite().all() for value in results)


def test_the_first_value_of_fp8_rows_is_scaled() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    scaled = kernel_speed.first_value(
        ("values", "scale", "largest"),
        (rows.to(torch.float8_e4m3fn), torch.tensor([[2.0], [0.5]]), torch.zeros(1)),
    )
    assert scaled.tolist() == [[2.0, 4.0], [1.5, 2.0]]
    assert kernel_speed.first_value(("out", "mean"), (rows.bfloat16(), torch.zeros(2))).tolist() == rows.tolist()
    known = rows.to(torch.float8_e4m3fn), torch.ones(64, rows.shape[1])  # partial sums of a gradient, no scale
    assert kernel_speed.first_value(("values", "dweight"), known).tolist() == rows.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {GEMM}))
def test_a_cell_has_the_bytes_as_its_bound_and_compares_with_the_reference(
    family: str, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = next(case for case in CASES if case.family == family)
    width = SHAPES[0][1]
    function = case.spec(width).function
    _place_on_the_cpu(monkeypatch)
    host = getattr(module, function)
    monkeypatch.setattr(kernel_speed, "time_call", lambda call, sets: Timing(len(sets), 1.0, 1.0, 1))
    peaks = peaks_of("NVIDIA H100 80GB HBM3")
    cell = kernel_speed._cell(case, 64, width, module, peaks, lambda line: None)
    assert cell.failure == ""
    assert cell.timing is not None
    assert cell.errors is not None
    assert cell.errors.output == pytest.approx(300.0)
    arguments = case.arguments(64, width)
    results = host(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    moved = size_of(arguments) + size_of(results)
    assert cell.bound_us == pytest.approx(1e6 * moved / 2.43e12)
    assert cell.timing.median_us == rotations(size_of(arguments))


def _place_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("randn", "randint", "full", "zeros"):
        original = getattr(torch, name)

        def made(*sizes: Any, device: str = "cpu", original: Any = original, **options: Any) -> torch.Tensor:
            return original(*sizes, **options)

        monkeypatch.setattr(torch, name, made)


def test_gemms_of_libraries_are_measured_as_recordings_measure_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where FBGEMM's has a reference too; arguments rotate, and BF16 is the baseline."""
    monkeypatch.setattr(library_gemms, "Gemms", lambda: Gemms("cpu"))
    monkeypatch.setattr(library_gemms, "SHAPES", ((64, 32, 128),))
    monkeypatch.setattr(library_gemms, "time_call", lambda call, sets: Timing(len(sets), 1.0, 1.0, 1))
    peaks = peaks_of("NVIDIA H100 80GB HBM3")
    section = library_gemms.run_gemms(library_gemms.NAMES, peaks, lambda line: None)
    assert [cell.failure for cell in section.cells] == [""] * len(library_gemms.NAMES)
    by_name = {cell.variant: cell for cell in section.cells}
    for name, cell in by_name.items():
        assert cell.errors.output > (25 if name != "bf16" else 45)
    assert by_name["bf16"].timing.median_us == rotations(2 * 128 * (64 + 32))
    for name, precision in (("bf16", GemmMath.BF16), ("scaled-mm-rowwise", GemmMath.FP8)):
        assert by_name[name].bound_us == pytest.approx(product_us(64, 32, 128, precision, peaks))
    few = library_gemms.run_gemms(("bf16",), None, lambda line: None)
    assert [(cell.variant, cell.bound_us) for cell in few.cells] == [("bf16", None)]
