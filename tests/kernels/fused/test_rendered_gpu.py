"""Rendered kernels on a Hopper GPU: against float64, the quantizer and the CPU reference; graphs and the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.kernels.fused import operators
from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import quantize, requantize_transpose
from tests.support.gpu import ON_HOPPER
from tests.support.kernels.fp8_codes import ordered, same_nan
from tests.support.kernels.norm_checks import check_norm, check_replayed
from tests.support.kernels.rendered_cases import (
    PARTS,
    arguments_of,
    norm_specs,
    random_inputs,
    write_package,
)

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

WIDTHS = (13, 24, 479, 512, 624, 1024, 2048, 3456, 4096, 8192, 8256)
ROWS = (1, 17, 4093)
WIDEST = ("layer_norm", True, True, "silu", True)
WIDE = {width: norm_specs(width, [WIDEST]) for width in WIDTHS}
VARIANTS = [spec for spec in norm_specs(512, PARTS[:1] + PARTS[2:]) if spec.quantize or spec.activation == "sigmoid"]
QUANTIZE = {w: NormForward(w, None, False, False, 0.0, None, False, True, True) for w in (479, 8192)}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    specs = [*VARIANTS, *QUANTIZE.values(), *(spec for width in WIDTHS for spec in WIDE[width])]
    counted = [*map(RequantizeTranspose, (1, 2, 3)), *map(Reduce, (1, 2, 3))]
    return write_package(tmp_path_factory.mktemp("gpu") / "rendered_gpu", [*specs, *counted])


@pytest.mark.parametrize("width", WIDTHS)
def test_every_width_against_float64(package, width):
    for rows in ROWS:
        for heavy in (False, True):
            inputs = random_inputs(rows, width, torch.bfloat16, "cuda", heavy)
            for spec in WIDE[width]:
                check_norm(package, spec, inputs)


@pytest.mark.parametrize("spec", VARIANTS, ids=lambda spec: spec.function)
def test_every_variant_against_float64(package, spec):
    for rows in ROWS:
        inputs = random_inputs(rows, 512, torch.bfloat16, "cuda")
        check_norm(package, spec, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(package, dtype):
    inputs = random_inputs(17, 479, dtype, "cuda")
    for spec in WIDE[479]:
        check_norm(package, spec, inputs)


EXACT = [spec for spec in VARIANTS if spec.norm is None and spec.activation in (None, "relu") and spec.quantize]


@pytest.mark.parametrize("spec", EXACT, ids=lambda spec: spec.function)
def test_the_quantized_result_is_the_reference_bit_for_bit(package, spec):
    for heavy in (False, True):
        inputs = random_inputs(4093, 512, torch.bfloat16, "cuda", heavy)
        first = inputs.grad if isinstance(spec, NormBackward) else inputs.tensors["x"]
        first[3], first[4, 5], first[6, 7], first[8, 9] = 0.0, torch.nan, torch.inf, -torch.inf
        first[10], first[11] = 448.0 * 2.0**-20, torch.finfo(torch.bfloat16).max
        arguments = [inputs.tensors.get(name, inputs.grad) for name in spec.parameters]
        got = package.run(spec, *arguments)
        expected = package.run(spec, *(argument.cpu() for argument in arguments))
        assert torch.equal(got["scale"].cpu(), expected["scale"])
        assert torch.equal(same_nan(got["values"].cpu()), same_nan(expected["values"]))
        assert got["scale_max"].max().cpu() == expected["scale_max"].max()


def test_hardly_a_value_differs_from_the_reference_elsewhere(package):
    """A rounding of float32 that falls the other way moves an e4m3 value by one step, and few."""
    for spec in WIDE[2048]:
        if not spec.quantize:
            continue
        inputs = random_inputs(64, 2048, torch.bfloat16, "cuda")
        arguments = arguments_of(spec, inputs)
        got, expected = package.run(spec, *arguments), package.run(spec, *(a.cpu() for a in arguments))
        assert torch.equal(got["scale"].cpu(), expected["scale"])
        ours, theirs = (ordered(values) for values in (got["values"].cpu(), expected["values"]))
        assert (ours - theirs).abs().max() <= 1
        assert (ours != theirs).float().mean() < 1e-2


def test_non_finite_values_stay_in_their_rows(package):
    for spec in VARIANTS:
        if not isinstance(spec, NormForward) or not spec.quantize:
            continue
        inputs = random_inputs(17, 512, torch.bfloat16, "cuda")
        arguments = [inputs.tensors[name] for name in spec.parameters]
        whole = package.run(spec, *arguments)["values"].float()
        inputs.tensors["x"][2, 3], inputs.tensors["x"][5, 7] = torch.nan, torch.inf
        got = package.run(spec, *arguments)["values"].float()
        others = [row for row in range(17) if row not in (2, 5)]
        assert torch.equal(got[others], whole[others])
        assert got[2].isnan().all() if spec.norm else got[2].isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(("rows", "columns"), [(1, 13), (17, 24), (4093, 479), (0, 24), (4096, 512), (17, 8256)])
def test_requantize_transpose_is_the_reference_bit_for_bit(package, rows, columns):
    generator = torch.Generator().manual_seed(rows)
    operands, arguments = [], []
    for extra in (0, 1, 130):
        x = torch.randn(rows + extra, columns, generator=generator) * torch.logspace(-9, 9, rows + extra)[:, None]
        if extra:
            x[extra // 2, columns // 2], x[0] = torch.nan, 0.0
        quantized = quantize(x.cuda(), format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True)
        parts = quantized.scale.flatten().tensor_split(3)
        largest = torch.stack([part.max() if part.numel() else part.new_zeros(()) for part in parts])
        operands.append(quantized)
        arguments += [quantized.values, quantized.scale, largest]
    for count in (1, 2, 3):
        got = list(package.run(RequantizeTranspose(count), *arguments[: 3 * count]).values())
        for index, operand in enumerate(operands[:count]):
            expected = requantize_transpose(operand, check=True)
            rows = len(operand.values)
            columns = rows + (-rows % 16 if count > 1 and index < 2 else 0)  # zeros behind
            assert got[2 * index].shape == (expected.values.shape[0], columns)
            assert torch.equal(same_nan(got[2 * index][:, :rows]), same_nan(expected.values))
            assert not got[2 * index][:, rows:].view(torch.uint8).any()
            assert torch.equal(got[2 * index + 1], expected.scale)


@pytest.mark.parametrize("parts", [1, 17, 528, 2112])
def test_reduction_is_right_and_the_same_each_time(package, parts):
    generator = torch.Generator().manual_seed(parts)
    partials = [torch.randn(parts, width, generator=generator).cuda() for width in (512, 13, 8256)]
    dtypes = (torch.bfloat16, torch.float32, torch.float32)
    for count in (1, 2, 3):
        arguments = [item for pair in zip(partials[:count], dtypes, strict=False) for item in pair]
        first, second = (package.run(Reduce(count), *arguments) for _ in range(2))
        for (name, total), partial in zip(first.items(), partials, strict=False):
            assert torch.equal(total, second[name])
            exact = partial.double().sum(0)
            allowed = torch.finfo(total.dtype).eps * exact.abs() + 1e-6 * partial.double().abs().sum(0)
            assert ((total.double() - exact).abs() <= allowed).all()


def test_without_rows(package):
    inputs = random_inputs(0, 512, torch.bfloat16, "cuda")
    for spec in VARIANTS:
        arguments = arguments_of(spec, inputs)
        for result in package.run(spec, *arguments).values():
            assert result.float().abs().sum() == 0.0


def test_strided_arguments(package):
    inputs = random_inputs(17, 512, torch.bfloat16, "cuda")
    for spec in VARIANTS:
        arguments = arguments_of(spec, inputs)
        strided = [a.repeat_interleave(2, dim=-1)[..., ::2] if a.shape[-1] == 512 else a for a in arguments]
        assert not strided[0].is_contiguous()
        for ours, theirs in zip(
            package.run(spec, *strided).values(), package.run(spec, *arguments).values(), strict=True
        ):
            assert torch.equal(ours.float(), theirs.float())


def test_matrices_beyond_two_to_the_31_elements(package):
    rows = 2**31 // 8192 + 3
    x = torch.zeros(rows, 8192, device="cuda", dtype=torch.bfloat16)
    x[-2:] = torch.arange(1, 8193, device="cuda")
    got = package.run(QUANTIZE[8192], x)
    expected = quantize(x[-4:], format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True)
    del x
    assert torch.equal(got["values"][-4:].view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(got["scale"][-4:], expected.scale)
    transposed = package.run(RequantizeTranspose(1), got["values"], got["scale"], got["scale_max"])
    assert torch.equal(
        transposed["transposed"][:, -4:].view(torch.uint8), requantize_transpose(expected).values.view(torch.uint8)
    )


def step_of(package):
    """A function of one norm's forward and backward, its transpositions and sums."""
    forward, backward = (spec for spec in WIDE[512] if spec.quantize and not spec.multiplied)
    run_forward, run_backward = (getattr(package.fused, spec.function) for spec in (forward, backward))

    def step(x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        values, scale, largest, mean, rstd = run_forward(x, add, weight, bias)
        dvalues, dscale, dlargest, dweight, dbias, dadd = run_backward(grad, x, add, weight, bias, mean, rstd)
        transposed, spread, dtransposed, dspread = package.fused.requantize_transpose(
            [values, scale, largest, dvalues, dscale, dlargest]
        )
        sums = [*package.fused.reduce([dweight], torch.bfloat16), *package.fused.reduce([dbias, dadd], torch.float32)]
        return transposed.float() * spread, dtransposed.float() * dspread, *sums

    return step


def test_a_graph_replays_on_new_data_without_synchronising(package):
    step = step_of(package)
    inputs, other = (random_inputs(256, 512, torch.bfloat16, "cuda", seed=seed) for seed in (0, 1))
    check_replayed(step, inputs.of_step(), other.of_step())


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_under_the_compiler(package, dynamic):
    step = step_of(package)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for rows in (256, 17, 4093) if dynamic else (256,):
        inputs = random_inputs(rows, 512, torch.bfloat16, "cuda")
        arguments = inputs.of_step()
        for ours, eager in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(ours, eager)


def test_programs_are_those_of_the_fake(package):
    _, backward = (spec for spec in WIDE[512] if spec.quantize and not spec.multiplied)
    for rows in ROWS:
        inputs = random_inputs(rows, 512, torch.bfloat16, "cuda")
        arguments = arguments_of(backward, inputs)
        real = package.run(backward, *arguments)
        with torch._subclasses.FakeTensorMode() as mode:
            fake = package.run(backward, *(mode.from_tensor(argument) for argument in arguments))
        for name, result in real.items():
            assert (fake[name].shape, fake[name].dtype) == (result.shape, result.dtype)
            assert fake[name].stride() == result.stride()
        assert real["scale_max"].shape[0] <= 16 * operators.multiprocessors(0)
