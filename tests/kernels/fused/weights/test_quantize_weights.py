"""Several weights quantized by one launch: the bits of one quantizer each, and no more launches than needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka.codegen.chains.chain_shapes import quantizer
from loka.errors import InputError
from loka.kernels.fused.quantization import Quantization
from loka.kernels.fused.quantize_weights import QuantizeWeights, grouped
from loka.kernels.fused.rendering import render, render_all
from tests.support.kernels.rendered_cases import Package, write_package
from tests.support.kernels.weight_cases import WEIGHTS, WIDE, odd_weights, weights_of, widths_of

SINGLE = list(dict.fromkeys(each for spec in (*WEIGHTS, *WIDE) for each in spec.quantizers))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("weights") / "weights_quantized"
    return write_package(folder, [*WEIGHTS, *WIDE, *SINGLE])


@pytest.mark.parametrize("spec", [*WEIGHTS, *WIDE], ids=widths_of)
def test_the_reference_has_the_bits_of_single_quantizers(package: Package, spec: QuantizeWeights) -> None:
    weights = odd_weights(spec)
    got = list(package.run(spec, *weights).values())
    for index, (each, weight) in enumerate(zip(spec.quantizers, weights, strict=True)):
        values, scale, largest = package.run(each, weight).values()
        assert torch.equal(got[3 * index].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(got[3 * index + 1], scale)
        assert torch.equal(got[3 * index + 2], largest)


@pytest.mark.parametrize("spec", WEIGHTS, ids=widths_of)
def test_the_operator_holds_what_the_compiler_expects(package: Package, spec: QuantizeWeights) -> None:
    weights = [weight.nan_to_num() for weight in odd_weights(spec)]  # NaN is not equal to itself
    torch.library.opcheck(package.fused.quantize_weights.overload, (weights,))


@pytest.mark.parametrize("spec", [*WEIGHTS, *WIDE], ids=widths_of)
def test_a_block_fits_the_registers(spec: QuantizeWeights) -> None:
    operator = render(spec).operator
    blocks, warps, programs = operator.blocks([each.width for each in spec.quantizers])
    for width, columns, padded, rows in blocks:
        assert padded >= columns > padded // 2
        assert columns >= width
        assert rows & (rows - 1) == 0 < rows
        assert rows * padded <= 32 * 32 * warps  # 32 elements a thread
    assert programs * warps <= 64  # warps of a multiprocessor


def test_one_operator_takes_all_widths_and_each_has_one_number_of_columns() -> None:
    spec = weights_of((479, 480), 1024)
    (rendered,) = render_all([spec, weights_of(64, 64, 1024)])
    assert rendered.operator.columns == {64: 64, 479: 480, 1024: 1024}
    assert rendered.operator.count == 3
    with pytest.raises(InputError, match="two different kernels are called quantize_weights"):
        render_all([spec, weights_of(479, 64)])
    assert spec.parameters == ("weight_0", "weight_1")
    assert spec.results == ("values_0", "scale_0", "scale_max_0", "values_1", "scale_1", "scale_max_1")


@pytest.mark.parametrize(
    ("quantizers", "message"),
    [
        ((quantizer(64),), "2 to 8 weights, not 1"),
        ((quantizer(64),) * 9, "2 to 8 weights, not 9"),
        ((quantizer(64), quantizer(16385)), "quantize_e4m3_16385 is no plain quantizer of rows of up to 16384"),
        ((quantizer(64), replace(quantizer(64), add=True)), "add_e4m3 is no plain quantizer"),
        ((quantizer(64), replace(quantizer(64), how=Quantization("blockwise"))), "is no plain quantizer"),
    ],
)
def test_what_no_launch_quantizes_is_refused(quantizers, message: str) -> None:
    with pytest.raises(InputError, match=message):
        QuantizeWeights(quantizers)


def test_weights_are_grouped_in_order_as_far_as_they_fit() -> None:
    narrow, wide = quantizer(64), quantizer(16385)
    assert grouped([narrow]) == []
    assert grouped([narrow, wide]) == []
    assert grouped([narrow, wide, narrow]) == [[0, 2]]
    assert grouped([narrow] * 12) == [[*range(8)], [*range(8, 12)]]
    assert grouped([narrow] * 9) == [[*range(8)]]
