"""Modes of quantization without a GPU: the table of what exists, its text, and its reference against the quantizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.errors import InputError
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.activations import ACTIVATIONS
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantization import Quantization
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import FORMATS, quantize
from tests.support.kernels.drawn_inputs import KINDS, check_mode, drawn_inputs, exact_result, last_arguments
from tests.support.kernels.quantized_cases import modes, plain, specs, table
from tests.support.kernels.rendered_cases import arguments_of, random_inputs, write_package

REFUSALS = (
    "does not quantize",
    "copy its input",
    "neither weight nor bias",
    "saves no statistics",
    "has add and weight",
)
WIDTHS = (13, 479, 512)
SCALINGS = {"rowwise": Scaling.ROWWISE, "blockwise": Scaling.BLOCKWISE_1X128, "tensorwise": Scaling.TENSORWISE}


def test_the_table_of_what_exists():
    rows = list(table(512))
    made = [row.spec for row in rows if row.spec is not None]
    reasons = {next(known for known in REFUSALS if known in row.refusal) for row in rows if row.refusal is not None}
    assert reasons == set(REFUSALS)
    # 17 modes: 4 scalings x 2 formats x divided or not, and the maximum. Each with every activation and without a norm,
    # with each norm, and with each of a LayerNorm's and an RMSNorm's affine forms.
    for how in modes():
        here = [spec for spec in made if spec.quantize and spec.how == how]
        assert {(spec.norm, spec.activation) for spec in here} == {
            (norm, activation)
            for norm in (None, "layer_norm", "rms_norm", "block_norm")
            for activation in (None, *ACTIVATIONS)
        }
    assert not [spec for spec in made if not spec.quantize and spec.how != Quantization()]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    every = [spec for width in WIDTHS for spec in specs(width)]
    alone = {plain(spec) for spec in every if spec.norm or spec.activation}
    return write_package(
        tmp_path_factory.mktemp("modes") / "rendered_modes", [*every, *sorted(alone, key=lambda spec: spec.function)]
    )


def exact(spec, arguments: list[Tensor], package) -> Tensor:
    """The float32 matrix that a spec quantizes."""
    if not (spec.norm or spec.activation):
        return arguments[0].float()
    if isinstance(spec, NormForward):
        return package.run(plain(spec), *arguments, torch.float32)["out"]
    return package.run(plain(spec), *arguments)["dx"]


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("heavy", [False, True])
def test_every_mode_is_the_quantizer_bit_for_bit(package, width, heavy):
    inputs = random_inputs(17, width, torch.float32, heavy=heavy)
    inputs.tensors["x"][3], inputs.grad[3] = 0.0, 0.0
    inputs.tensors["x"][4, 5], inputs.tensors["x"][6, 7] = torch.nan, torch.inf
    for spec in specs(width):
        how, arguments = spec.how, arguments_of(spec, inputs)
        y = exact(spec, arguments, package)
        finite = torch.where(y.isfinite(), y.abs(), 0.0)
        if how.scaling == "maximum":
            assert package.run(spec, *arguments)["amax"].tolist() == [finite.max().item()]
            continue
        if how.scaling == "static":
            scale = torch.full((1, 1), 2.0**-7 if how.power_of_two else 0.011)
            got = package.run(spec, *arguments, scale)
            quotient = (y / scale).clamp(-how.limit, how.limit)
            expected = torch.where(y.isfinite(), quotient, torch.nan).to(FORMATS[how.format].dtype)
            assert torch.equal(got["values"].view(torch.uint8), expected.view(torch.uint8))
            assert got["amax"].tolist() == [finite.max().item()]
            assert got["overflow"].dtype == torch.int32
            assert got["overflow"].tolist() == [int((finite / scale > how.limit).sum())]
            continue
        maxima = [torch.tensor([0.0, finite.max().item(), 0.0])] if how.scaling == "tensorwise" else []
        got = package.run(spec, *arguments, *maxima)
        expected = quantize(y, format=how.format, scaling=SCALINGS[how.scaling], power_of_two=how.power_of_two)
        assert torch.equal(got["scale"], expected.scale)
        assert torch.equal(got["values"].view(torch.uint8), expected.values.view(torch.uint8))


def test_known_scales_saturate_and_count():
    y = torch.tensor([[448.0, 449.0, -1e30, torch.inf], [torch.nan, 0.0, -448.0, 3e38]])
    values, amax, overflow = norm_reference.quantize_static(y, torch.ones(1, 1))
    assert values.float()[0, :3].tolist() == [448.0, 448.0, -448.0]
    assert values.float().isnan().tolist() == [[False, False, False, True], [True, False, False, False]]
    assert values.float()[1, 1:].tolist() == [0.0, -448.0, 448.0]
    assert (amax.item(), overflow.item()) == (pytest.approx(3e38), 3)
    wide, _, none = norm_reference.quantize_static(y[:, :2], torch.ones(1, 1), format="e5m2")
    assert wide.dtype == torch.float8_e5m2
    assert none.item() == 0


def test_without_rows(package):
    inputs = random_inputs(0, 512, torch.float32)
    for spec in specs(512):
        last = [torch.ones(1, 1) if name == "scale" else torch.zeros(1) for name in spec.how.parameters]
        got = package.run(spec, *arguments_of(spec, inputs), *last)
        for name in ("amax", "overflow"):
            assert name not in got or got[name].tolist() == [0]


@pytest.mark.parametrize("scale", [torch.ones(2, 1), torch.ones(1, 1, dtype=torch.float64)])
def test_a_known_scale_is_one_float32(package, scale):
    spec = NormForward(512, None, False, False, 1e-5, None, False, True, True, how=Quantization("static"))
    with pytest.raises(InputError, match="one float32 number"):
        package.run(spec, torch.ones(3, 512), scale)


def test_names():
    how = Quantization("static", Format.E5M2, power_of_two=False)
    backward = NormBackward(512, "layer_norm", True, True, 1e-5, "silu", False, True, how=how)
    assert backward.function == "layer_norm_silu_backward_e5m2_static_divided"
    assert backward.parameters == ("grad", "x", "weight", "bias", "mean", "rstd", "scale")
    assert backward.results == ("values", "amax", "overflow", "dweight", "dbias")
    with pytest.raises(InputError, match="no kernel quantizes 'columnwise'"):
        Quantization("columnwise")
    with pytest.raises(InputError, match="neither format nor scale"):
        Quantization("maximum", power_of_two=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_mode_against_float64(package, kind, width):
    inputs = drawn_inputs(kind, 33, width, torch.bfloat16)
    for spec in specs(width):
        y, noise = exact_result(spec, inputs)
        last = last_arguments(spec, y)
        check_mode(package.run(spec, *arguments_of(spec, inputs), *last), spec, y, noise, last)
