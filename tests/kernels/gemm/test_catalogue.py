"""What each kernel says it can run, and why not."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from loka.errors import InputError
from loka.kernels.gemm.catalogue import (
    GEMM_KERNELS,
    NATIVE,
    PREFERRED,
    SCALED_MM,
    GemmRequest,
    GemmSizes,
    gemm_sizes,
    kernel_named,
)
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.parts import TimeSource
from loka.numerics.enums import Accumulation, Format, Gemm, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.plan import NATIVE as AS_IS_IN_PLANS

HOPPER = pytest.mark.parametrize("target", ["h100", "h200"])
BLOCKWISE = (Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128)


def ask(
    *,
    formats: tuple[Format, Format] = (Format.E4M3, Format.E4M3),
    scalings: tuple[Scaling, Scaling] = (Scaling.ROWWISE, Scaling.ROWWISE),
    accumulation: Accumulation = Accumulation.PRECISE,
    gemm: Gemm = Gemm.FPROP,
    padding: bool = True,
    sizes: tuple[int, int, int] = (4096, 512, 256),
    target: str = "h100",
) -> str | None:
    first, second = (OperandRecipe(format=f, scaling=s) for f, s in zip(formats, scalings, strict=True))
    m, k, n = sizes
    return SCALED_MM.unsupported_reason(GemmRequest(gemm, (first, second), accumulation, padding, m, k, n, target))


def test_the_names_are_those_of_the_plan() -> None:
    names = [kernel.name for kernel in GEMM_KERNELS]
    assert names[0] == "torch.scaled_mm"
    assert names[-1] == AS_IS_IN_PLANS
    assert len({*names}) == len(names) == 4
    assert [kernel.name for kernel in PREFERRED] == ["torch.scaled_mm"]


def test_a_kernel_is_found_by_its_name() -> None:
    assert kernel_named("torch.scaled_mm") is SCALED_MM
    with pytest.raises(InputError, match=r"no kernel 'fbgem.rowwise'; did you mean 'fbgemm.rowwise'\?"):
        kernel_named("fbgem.rowwise")
    with pytest.raises(InputError, match=r"it can be torch\.scaled_mm, fbgemm\.rowwise, mslk\.rowwise$"):
        kernel_named("?")


@pytest.mark.slow
def test_recordings_of_a_kernel_that_is_in_the_catalogue_no_more_still_load() -> None:
    shipped = Measurements.shipped("h100")
    assert shipped is not None
    parts = [part for part in shipped.parts if part.kernel == "triton.gemm"]
    assert parts
    timed = shipped.time(parts[0])
    assert timed is not None
    assert timed.source is TimeSource.MEASURED


def test_what_is_called_is_an_operator_of_one_form() -> None:
    called = [kernel.operator for kernel in GEMM_KERNELS if kernel.operator is not None]
    assert called == ["loka::scaled_mm", "loka::fbgemm_rowwise_mm", "loka::mslk_rowwise_mm"]
    arguments = [
        [
            (argument.name, str(argument.type))
            for argument in getattr(torch.ops.loka, name[6:]).default._schema.arguments
        ]
        for name in called
    ]
    assert arguments[0] == arguments[1] == arguments[2]


def test_this_machine_without_a_gpu_has_no_fp8_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = {kernel.name: kernel.unavailable_reason() for kernel in GEMM_KERNELS}
    assert found["as-is"] is None
    assert found["torch.scaled_mm"] == (
        "no CUDA device is visible; it needs one of compute capability 8.9; its reference runs"
    )
    assert all(reason for name, reason in found.items() if name != "as-is")


@pytest.mark.parametrize("scalings", list(itertools.product(Scaling, Scaling)))
@pytest.mark.parametrize("formats", list(itertools.product(Format, Format)))
@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_the_reference_takes_every_recipe_and_size(formats, scalings, accumulation: Accumulation) -> None:
    recipe = {"formats": formats, "scalings": scalings, "accumulation": accumulation}
    for gemm in Gemm:
        assert ask(gemm=gemm, **recipe, padding=False, sizes=(3, 13, 1), target="reference") is None


@HOPPER
@pytest.mark.parametrize("accumulation", list(Accumulation))
@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE])
@pytest.mark.parametrize("formats", list(itertools.product(Format, Format)))
def test_tensorwise_and_rowwise_take_one_e5m2_at_most(
    formats, scaling: Scaling, accumulation: Accumulation, target: str
) -> None:
    reason = ask(formats=formats, scalings=(scaling, scaling), accumulation=accumulation, target=target)
    if formats == (Format.E5M2, Format.E5M2):
        assert reason == "the tensor core multiplies no e5m2 x e5m2; make one operand e4m3"
    else:
        assert reason is None


@HOPPER
@pytest.mark.parametrize(
    ("scalings", "able"),
    [
        ((Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_1X128), True),
        ((Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128), True),
        ((Scaling.BLOCKWISE_128X128, Scaling.BLOCKWISE_1X128), True),
        ((Scaling.BLOCKWISE_128X128, Scaling.BLOCKWISE_128X128), False),
        ((Scaling.TENSORWISE, Scaling.ROWWISE), False),
        ((Scaling.ROWWISE, Scaling.BLOCKWISE_1X128), False),
    ],
)
def test_pairs_of_scalings(scalings, able: bool, target: str) -> None:
    reason = ask(scalings=scalings, target=target)
    if able:
        assert reason is None
    else:
        assert reason is not None
        assert f"no kernel multiplies {scalings[0].value} x {scalings[1].value}" in reason
        assert "rowwise x rowwise" in reason


@HOPPER
def test_blockwise_takes_e4m3_and_precise_accumulation_only(target: str) -> None:
    mixed = ask(scalings=BLOCKWISE, formats=(Format.E5M2, Format.E4M3), target=target)
    fast = ask(scalings=BLOCKWISE, accumulation=Accumulation.FAST, target=target)
    assert mixed == "blockwise scaling takes e4m3 operands only"
    assert fast == "blockwise scaling has no fast accumulation; use accumulation: precise"


def test_sizes_of_the_three_gemms() -> None:
    assert gemm_sizes(Gemm.FPROP, 7, 5, 3) == GemmSizes(rows=7, columns=3, contraction=5)
    assert gemm_sizes(Gemm.DGRAD, 7, 5, 3) == GemmSizes(rows=7, columns=5, contraction=3)
    assert gemm_sizes(Gemm.WGRAD, 7, 5, 3) == GemmSizes(rows=3, columns=5, contraction=7)


@pytest.mark.parametrize(
    ("gemm", "sizes", "misfits"),
    [
        (Gemm.FPROP, (4093, 512, 256), []),
        (Gemm.FPROP, (4096, 479, 24), ["N = 24", "K = 479"]),
        (Gemm.DGRAD, (4093, 512, 256), []),
        (Gemm.DGRAD, (4096, 13, 24), ["K = 13", "N = 24"]),
        (Gemm.WGRAD, (4096, 512, 1), []),
        (Gemm.WGRAD, (4093, 13, 1), ["K = 13", "M = 4093"]),
    ],
)
def test_sizes_that_do_not_fit_are_padded_or_refused(gemm: Gemm, sizes, misfits: list[str]) -> None:
    assert ask(gemm=gemm, sizes=sizes, padding=True) is None
    reason = ask(gemm=gemm, sizes=sizes, padding=False)
    if misfits:
        assert reason == (
            ", ".join(f"{misfit} is no multiple of 16" for misfit in misfits)
            + ", and padding is off; set padding: true"
        )
    else:
        assert reason is None


def test_a_first_operand_scaled_1x128_has_rows_in_fours() -> None:
    pair = (Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128)
    assert ask(scalings=pair, padding=False, sizes=(4094, 512, 256)) == (
        "M = 4094 is no multiple of 4, and padding is off; set padding: true"
    )
    assert ask(scalings=pair, padding=True, sizes=(4094, 512, 256)) is None
    assert ask(scalings=pair[::-1], padding=False, sizes=(4094, 512, 256)) is None


def test_a_static_scale_needs_a_maximum() -> None:
    static = OperandRecipe(range=Range.STATIC, scaling=Scaling.TENSORWISE)
    known = OperandRecipe(range=Range.STATIC, scaling=Scaling.TENSORWISE, amax=3.0)
    for target in ("h100", "reference"):
        wanted = GemmRequest(Gemm.DGRAD, (known, static), Accumulation.PRECISE, True, 64, 64, 64, target)
        reason = SCALED_MM.unsupported_reason(wanted)
        assert reason == "dgrad.weight has a static scale but no amax; give amax, or use range: dynamic"
        assert SCALED_MM.unsupported_reason(replace(wanted, operands=(known, known))) is None


@pytest.mark.parametrize("target", ["h100", "h200", "reference"])
@pytest.mark.parametrize("accumulation", list(Accumulation))
def test_a_transposed_operand_goes_with_a_rowwise_one_or_with_another(accumulation: Accumulation, target: str) -> None:
    rows = OperandRecipe(power_of_two=True)
    beside = OperandRecipe(power_of_two=True, transposed=True)
    both = OperandRecipe(scaling=Scaling.TENSORWISE, power_of_two=True, transposed=True)
    for gemm, pair in ((Gemm.DGRAD, (rows, beside)), (Gemm.WGRAD, (beside, rows)), (Gemm.WGRAD, (both, both))):
        assert SCALED_MM.unsupported_reason(GemmRequest(gemm, pair, accumulation, True, 4093, 13, 1, target)) is None


def test_the_models_own_gemm_always_runs() -> None:
    recipe = OperandRecipe(format=Format.E5M2, scaling=Scaling.BLOCKWISE_128X128)
    wanted = GemmRequest(Gemm.WGRAD, (recipe, recipe), Accumulation.FAST, False, 1, 1, 1, "h100")
    assert NATIVE.unsupported_reason(wanted) is None


@pytest.mark.slow
def test_kernels_and_measurements_need_torch_and_nothing_of_the_policy() -> None:
    code = (
        "import sys, loka.kernels.gemm.catalogue, loka.kernels.gemm.scaled_mm, loka.kernels.call_counters;"
        "import loka.numerics.metrics, loka.kernels.measurements.lookup;"
        "unwanted = ('pydantic', 'jinja2', 'yaml', 'fbgemm_gpu', 'mslk', 'torchao');"
        "print([m for m in sys.modules if m.startswith('loka.policy') or m.partition('.')[0] in unwanted])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "[]"
