"""Recorded static scales and plain transpositions on a Hopper GPU: bit for bit what the reference gives."""

from __future__ import annotations

import pytest
import torch

from loka.kernels.fused.norm.norm_spec import NormForward
from loka.numerics.quantize import FORMATS
from tests.support.gpu import ON_HOPPER
from tests.support.kernels.drawn_inputs import corners
from tests.support.kernels.fp8_codes import same_nan_of
from tests.support.kernels.quantized_cases import specs
from tests.support.kernels.recorded_cases import (
    CAST_TRANSPOSES,
    HOWS,
    TRANSPOSES,
    fused_cast_transposes,
    largest_of,
    new_record,
    scale_of,
)
from tests.support.kernels.rendered_cases import (
    arguments_of,
    exact_output,
    random_inputs,
    rounding_of,
    write_package,
)

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

WIDTHS = (13, 479, 2048, 8256)
BARE = [
    spec
    for width in WIDTHS
    for spec in specs(width, HOWS)
    if isinstance(spec, NormForward) and not (spec.norm or spec.activation)
]
BOTH = [both for width in (200, 479, 512, 2048) for both in fused_cast_transposes(width)]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(
        tmp_path_factory.mktemp("gpu") / "rendered_recorded_gpu", [*BARE, *CAST_TRANSPOSES, *TRANSPOSES, *BOTH]
    )


def same(package, spec, x) -> None:
    """Three launches leave what three calls of the reference do."""
    ours, theirs, scale = new_record("cuda"), new_record(), 256.0 * scale_of(spec)
    for _ in range(3):
        got = package.run(spec, x, scale.cuda(), ours)
        expected = package.run(spec, x.cpu(), scale, theirs)
    assert int(ours[0]) == int(theirs[0])
    assert largest_of(ours.cpu()) == largest_of(theirs)
    for name in spec.results:
        assert torch.equal(same_nan_of(got[name].cpu()), same_nan_of(expected[name])), name


@pytest.mark.parametrize("rows", [13, 4093])
@pytest.mark.parametrize("spec", BARE, ids=lambda spec: spec.function)
def test_rows_are_recorded(package, spec, rows):
    x = corners(rows, spec.width)
    same(package, spec, x)


@pytest.mark.parametrize("shape", [(17, 13), (4093, 479), (4096, 2048), (17, 8256)])
@pytest.mark.parametrize("spec", CAST_TRANSPOSES, ids=lambda spec: spec.function)
def test_both_copies_are_recorded(package, spec, shape):
    same(package, spec, corners(*shape))


@pytest.mark.parametrize("both", BOTH, ids=lambda both: both.function)
def test_kernels_that_write_as_is_and_transposed(package, both):
    for rows in (1, 17, 4093):
        inputs = random_inputs(rows, both.spec.width, torch.bfloat16, "cuda")
        tensors = arguments_of(both.spec, inputs)
        ours, theirs, scale = new_record("cuda"), new_record(), 16.0 * scale_of(both.spec)
        got = package.run(both, *tensors, scale.cuda(), ours)
        expected = package.run(both, *(tensor.cpu() for tensor in tensors), scale, theirs)
        exact = exact_output(both.spec, inputs).cpu()
        rounding = rounding_of(both.spec, inputs, exact.to(inputs.grad.device)).cpu()
        # Counted or not counted: values that are as large as the scale holds, but for the last bits of float32.
        either = ((exact.abs() - FORMATS[both.spec.how.format].max * scale).abs() <= rounding).sum()
        assert abs(int(ours[0]) - int(theirs[0])) <= either
        assert largest_of(ours.cpu()) == pytest.approx(largest_of(theirs), rel=1e-5)
        assert torch.equal(got["transposed"].view(torch.uint8), got["values"].view(torch.uint8).t())
        values, wanted = got["values"].float().cpu(), expected["values"].float()
        assert (values != wanted).float().mean() < 0.01
        assert ((values - wanted).abs() <= 0.13 * wanted.abs() + 2.0**-8 + rounding / scale).all()
        if "dadd" in got:
            total = got["dadd"].sum(0, keepdim=True).cpu()
            torch.testing.assert_close(total, expected["dadd"], rtol=1e-3, atol=1e-4 * float(wanted.abs().sum() + 1))


@pytest.mark.parametrize("shape", [(1, 13), (17, 13), (4093, 479), (4096, 2048), (17, 8256), (0, 24), (16384, 1)])
def test_transposed_copies(package, shape):
    x = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    others = [x, torch.randn(300, 200, device="cuda").to(torch.float8_e4m3fn), x]
    for spec in TRANSPOSES:
        got = package.run(spec, *others[: spec.count]).values()
        for ours, values in zip(got, others, strict=False):
            assert torch.equal(ours.view(torch.uint8), values.view(torch.uint8).t())
