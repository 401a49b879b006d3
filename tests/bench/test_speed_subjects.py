"""The regions that are measured: what they are, and what is generated for them."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from loka.bench.speed import region_speed
from loka.bench.speed.region_speed import DEFAULT_SHAPES, Form, Shape, build, chain_of
from loka.bench.speed.roofline import RooflineChain
from loka.bench.speed.steps import StepWork, fresh_inputs, make_work
from loka.bench.subjects.calibration import learned
from loka.bench.subjects.packages import Workshop
from loka.bench.subjects.variants import VARIANTS, Variant
from loka.devices.targets import DEVICES
from loka.errors import LokaError

BY_NAME = {variant.name: variant for variant in VARIANTS}
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
    from loka.bench.speed.roofline import chain_us, peaks_of
    from loka.bench.subjects.variants import Precision

    peaks = peaks_of("NVIDIA H100 80GB HBM3")
    for shape in DEFAULT_SHAPES:
        for form in Form:
            for training in (True, False):
                times = [chain_us(chain_of(form, shape), p, training, peaks) for p in (Precision.FP8, Precision.BF16)]
                if form is Form.LAYER_NORM or shape.n >= 1024:  # below, quantizing costs the other form more bytes
                    assert times[0] < times[1], (form, shape, training)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.generated], ids=lambda variant: variant.name)
def test_a_package_is_generated_for_the_layer_norm_region(variant: Variant) -> None:
    with Workshop() as workshop:
        made = workshop.make(region_speed.subject(Form.LAYER_NORM, SMALL), variant, partial(learned, work_of(SMALL)))
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
    with Workshop() as workshop:
        made = workshop.make(
            region_speed.subject(Form.LAYER_NORM, SMALL), BY_NAME["loka-fp8-known"], partial(learned, work)
        )
        model = copy.deepcopy(work.base).bfloat16()
        hook = model.linear.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        model(*fresh_inputs(work, torch.bfloat16, training=True))
        hook.remove()
        (site,) = made.plan.sites
        known = [operand.amax for gemm in site.gemms for operand in gemm.operands or ()]
        assert known[0] == known[5] == seen[0].abs().max()
        assert known[1] is known[3] is None  # the weight's
        assert known[2] == known[4]
        patch = made.package.apply(model)
        with torch.no_grad():
            model(*fresh_inputs(work, torch.bfloat16, training=True))
        assert patch.overflows() == ()


def test_known_scales_without_maxima_are_refused() -> None:
    with Workshop() as workshop, pytest.raises(LokaError, match="needs the maxima"):
        workshop.make(region_speed.subject(Form.LAYER_NORM, SMALL), BY_NAME["loka-fp8-known"])


def test_both_weights_of_the_block_norm_region_run_in_fp8_with_dgrad() -> None:
    with Workshop() as workshop:
        made = workshop.make(region_speed.subject(Form.BLOCK_NORM, SMALL), BY_NAME["loka-fp8"])
        assert [[gemm.fp8 for gemm in site.gemms] for site in made.plan.sites] == [[True] * 3] * 2


def test_packages_are_planned_for_the_device_that_measures_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loka.bench.subjects.packages.device_here", lambda: DEVICES["h200"])
    with Workshop() as workshop:
        plan = workshop.make(region_speed.subject(Form.LAYER_NORM, SMALL), BY_NAME["loka-bf16"]).plan
    assert plan.target == "h200"
