"""Rendered products on the CPU: references against float64, shapes for the compiler, corners, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.errors import InputError
from loka.kernels.fused.triton_gemm import gemm_launch
from loka.kernels.fused.triton_gemm.gemm_spec import GroupedGemm, TiledGemm
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import Quantized, dequantize, quantize
from tests.support.kernels.gemm_cases import EPILOGUES, FAST, blocked, case, exact_epilogue, write_products

EPILOGUED = [
    *[TiledGemm(48, k, operands, epilogue=e) for e in EPILOGUES for k, operands in ((13, "e4m3"), (64, "bfloat16"))],
    *[TiledGemm(512, 32, epilogue=blocked(block)) for block in (64, 128, 256)],
    TiledGemm(24, 479, accumulation=FAST, scaling_a=Scaling.TENSORWISE),
    TiledGemm(24, 479, scaling_b=Scaling.TENSORWISE),
]
GROUPED = [GroupedGemm(((24, 13), (1, 479)), operands, out="float32") for operands in ("e4m3", "bfloat16")]
ROWS = (1, 17, 0)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_products(tmp_path_factory.mktemp("gemms") / "gemm_reference_cases", [*EPILOGUED, *GROUPED])


def close(actual: Tensor, exact: Tensor, allowed: float) -> None:
    """Within a share of the row's largest element."""
    assert actual.shape == exact.shape
    if exact.numel():
        size = exact.abs().amax(-1, keepdim=True) if exact.dim() > 1 else exact.abs()
        assert ((actual.double() - exact).abs() <= allowed * size + 1e-6).all()


def rounding(dtype: torch.dtype) -> float:
    return 2e-5 + torch.finfo(dtype).eps


@pytest.mark.parametrize("spec", EPILOGUED, ids=lambda spec: spec.function)
def test_epilogues_against_float64(package, spec):
    for m in ROWS:
        made = case(spec, m)
        got = package.run(spec, *made.arguments)
        exact = exact_epilogue(spec.epilogue, made.products[0], made.vectors)
        if spec.epilogue.quantize:
            assert got["values"].dtype == torch.float8_e4m3fn
            assert got["scale_max"].max() == (got["scale"].max() if m else 0.0)
            value = dequantize(Quantized(got["values"], got["scale"])).double()
            usual = quantize(exact["y"], format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True).scale
            assert ((got["scale"] / usual).log2().abs() <= 1.0).all()
            size = exact["y"].abs()
            noise = 1e-5 * (size.amax(1, keepdim=True) if m else size)
            assert ((value - exact["y"]).abs() <= 2.0**-4 * size + 2.0**-10 * got["scale"].double() + noise).all()
        else:
            close(got["out"], exact["y"], rounding(got["out"].dtype))
        if spec.epilogue.keep:
            close(got["product"], made.products[0], rounding(torch.bfloat16))
        for name in spec.statistics:
            close(got[name], exact[name], 1e-4)


@pytest.mark.parametrize("spec", GROUPED, ids=lambda spec: spec.function)
def test_groups_against_float64(package, spec):
    for m in ROWS:
        made = case(spec, m)
        got = package.run(spec, *made.arguments)
        for name, exact, size in zip(spec.results, made.products, made.sizes, strict=True):
            assert got[name].shape == exact.shape
            assert ((got[name] - exact).abs() <= 1e-5 * size).all()


@pytest.mark.parametrize("spec", [*EPILOGUED, *GROUPED], ids=lambda spec: spec.function)
def test_shapes_for_the_compiler(package, spec):
    for m in ROWS:
        made = case(spec, m)
        real = package.run(spec, *made.arguments)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = package.run(spec, *(mode.from_tensor(argument) for argument in made.arguments))
        for name, result in real.items():
            assert (fake[name].shape, fake[name].dtype) == (result.shape, result.dtype)
            assert fake[name].stride() == result.stride()


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_without_breaks(package, dynamic):
    for spec in (EPILOGUED[0], GROUPED[0]):
        call = getattr(package.fused, spec.function)

        def run(*arguments: Tensor, call=call) -> Tensor:
            results = call(*arguments)
            return (results if isinstance(results, Tensor) else results[0]).float() + 1.0

        compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for m in (17, 33, 48) if dynamic else (17,):
            arguments = case(spec, m).arguments
            assert torch.equal(compiled(*arguments), run(*arguments))


def test_wrong_shapes_are_refused(package):
    gemm, group = EPILOGUED[0], GROUPED[0]
    a, scale_a, b, scale_b, add = case(gemm, 17).arguments
    with pytest.raises(InputError, match="takes a of shape"):
        package.run(gemm, a[:, :5], scale_a, b, scale_b, add)
    with pytest.raises(InputError, match="takes b of shape"):
        package.run(gemm, a, scale_a, b[:5], scale_b, add)
    with pytest.raises(InputError, match="takes scale_a of shape"):
        package.run(gemm, a, scale_a[:1], b, scale_b, add)
    a, scale_a, b, scale_b, *others = case(group, 17).arguments
    with pytest.raises(InputError, match="takes b_0 of shape"):
        package.run(group, a, scale_a, b[:1], scale_b, *others)
    with pytest.raises(InputError, match="takes a_0 of shape"):
        package.run(group, a[0], scale_a, b, scale_b, *others)


def test_addresses_that_are_not_aligned_are_copied():
    base = torch.zeros(64, dtype=torch.uint8)
    skewed = base[16 - base.data_ptr() % 16 + 1 :][:32].view(2, 16)
    assert skewed.data_ptr() % 16
    assert gemm_launch.aligned(skewed).data_ptr() % 16 == 0
    whole = torch.zeros(2, 16)
    assert gemm_launch.aligned(whole).data_ptr() == whole.data_ptr()
    assert gemm_launch.aligned(whole.t()).is_contiguous()
    assert gemm_launch.with_rows(whole[:0]).shape == (1, 16)
