"""Rendered products on a Hopper GPU: every tiling against float64; corners; graphs and the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.kernels.call_counters import new_counters
from loka.kernels.fused.triton_gemm.gemm_spec import Epilogue, GemmSpec, GroupedGemm, TiledGemm
from loka.kernels.fused.triton_gemm.gemm_tiling import candidates
from loka.kernels.gemm.scaled_mm import scaled_mm
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import Quantized, dequantize, quantize
from tests.support.gpu import ON_HOPPER
from tests.support.kernels.gemm_cases import (
    EPILOGUES,
    FAST,
    NORM,
    PRECISE,
    ROWS,
    Case,
    blocked,
    case,
    exact_epilogue,
    write_products,
)

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

OUT = Epilogue(add=True, out="float32")
RELU = Epilogue(activation="relu", out="float32")
SPECS: list[GemmSpec] = [
    *[
        TiledGemm(n, k, accumulation=a)
        for n, k in ((512, 512), (24, 512), (1, 3456), (624, 8256))
        for a in (FAST, PRECISE)
    ],
    *[TiledGemm(n, k, operands) for n, k in ((8256, 479), (24, 13), (1, 13)) for operands in ("e4m3", "bfloat16")],
    *[TiledGemm(n, k, "bfloat16", epilogue=OUT) for n, k in ((512, 512), (24, 512))],
    TiledGemm(512, 512, scaling_a=Scaling.TENSORWISE, scaling_b=Scaling.TENSORWISE, epilogue=OUT),
    *[TiledGemm(512, 256, epilogue=epilogue) for epilogue in EPILOGUES[1:]],
    *[TiledGemm(512, 512, operands, FAST, epilogue=e) for operands in ("e4m3", "bfloat16") for e in (NORM, ROWS)],
    *[TiledGemm(n, k, epilogue=e) for n, k in ((24, 13), (479, 512), (300, 479)) for e in (NORM, ROWS)],
    *[TiledGemm(512, k, epilogue=blocked(block)) for block in (64, 128, 256) for k in (512, 479)],
    GroupedGemm(((64, 512), (128, 256), (24, 64), (1, 32))),
    GroupedGemm(((512, 512), (24, 479), (1, 13)), "bfloat16"),
]
RELUS, GROUP = TiledGemm(512, 512, epilogue=RELU), SPECS[-2]
CASES = [(spec, index) for spec in SPECS for index in range(len(candidates(spec)))]
M = (1, 17, 4093, 4096)


def share_of(spec: GemmSpec, heavy: bool) -> float:
    """The error of a sum, as a share of the sum of absolute products.

    The tensor core adds 32 products of e4m3 at a time, and cuts each of them and the sum so far to 13 bits: over all of
    a fast contraction, over 128 elements of a precise one. Products of bfloat16 come 16 at a time, and the sum is cut
    to float32. Sums of mixed signs are small beside the sum of absolute products, unless an outlier rules them.
    """
    contracted = max(k for _, k in shapes_of(spec))
    if spec.operands != "e4m3":
        return 2.0**-23 * max(32, -(-contracted // 16))
    steps = -(-contracted // 32) if spec.accumulation is FAST else 4
    return 2.0**-13 * (steps + 2) * (2.0 if heavy else 0.25)


def shapes_of(spec: GemmSpec) -> tuple[tuple[int, int], ...]:
    return spec.shapes if isinstance(spec, GroupedGemm) else ((spec.n, spec.k),)


def check_product(got: Tensor, exact: Tensor, size: Tensor, share: float) -> None:
    """Within the rounding of sums and of the result's dtype."""
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= share * size + torch.finfo(got.dtype).eps * exact.abs() + 1e-30).all()


def noise_of(share: float, made: Case, exact: dict[str, Tensor]) -> Tensor:
    """What rounding of the sums can move an element of the result by, largest of a row: (M, 1)."""
    size = made.sizes[0]
    if "rstd" in exact:
        rstd = exact["rstd"].reshape(size.shape[0], -1)
        size = size * rstd.amax(1, keepdim=True)
    if "weight" in made.vectors:
        size = size * made.vectors["weight"].double().abs().amax()
    return 4.0 * share * size.amax(1, keepdim=True)  # a norm's statistics move too


def check_gemm(spec: TiledGemm, got: dict[str, Tensor], made: Case, share: float) -> None:
    exact = exact_epilogue(spec.epilogue, made.products[0], made.vectors)
    y, noise = exact["y"], noise_of(share, made, exact)
    if spec.epilogue.quantize:
        scale = got["scale"].double()
        usual = quantize(y, format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True).scale.double()
        size = y.abs().amax(1, keepdim=True)
        assert ((scale / usual).log2().abs() <= 1.0)[noise < 0.1 * size].all()
        value = dequantize(Quantized(got["values"], got["scale"])).double()
        assert ((value - y).abs() <= 2.0**-4 * y.abs() + 2.0**-10 * scale + noise).all()
        assert got["scale_max"].max() == got["scale"].max()
        assert got["scale_max"].min() >= 0.0
    elif spec.epilogue.norm is None and spec.epilogue.activation is None:
        check_product(got["out"], y, made.sizes[0] + y.abs(), share)
    else:
        limits = torch.finfo(got["out"].dtype)
        fits = y.abs() < 0.99 * limits.max  # float16 has no larger values
        assert ((got["out"].double() - y).abs() <= limits.eps * y.abs() + noise + 1e-6)[fits].all()
        assert not got["out"].isnan().any()
    if spec.epilogue.keep:
        check_product(got["product"], made.products[0], made.sizes[0], share)
    if "mean" in spec.statistics:
        assert ((got["mean"] - exact["mean"]).abs() <= share * made.sizes[0].amax(1) + 1e-6).all()
    if "rstd" in spec.statistics:
        assert got["rstd"].isfinite().all()


@pytest.mark.parametrize(("spec", "index"), CASES, ids=lambda value: getattr(value, "function", str(value)))
def test_every_tiling_against_float64(spec, index, tmp_path):
    package = write_products(tmp_path / f"gpu_{spec.function}_{index}", [spec], candidates(spec)[index])
    for m in M:
        for heavy in (False, True):
            made = case(spec, m, "cuda", heavy, seed=m)
            share = share_of(spec, heavy)
            got = package.run(spec, *made.arguments)
            if isinstance(spec, TiledGemm):
                check_gemm(spec, got, made, share)
                continue
            for name, exact, size in zip(spec.results, made.products, made.sizes, strict=True):
                check_product(got[name], exact, size, share)


def test_precise_sums_are_as_good_as_the_librarys(tmp_path):
    """Long rows of one sign, where the tensor core's own sums lose the most."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(256, 3456, generator=generator).cuda() for _ in range(2))
    qa, qb = (quantize(x, format=Format.E4M3, scaling=Scaling.TENSORWISE, power_of_two=True) for x in (a, b))
    exact = dequantize(qa).double() @ dequantize(qb).double().T
    arguments = (qa.values, qa.scale, qb.values, qb.scale)
    errors = {}
    for accumulation in (FAST, PRECISE):
        spec = TiledGemm(256, 3456, "e4m3", accumulation, Scaling.TENSORWISE, Scaling.TENSORWISE, RELU)
        package = write_products(tmp_path / f"sums_{accumulation.value}", [spec])
        errors[accumulation] = ((package.run(spec, *arguments)["out"] - exact) / exact).abs().max().item()
    library = scaled_mm(*arguments, "tensorwise", "tensorwise", torch.float32, False, new_counters(1))
    assert errors[PRECISE] <= max(2.0 * ((library - exact) / exact).abs().max().item(), 2.0**-11)
    assert errors[PRECISE] < errors[FAST]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_products(tmp_path_factory.mktemp("gemm_gpu") / "gemm_gpu_package", [*SPECS, RELUS])


FEW = [SPECS[0], TiledGemm(24, 13), *[s for s in SPECS if isinstance(s, TiledGemm) and s.epilogue in (NORM, ROWS)][:4]]


@pytest.mark.parametrize("spec", FEW, ids=lambda spec: spec.function)
def test_what_is_not_finite_stays_in_its_row(package, spec):
    """A NaN in a row of a, or an infinite scale (e4m3 has no infinity), reaches that row alone."""
    made = case(spec, 300, "cuda")
    whole = package.run(spec, *made.arguments)
    a, b, rest = made.arguments[0].clone(), None, made.arguments[1:]
    a[7, 3] = torch.nan
    if spec.operands == "e4m3":
        scale = rest[0].clone()
        scale[9] = torch.inf
        rest, b = (scale, *rest[1:]), 9
    got = package.run(spec, *([a, *rest]))
    touched = [7] if b is None else [7, b]
    others = [row for row in range(300) if row not in touched]
    name = "values" if spec.epilogue.quantize else "out"
    assert torch.equal(got[name][others].float(), whole[name][others].float())
    assert got[name][7].float().isnan().all()


def test_zero_rows_give_zeros(package):
    a, scale_a, b, scale_b = case(RELUS, 300, "cuda").arguments
    a = torch.zeros_like(a.view(torch.uint8)).view(a.dtype)
    assert package.run(RELUS, a, scale_a, b, scale_b)["out"].abs().max() == 0.0


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.function)
def test_without_rows(package, spec):
    made = case(spec, 0, "cuda")
    for name, result in package.run(spec, *made.arguments).items():
        if result.numel() and not isinstance(spec, GroupedGemm):  # a group's other products have rows
            assert result.float().abs().max() == 0.0, name


def test_odd_addresses_and_strides(package):
    for spec in (SPECS[0], GROUP):
        made = case(spec, 64, "cuda")
        expected = package.run(spec, *made.arguments)
        a = made.arguments[0]
        room = torch.zeros(a.numel() + 1, dtype=torch.uint8, device="cuda")
        skewed = room[1:].view(a.dtype).view(a.shape)
        skewed.copy_(a)
        strided = a.view(torch.uint8).repeat_interleave(2, dim=1)[:, ::2].view(a.dtype) if a.shape[1] > 1 else a
        for other in (skewed, strided):
            got = package.run(spec, other, *made.arguments[1:])
            assert all(torch.equal(got[name], result) for name, result in expected.items())


def step_of(package):
    """A function of a forward with its norm and a group of products."""
    forward = getattr(package.fused, TiledGemm(512, 512, accumulation=FAST, epilogue=NORM).function)
    group = getattr(package.fused, GROUP.function)

    def step(*arguments: Tensor) -> tuple[Tensor, ...]:
        out, product, mean, rstd = forward(*arguments[:7])
        return out.float() + 1.0, product, mean, rstd, *group(*arguments[7:])

    return step


def step_arguments(m: int, seed: int) -> list[Tensor]:
    forward = TiledGemm(512, 512, accumulation=FAST, epilogue=NORM)
    return [*case(forward, m, "cuda", seed=seed).arguments, *case(GROUP, m, "cuda", seed=seed).arguments]


def test_a_graph_replays_on_new_data_without_synchronising(package):
    step, static, other = step_of(package), step_arguments(256, 0), step_arguments(256, 1)
    step(*static)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(*static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*static)
    for place, fresh in zip(static, other, strict=True):
        place.copy_(fresh)
    graph.replay()
    for replayed, eager in zip(results, step(*static), strict=True):
        assert torch.equal(replayed, eager)


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_under_the_compiler(package, dynamic):
    step = step_of(package)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for rows in (256, 17, 4093) if dynamic else (256,):
        arguments = step_arguments(rows, 0)
        for ours, eager in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(ours, eager)
