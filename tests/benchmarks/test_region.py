"""The regions that are measured: what they are, and what is generated for them."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.packages import StudyWorkshop
from benchmarks.region.region import (
    DEFAULT_SHAPES,
    Form,
    Shape,
    build,
    chain_of,
    parse_shape,
    subject,
)
from benchmarks.region.region_bound import RooflineChain, chain_backward_bytes, chain_forward_bytes, chain_us
from benchmarks.roofline import GemmMath, Peaks, bytes_us, peaks_of, product_us
from benchmarks.steps import StepWork, learned, make_work
from benchmarks.variants import VARIANTS, Variant
from loka.devices.targets import DEVICES
from loka.errors import InputError, LokaError

BY_NAME = {variant.name: variant for variant in VARIANTS}
ROUND = Peaks(bandwidth=1e12, flops={GemmMath.BF16: 1e14, GemmMath.FP8: 2e14, GemmMath.FP8_FAST: 4e14})
H100 = peaks_of("NVIDIA H100 80GB HBM3")
NORMS = RooflineChain(rows=1000, widths=(100, 200), before=True, after=True)
BARE = RooflineChain(rows=1000, widths=(100, 200, 300), before=False, after=False)
SMALL = Shape(m=64, n=256, k=128)


def work_of(shape: Shape) -> StepWork:
    torch.manual_seed(0)
    x = torch.randn(shape.m, shape.k)
    return make_work("a region", build(Form.LAYER_NORM, shape.k, shape.n), (x,), (True,), 10)


def shapes_of(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in model.parameters()]


def test_the_layer_norm_region_is_the_baselines() -> None:
    torch.manual_seed(0)
    region = build(Form.LAYER_NORM, k=128, n=256)
    assert shapes_of(region) == [(128,), (128,), (256, 128), (256,), (256,)]
    x = torch.randn(5, 128)
    weight = next(parameter for parameter in region.parameters() if parameter.dim() == 2)
    y = nn.functional.layer_norm(nn.functional.layer_norm(x, (128,)) @ weight.t(), (256,))
    torch.testing.assert_close(region(x), torch.sigmoid(y))


def test_the_block_norm_region_has_two_weights_alone() -> None:
    torch.manual_seed(0)
    region = build(Form.BLOCK_NORM, k=128, n=512)
    assert shapes_of(region) == [(512, 128), (512, 512)]
    x = torch.randn(5, 128)
    up, down = region.parameters()
    y = (x @ up.t()).unflatten(-1, (2, 256))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(region(x), nn.functional.hardswish(y.flatten(-2)) @ down.t(), rtol=1e-4, atol=1e-5)


def test_chains_follow_the_forms() -> None:
    assert chain_of(Form.LAYER_NORM, SMALL) == RooflineChain(64, (128, 256), before=True, after=True)
    assert chain_of(Form.BLOCK_NORM, SMALL) == RooflineChain(64, (128, 256, 256), before=False, after=False)


def test_every_fp8_bound_of_the_seven_is_below_bf16s() -> None:
    peaks = peaks_of("NVIDIA H100 80GB HBM3")
    for shape in DEFAULT_SHAPES:
        for form in Form:
            for training in (True, False):
                times = [chain_us(chain_of(form, shape), p, training, peaks) for p in (GemmMath.FP8, GemmMath.BF16)]
                if form is Form.LAYER_NORM or shape.n >= 1024:  # below, quantizing costs the other form more bytes
                    assert times[0] < times[1], (form, shape, training)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.generated], ids=lambda variant: variant.name)
def test_a_package_is_generated_for_the_layer_norm_region(variant: Variant) -> None:
    with StudyWorkshop() as workshop:
        made = workshop.make(subject(Form.LAYER_NORM, SMALL), variant, partial(learned, work_of(SMALL)))
        (site,) = made.plan.sites
        assert site.region == ("layer_norm", "linear", "layer_norm", "sigmoid")
        assert [gemm.fp8 for gemm in site.gemms] == [variant.precision.is_fp8] * 3
        assert made.plan.batch_size == 64
        accumulations = {gemm.accumulation for gemm in site.gemms if gemm.fp8}
        asked = {"fast" if variant.name.endswith("fast") else "precise"}
        assert accumulations == (asked if site.fp8 else set())
        assert "known" in Path(made.package.kernels.__file__).read_text() or not variant.known


def test_known_scales_are_those_of_the_work_itself() -> None:
    work = work_of(SMALL)
    seen: list[torch.Tensor] = []
    with StudyWorkshop() as workshop:
        made = workshop.make(subject(Form.LAYER_NORM, SMALL), BY_NAME["loka-fp8-known"], partial(learned, work))
        model = copy.deepcopy(work.base).bfloat16()
        hook = model.linear.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        model(*work.example(torch.bfloat16, training=True).args)
        hook.remove()
        (site,) = made.plan.sites
        known = [operand.amax for gemm in site.gemms for operand in gemm.operands or ()]
        assert known[0] == known[5] == seen[0].abs().max()
        assert known[1] is known[3] is None  # the weight's
        assert known[2] == known[4]
        patch = made.package.apply(model)
        with torch.no_grad():
            model(*work.example(torch.bfloat16, training=True).args)
        assert patch.overflows() == ()


def test_known_scales_without_maxima_are_refused() -> None:
    with StudyWorkshop() as workshop, pytest.raises(LokaError, match="needs the maxima"):
        workshop.make(subject(Form.LAYER_NORM, SMALL), BY_NAME["loka-fp8-known"])


@pytest.mark.parametrize(
    ("form", "last"), [(Form.BLOCK_NORM, "hardswish"), (Form.BATCH_NORM, "relu"), (Form.DROPOUT, "dropout")]
)
def test_both_weights_of_a_region_with_two_run_in_fp8_with_dgrad_as_one_chain(form: Form, last: str) -> None:
    with StudyWorkshop() as workshop:
        made = workshop.make(subject(form, SMALL), BY_NAME["loka-fp8"])
        assert [[gemm.fp8 for gemm in site.gemms] for site in made.plan.sites] == [[True] * 3] * 2
        first, second = (site.region for site in made.plan.sites)
        assert (first[0], first[-1], second) == ("linear", last, ())


def test_packages_are_planned_for_the_device_that_measures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.packages.device_here", lambda: DEVICES["h200"])
    with StudyWorkshop() as workshop:
        plan = workshop.make(subject(Form.LAYER_NORM, SMALL), BY_NAME["loka-bf16"]).plan
    assert plan.target == "h200"


def test_shapes_are_m_n_k() -> None:
    assert parse_shape("8192,2048,1024") == Shape(m=8192, n=2048, k=1024)
    assert parse_shape("8192x2048") == Shape(m=8192, n=2048, k=2048)
    assert str(Shape(1, 2, 3)) == "1 x 2 x 3"


@pytest.mark.parametrize("text", ["8192", "1,2,3,4", "a,b", "0,512", "-1,512", "512,", "1.5,2"])
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(InputError, match="is no shape; write M,N,K"):
        parse_shape(text)


def test_passes_of_a_chain_in_bf16() -> None:
    # LayerNorm reads and writes x; LayerNorm and sigmoid read and write y
    assert chain_forward_bytes(NORMS, GemmMath.BF16, training=True) == 1000 * 100 * 4 + 1000 * 200 * 4
    # the gradient and y in, dy out; then the gradient and x in, dx out
    assert chain_backward_bytes(NORMS, GemmMath.BF16) == 1000 * 200 * 6 + 1000 * 100 * 6


def test_passes_of_a_chain_in_fp8() -> None:
    weights = 100 * 200 * (2 + 1 + 1)
    training = 1000 * 100 * (2 + 1 + 1) + weights + 1000 * 200 * 4
    assert chain_forward_bytes(NORMS, GemmMath.FP8, training=True) == training
    assert chain_forward_bytes(NORMS, GemmMath.FP8, training=False) == 1000 * 100 * 3 + 1000 * 200 * 4
    assert chain_backward_bytes(NORMS, GemmMath.FP8) == 1000 * 200 * (4 + 2) + 1000 * 100 * 6


def test_a_chain_without_norms_at_its_ends_quantizes_there_in_fp8_alone() -> None:
    assert chain_forward_bytes(BARE, GemmMath.BF16, training=True) == 1000 * 200 * 4
    assert chain_backward_bytes(BARE, GemmMath.BF16) == 1000 * 200 * 6
    assert chain_forward_bytes(BARE, GemmMath.FP8, training=False) == 1000 * (100 + 200) * 3
    assert chain_backward_bytes(BARE, GemmMath.FP8) == 1000 * 300 * (2 + 2) + 1000 * 200 * (4 + 2)


def test_float32_tensors_have_four_bytes() -> None:
    assert chain_forward_bytes(NORMS, GemmMath.TF32, training=True) == 1000 * 100 * 8 + 1000 * 200 * 8


def test_a_chain_is_the_sum_of_its_products_and_passes() -> None:
    forward = product_us(1000, 200, 100, GemmMath.BF16, ROUND)
    passes = bytes_us(chain_forward_bytes(NORMS, GemmMath.BF16, training=False), ROUND)
    assert chain_us(NORMS, GemmMath.BF16, training=False, peaks=ROUND) == pytest.approx(forward + passes)
    both = forward + product_us(1000, 100, 200, GemmMath.BF16, ROUND) + product_us(200, 100, 1000, GemmMath.BF16, ROUND)
    moved = chain_forward_bytes(NORMS, GemmMath.BF16, training=True) + chain_backward_bytes(NORMS, GemmMath.BF16)
    assert chain_us(NORMS, GemmMath.BF16, training=True, peaks=ROUND) == pytest.approx(both + bytes_us(moved, ROUND))


def test_the_large_region_is_bound_by_ten_passes_and_three_products() -> None:
    chain = RooflineChain(16384, (2048, 2048), before=True, after=True)
    tensor = 16384 * 2048 * 2  # 67 MB
    expected = 3 * 2 * 16384 * 2048 * 2048 / 1277e12 + (10 * tensor + 4 * 2048 * 2048) / 2.43e12
    assert chain_us(chain, GemmMath.FP8, training=True, peaks=H100) == pytest.approx(1e6 * expected)
