"""nvfp4 against its definition, written out in numpy with a table of e2m1; and who may ask for it.

On 4 * 10^6 values of the samples' kinds, torchao 0.17's `nvfp4_quantize` gave the same scales, and the same values but
for one, a tie: it multiplies by a reciprocal where its later versions, as we, divide. With the division put in, it gave
the same bits.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from loka.errors import Code, LokaError
from loka.numerics.enums import Format, Gemm, Range, Scaling
from loka.numerics.quantize import Quantized, dequantize, fake_quantize, quantize
from loka.numerics.recipe import OperandRecipe
from loka.plan.format import format_operands
from loka.plan.planner import make_plan
from loka.probe.estimate import errors, recipe_label
from loka.probe.samplers import Drawn

ROWS, COLUMNS = 1000, 1024
GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)  # by code: the last bit is the mantissa
MIDDLES = (GRID[1:] + GRID[:-1]) / 2
RECIPE = OperandRecipe(scaling=Scaling.NVFP4)


def quantized(x: Tensor, amax: float | None = None) -> Quantized:
    return quantize(x, format=Format.E4M3, scaling=Scaling.NVFP4, amax=amax)


def by_definition(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Values (R, C) and scales (R, C / 16) of float32 rows; what is not finite is NaN and counts in no maximum."""
    given = x.numpy().reshape(ROWS, COLUMNS // 16, 16)
    finite = np.isfinite(given)
    magnitude = np.where(finite, np.abs(given), np.float32(0))
    whole = magnitude.max() / np.float32(448 * 6)
    wanted = magnitude.max(2) / np.float32(6) / whole
    scale = np.clip(wanted, 2.0**-6, 448.0).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * whole
    quotient = np.where(finite, np.abs(given), np.float32(0)) / scale[:, :, None]
    below = np.searchsorted(MIDDLES, quotient)  # a tie goes to the lower code, or on to the upper one if that is even
    code = below + (below % 2) * (quotient == MIDDLES[np.minimum(below, 6)])
    values = np.where(finite, np.copysign(GRID[code], given), np.float32(np.nan))
    return values.reshape(ROWS, COLUMNS), scale


def samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (ROWS, COLUMNS), generator=generator).to(torch.int32).view(torch.float32)
    normal = torch.randn((ROWS, COLUMNS), generator=generator)
    octaves = torch.randint(-20, 10, (ROWS, COLUMNS // 16), generator=generator).float()
    wide = normal * torch.exp2(octaves).repeat_interleave(16, 1)
    subnormal = normal * torch.exp2(torch.randint(-6, 1, normal.shape, generator=generator).float())
    ties = torch.from_numpy(np.concatenate([GRID, MIDDLES]))[torch.randint(15, normal.shape, generator=generator)]
    ties = (ties * normal.sign()).view(-1, 16)
    ties[:, 0] = 6.0  # with which the scale of each block is a power of two
    ties = torch.exp2(octaves).clamp(max=4.0).view(-1, 1) * ties
    ties[0, 0] = 448 * 6.0
    damaged = wide.clone()
    damaged.view(-1)[:: 3 * 37] = torch.nan
    damaged.view(-1)[:: 5 * 37] = torch.inf
    damaged.view(-1)[:: 7 * 37] = -torch.inf
    damaged[:, 32:64] = 0.0
    damaged[7] = torch.nan
    return {
        "any bits": bits,
        "normal": normal,
        "any scale": wide,
        "subnormal": subnormal,
        "ties": ties.view(ROWS, COLUMNS),
        "zeros, infinities and NaN": damaged,
    }


@pytest.mark.parametrize("name", list(samples()))
def test_values_and_scales_are_those_of_the_definition(name: str) -> None:
    x = samples()[name]
    found, (values, scale) = quantized(x), by_definition(x)
    assert np.array_equal(found.scale.numpy(), scale)
    got = found.values.float().numpy()
    assert np.array_equal(np.isnan(got), np.isnan(values))
    assert np.array_equal(got.view(np.int32)[~np.isnan(got)], values.view(np.int32)[~np.isnan(values)])
    assert set(np.unique(np.abs(got[~np.isnan(got)]))) == set(GRID)
    if name == "ties":
        assert np.isin(np.abs(x.numpy()) / scale.repeat(16, 1), MIDDLES).mean() > 0.2


def test_zeros_edges_and_empty_matrices() -> None:
    assert torch.equal(dequantize(quantized(torch.zeros(3, 40))), torch.zeros(3, 40))
    assert quantized(torch.ones(3, 40)).scale.shape == (3, 3)
    for rows, columns in ((0, 0), (0, 40), (3, 0)):
        found = quantized(torch.empty(rows, columns))
        assert (found.values.shape, found.scale.shape) == ((rows, columns), (rows, -(-columns // 16)))


def test_a_given_maximum_is_that_of_all_and_saturates() -> None:
    x = torch.tensor([[12.0, *[1.0] * 15, *[0.25] * 16]])
    back = dequantize(quantized(x, amax=3.0))
    assert back[0, 0] == back.max() == 3.0
    assert torch.equal(back, fake_quantize(x, OperandRecipe(scaling=Scaling.NVFP4, range=Range.STATIC, amax=3.0)))
    assert torch.equal(dequantize(quantized(x, amax=12.0)), dequantize(quantized(x)))


def test_the_probe_takes_the_maximum_of_the_whole_operand() -> None:
    """The scale of 16 neighbours is 3 bits of mantissa, by the scale for all: another one rounds otherwise."""
    a, b = torch.randn(64, 128, generator=torch.Generator().manual_seed(1)), torch.eye(128)
    given = Drawn(a, b, float(a.abs().max()), 1.0)
    assert errors(given, (RECIPE, RECIPE)) == errors(Drawn(a, b, None, None), (RECIPE, RECIPE))
    assert errors(Drawn(a, b, 2.0**20, 1.0), (RECIPE, RECIPE)) != errors(given, (RECIPE, RECIPE))
    _, coarse = errors(given, (RECIPE, RECIPE))
    _, fine = errors(given, (OperandRecipe(), OperandRecipe()))
    assert 15 < coarse < 25 < fine
    assert recipe_label(Gemm.FPROP, (RECIPE, RECIPE)) == format_operands(Gemm.FPROP, (RECIPE, RECIPE)) == "nvfp4"


HEAD = (
    "version: 1\nname: four\n"
    'model: {factory: "loka.zoo:small_ranker", inputs: "loka.zoo:ranker_inputs", batch_size: 64}\n'
)


@pytest.mark.parametrize("target", ["reference", "h100", "b200"])
@pytest.mark.parametrize("compute", ["fp8", "auto"])
def test_no_plan_takes_it(target: str, compute: str, tmp_path: Path) -> None:
    policy = tmp_path / "four.yaml"
    policy.write_text(f"{HEAD}target: {target}\ndefaults:\n  compute: {compute}\n  fprop: {{scaling: nvfp4}}\n")
    with pytest.raises(LokaError) as caught:
        make_plan(str(policy))
    assert caught.value.code is Code.IMPOSSIBLE
    assert "four.yaml:7: defaults asks for fprop in nvfp4, which loka probe alone simulates" in str(caught.value)
    policy.write_text(f"{HEAD}target: {target}\ndefaults:\n  compute: keep\n  fprop: {{scaling: nvfp4}}\n")
    assert not any(gemm.fp8 for site in make_plan(str(policy)).sites for gemm in site.gemms)


@pytest.mark.parametrize(
    ("setting", "code", "said"),
    [
        ("dgrad: {scaling: nvfp4}", Code.CONTRADICTION, "dgrad: nvfp4 is simulated for the forward alone"),
        (
            "fprop: {scaling: nvfp4}, dgrad: {weight: {requantize_transpose: true}}",
            Code.CONTRADICTION,
            "dgrad: nothing is transposed from nvfp4, which is simulated alone: write requantize_transpose: false",
        ),
        ("wgrad: {input: {scaling: nvfp4}}", Code.CONTRADICTION, "wgrad: nvfp4 is simulated for the forward alone"),
        ("scaling: nvfp4", Code.VALUE, "'nvfp4'"),
        ("fprop: {weight: {scaling: nvfp4}}", Code.CONTRADICTION, "give both tensorwise, rowwise, blockwise_1x128 or "),
    ],
)
def test_only_a_whole_forward_has_it(setting: str, code: Code, said: str, tmp_path: Path) -> None:
    policy = tmp_path / "four.yaml"
    policy.write_text(f"{HEAD}defaults: {{{setting}}}\n")
    with pytest.raises(LokaError) as caught:
        make_plan(str(policy))
    assert caught.value.code is code
    assert said in str(caught.value).replace('"', "'")
