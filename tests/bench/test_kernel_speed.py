"""The kernels that are measured: that they are called as they want to be, and that GEMMs of libraries mean the same."""

from __future__ import annotations

import builtins
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from loka.bench import kernel_speed, library_gemms
from loka.bench.cells import decibels
from loka.bench.kernel_speed import CASES, FAMILIES, GEMM, SHAPES, KernelCase
from loka.bench.library_gemms import GEMMS, LibraryGemm
from loka.bench.packages import Workshop
from loka.bench.peers import PeerMissingError
from loka.bench.roofline import peaks_of
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


@pytest.mark.parametrize("gemm", [gemm for gemm in GEMMS if not gemm.fbgemm], ids=lambda gemm: gemm.name)
def test_every_gemm_is_the_same_product(gemm: LibraryGemm) -> None:
    torch.manual_seed(0)
    a, b = library_gemms.operands(64, 32, 128, "cpu")
    found = library_gemms.call_of(gemm)(*library_gemms.arguments_of(gemm, a, b))
    assert found.shape == (64, 32)
    assert found.dtype == torch.bfloat16
    error = decibels(found, a.double() @ b.double().t())
    assert error is not None
    assert error > (25 if gemm.scaling else 45)


def test_fbgemm_takes_vectors_of_scales_and_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def rowwise(a: Any, b: Any, scale_a: Any, scale_b: Any, use_fast_accum: bool) -> None:
        seen.extend([a.shape, b.shape, scale_a.shape, scale_b.shape, use_fast_accum])

    monkeypatch.setattr(library_gemms, "fbgemm_rowwise", lambda: rowwise)
    gemm = next(gemm for gemm in GEMMS if gemm.fbgemm)
    library_gemms.call_of(gemm)(*library_gemms.arguments_of(gemm, *library_gemms.operands(64, 32, 128, "cpu")))
    assert seen == [(64, 128), (32, 128), (64,), (32,), True]


def test_without_fbgemm_its_cell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("fbgemm_gpu"):
            raise ImportError("no such library")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    monkeypatch.delitem(sys.modules, "fbgemm_gpu", raising=False)
    with pytest.raises(PeerMissingError, match=r"FBGEMM GenAI is not installed \(no such library\)"):
        library_gemms.call_of(next(gemm for gemm in GEMMS if gemm.fbgemm))
