"""Kernels that record what a static scale does not hold, without a GPU: text, reference, interpreter, sm_90."""

from __future__ import annotations

import re

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused.matrix_kernels import CastTranspose, Transpose
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.fused_cast_transpose import FusedCastTranspose
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantization import Quantization
from loka.numerics.enums import Format
from tests.support.kernels.ptx_registers import unset_halves
from tests.support.kernels.quantized_cases import CAST_TRANSPOSES as UNRECORDED
from tests.support.kernels.recorded_cases import (
    CAST_TRANSPOSES,
    HOWS,
    TRANSPOSES,
    fused_cast_transposes,
    largest_of,
    new_record,
    recorded,
    scale_of,
    unrecorded,
)
from tests.support.kernels.rendered_cases import arguments_of, random_inputs, write_package
from tests.support.pairwise import fields_of, pairwise

WIDTHS = (13, 512)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    norms = [spec for width in WIDTHS for spec in recorded(width)]
    both = [spec for width in WIDTHS for spec in fused_cast_transposes(width)]
    alone = [unrecorded(each.spec) for each in both if unrecorded(each.spec) not in map(unrecorded, norms)]
    every = [*norms, *map(unrecorded, norms), *CAST_TRANSPOSES, *UNRECORDED, *TRANSPOSES, *both, *alone]
    return write_package(tmp_path_factory.mktemp("recorded") / "rendered_recorded", every)


def test_names_and_schema(package):
    how = Quantization("static", Format.E5M2, power_of_two=False, overflow_stats=True)
    spec = NormForward(512, "layer_norm", True, True, 1e-5, "silu", False, True, True, how=how)
    assert spec.function == "layer_norm_silu_e5m2_static_counted_divided"
    assert spec.parameters == ("x", "weight", "bias", "scale", "overflow_stats")
    assert spec.results == ("values", "mean", "rstd")
    assert CastTranspose(HOWS[0]).results == ("values", "transposed")
    for one in (recorded(512)[0], CAST_TRANSPOSES[0]):
        arguments = getattr(package.fused, one.function).overload._schema.arguments
        written = [argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write]
        assert written == ["overflow_stats"]
    with pytest.raises(InputError, match="tensorwise is none"):
        Quantization("tensorwise", overflow_stats=True)
    with pytest.raises(InputError, match="1 to 3 operands"):
        Transpose(4)


@pytest.mark.parametrize("width", WIDTHS)
def test_values_and_counts_are_those_that_come_back_otherwise(package, width):
    for rows, heavy in ((17, False), (33, True)):
        inputs = random_inputs(rows, width, torch.float32, heavy=heavy)
        inputs.tensors["x"][3], inputs.grad[3] = 0.0, 0.0
        inputs.tensors["x"][4, 5], inputs.tensors["x"][6, 7] = torch.nan, torch.inf
        for spec in recorded(width):
            record, scale = new_record(), scale_of(spec)
            for _ in range(2):
                got = package.run(spec, *arguments_of(spec, inputs), scale, record)
            expected = package.run(unrecorded(spec), *arguments_of(spec, inputs), scale)
            for name in spec.results:
                ours, theirs = (found[name].contiguous().view(torch.uint8) for found in (got, expected))
                assert torch.equal(ours, theirs), (spec, name)
            assert record[0] == 2 * expected["overflow"].sum()
            assert largest_of(record) == expected["amax"].max()


@pytest.mark.parametrize("width", WIDTHS)
def test_kernels_that_write_as_is_and_transposed(package, width):
    inputs = random_inputs(33, width, torch.float32)
    inputs.tensors["x"][3], inputs.grad[3] = 0.0, 0.0
    inputs.tensors["x"][4, 5], inputs.tensors["x"][6, 7] = torch.nan, torch.inf
    for both in fused_cast_transposes(width):
        record, scale, spec = new_record(), scale_of(both.spec), both.spec
        got = package.run(both, *arguments_of(spec, inputs), scale, record)
        expected = package.run(unrecorded(spec), *arguments_of(spec, inputs), scale)
        assert both.results == ("values", "transposed", *spec.results[1:])
        for name in spec.results:
            ours, theirs = (found[name].contiguous().view(torch.uint8) for found in (got, expected))
            assert torch.equal(ours, theirs), (both, name)
        assert torch.equal(got["transposed"].view(torch.uint8), got["values"].view(torch.uint8).t())
        assert record[0] == expected["overflow"].sum()
        assert largest_of(record) == expected["amax"].max()


def test_what_a_tile_is_not_enough_for():
    how = HOWS[0]
    for spec in (
        NormForward(512, "layer_norm", True, True, 1e-5, "silu", False, True, True, how=how),
        NormForward(1024, "block_norm", False, False, 1e-5, None, False, True, False, block=1024, how=how),
        NormForward(512, None, False, False, 1e-5, None, True, True, False, residual=True, how=how),
        NormBackward(
            512, None, False, False, 1e-5, "relu", False, True, residual_grad_in=True, residual_grad_out=True, how=how
        ),
        NormForward(512, None, False, False, 1e-5, "relu", False, True, False),
    ):
        with pytest.raises(InputError, match="cannot be written as is and transposed from a tile"):
            FusedCastTranspose(spec)


@pytest.mark.parametrize("spec", CAST_TRANSPOSES, ids=lambda spec: spec.function)
def test_both_copies_are_recorded_once(package, spec):
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(0))
    x[3, 5], x[4, 6], x[7] = torch.nan, -torch.inf, 0.0
    record, scale = new_record(), scale_of(spec)
    got, expected = package.run(spec, x, scale, record), package.run(unrecorded(spec), x, scale)
    for name in ("values", "transposed"):
        assert torch.equal(got[name].view(torch.uint8), expected[name].view(torch.uint8))
    assert record[0] == expected["overflow"].sum() > 0
    assert largest_of(record) == expected["amax"].max()


def test_a_record_keeps_the_largest_and_counts_on():
    record = new_record()
    for y, elements, largest in (([1.0, -900.0], 1, 900.0), ([500.0, 2.0], 2, 900.0), ([0.0, torch.inf], 2, 900.0)):
        norm_reference.quantize_static_counted(torch.tensor([y]), torch.ones(1, 1), record)
        assert (int(record[0]), largest_of(record)) == (elements, largest)
    norm_reference.quantize_static_counted(torch.zeros(0, 4), torch.ones(1, 1), record)
    assert int(record[0]) == 2


@pytest.mark.parametrize("record", [torch.zeros(2), torch.zeros(3, dtype=torch.int64)])
def test_a_record_is_two_int64(package, record):
    for spec, shape in ((recorded(512)[0], (3, 512)), (CAST_TRANSPOSES[0], (3, 7))):
        with pytest.raises(InputError, match="overflow_stats of two int64"):
            package.run(spec, torch.ones(shape), torch.ones(1, 1), record)


@pytest.mark.parametrize("shape", [(1, 13), (13, 1), (1, 1), (130, 257), (0, 5)])
def test_transposed_copies_are_copies(package, shape):
    x = torch.randn(shape).to(torch.float8_e4m3fn)
    others = [x, torch.randn(17, 3).to(torch.float8_e4m3fn), x]
    for spec in TRANSPOSES:
        got = list(package.run(spec, *others[: spec.count]).values())
        for ours, values in zip(got, others, strict=False):
            assert torch.equal(ours.view(torch.uint8), values.view(torch.uint8).t())
            assert ours.is_contiguous()
            assert not x.numel() or ours.data_ptr() != values.data_ptr()


COMPILED = [
    *pairwise(spec for spec in recorded(2048) if spec.how == HOWS[0]),
    *recorded(479)[:2],
    *CAST_TRANSPOSES[:2],
    *TRANSPOSES,
]
COMPILED += pairwise(
    (each for width in (2048, 479) for each in fused_cast_transposes(width) if each.spec.how == HOWS[0]),
    lambda each: fields_of(each.spec),
)


@pytest.mark.slow
@pytest.mark.parametrize("spec", COMPILED, ids=lambda spec: spec.function)
@pytest.mark.usefixtures("triton_cache")
def test_it_compiles_for_hopper(spec, tmp_path):
    from tests.support.kernels.sm90 import SHARED, compiled, spilled

    package = write_package(tmp_path / f"compiled_{spec.function}", [spec])
    binary = compiled(package, spec)
    ptx = binary.asm["ptx"]
    assert not unset_halves(ptx)
    assert binary.metadata.shared <= SHARED
    assert spilled(binary, tmp_path) == 0
    if isinstance(spec, Transpose):
        assert not re.search(r"cvt\.\S*(?:f16|f32|e4m3|e5m2)", ptx)  # bytes are moved, not converted
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
    else:
        for operation in ("max", "add"):  # once a program
            assert len(re.findall(rf"(?:atom|red)\.global\S*\.relaxed\S*\.{operation}\.[su]64", ptx)) == 1
