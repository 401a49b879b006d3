"""The operators on the CPU: references against float64 autograd and the quantizer, shapes, corners, the compiler."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loka.dispatch import runtime
from loka.errors import InputError
from loka.kernels.fused import operators
from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import Quantized, dequantize, quantize, requantize_transpose
from tests.support.kernels.rendered_cases import (
    PARTS,
    Inputs,
    arguments_of,
    exact_forward,
    exact_gradients,
    exact_statistics,
    norm_specs,
    random_inputs,
    write_package,
)

SHAPES = [(1, 13), (17, 479), (64, 512), (0, 24), (5, 1)]
WIDTHS = sorted({width for _, width in SHAPES})
FORWARDS = {w: [s for s in norm_specs(w, PARTS) if isinstance(s, NormForward)] for w in WIDTHS}
BACKWARDS = {w: [s for s in norm_specs(w, PARTS) if isinstance(s, NormBackward)] for w in WIDTHS}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    specs = [spec for width in WIDTHS for spec in norm_specs(width, PARTS)]
    counted = [*map(RequantizeTranspose, (1, 2, 3)), *map(Reduce, (1, 2))]
    return write_package(tmp_path_factory.mktemp("reference") / "rendered_reference", [*specs, *counted])


def close(actual: Tensor, exact: Tensor, rows: bool = True) -> None:
    """Within 1e-5 of the largest element of its row (of its matrix or vector, for sums over rows)."""
    size = exact.abs().amax(-1, keepdim=True) if rows and exact.dim() == 2 and exact.numel() else exact.abs().sum()
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= 1e-5 * size + 1e-12).all()


def quantized_close(got: dict[str, Tensor], exact: Tensor) -> None:
    """Within half a step of e4m3 (2**-4 of a value, 2**-10 of its scale), under the quantizer's scale or the next."""
    scale = got["scale"].double()
    usual = quantize(exact, format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True).scale
    assert ((scale / usual).log2().abs() <= 1.0).all()
    value = dequantize(Quantized(got["values"], got["scale"])).double()
    assert ((value - exact).abs() <= 2.0**-4 * exact.abs() + 2.0**-10 * scale + 1e-5 * exact.abs().amax()).all()


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forwards_against_float64(package, rows, width, dtype):
    inputs = random_inputs(rows, width, dtype)
    for spec in FORWARDS[width]:
        got = package.run(spec, *(inputs.tensors[name] for name in spec.parameters), *plain_dtype(spec))
        exact = exact_forward(spec, {name: t.double() for name, t in inputs.tensors.items()})
        if spec.quantize:
            assert got["values"].dtype == torch.float8_e4m3fn
            assert got["scale_max"].tolist() == ([got["scale"].max().item()] if rows else [0.0])
            if rows:
                quantized_close(got, exact)
        else:
            close(got["out"], exact)
        size = inputs.tensors["x"].abs().amax(1) + inputs.tensors["add"].abs().amax()  # what a mean is small beside
        for name, statistic in exact_statistics(spec, inputs.tensors).items():
            assert ((got[name] - statistic).abs() <= 1e-5 * statistic.abs() + 1e-6 * size).all()


def plain_dtype(spec) -> list[torch.dtype]:
    """Asks a plain forward for float32, so that rounding to bfloat16 is not in the way."""
    return [] if spec.quantize else [torch.float32]


@pytest.mark.parametrize(("rows", "width"), [shape for shape in SHAPES if shape[1] > 1])
def test_backwards_against_float64_autograd(package, rows, width):
    inputs = random_inputs(rows, width, torch.float32)
    for spec in BACKWARDS[width]:
        got = package.run(spec, *arguments_of(spec, inputs))
        exact = exact_gradients(spec, inputs)
        if spec.quantize and rows:
            quantized_close(got, exact["dx"])
        if not spec.quantize:
            close(got["dx"], exact["dx"])
        for name in spec.results:
            if name in ("dweight", "dbias", "dadd"):
                assert got[name].shape == (1, width)
                close(got[name][0], exact[name], rows=False)


def test_closed_forms():
    """Of two elements a + d and a - d, LayerNorm makes +-1; SiLU of that is known, and so is the gradient of a sum."""
    x = torch.tensor([[3.0, 1.0], [-5.0, 7.0]])
    forward = norm_reference.norm_forward(x, norm="layer_norm", eps=0.0)
    assert forward.y.tolist() == [[1.0, -1.0], [-1.0, 1.0]]
    assert forward.mean.tolist() == [2.0, 1.0]
    assert forward.rstd.tolist() == pytest.approx([1.0, 1 / 6])
    backward = norm_reference.norm_backward(
        torch.ones(2, 2), x=x, norm="layer_norm", mean=forward.mean, rstd=forward.rstd
    )
    assert backward.x.abs().max() == 0.0  # a shift of all elements changes nothing
    assert backward.weight.tolist() == [[0.0, 0.0]]
    assert backward.bias.tolist() == [[2.0, 2.0]]
    rms = norm_reference.norm_forward(torch.tensor([[3.0, 4.0]]), norm="rms_norm", eps=0.0)
    assert rms.y[0].tolist() == pytest.approx([3.0 / 12.5**0.5, 4.0 / 12.5**0.5])
    y = torch.tensor([[-4.0, -3.0, 0.0, 1.5, 3.0, 4.0]])
    assert norm_reference.norm_forward(y, activation="hardswish").y.tolist() == [[0.0, 0.0, 0.0, 1.125, 3.0, 4.0]]
    slope = norm_reference.norm_backward(torch.ones_like(y), x=y, activation="hardswish")
    assert slope.x.tolist() == [[0.0, 0.0, 0.5, 1.0, 1.0, 1.0]]
    assert slope.add.tolist() == slope.x.tolist()
    ends = torch.tensor([[0.0, -0.0, -1.0, 2.0, torch.nan, torch.inf, -torch.inf]], requires_grad=True)
    leaky = F.leaky_relu(ends, 0.2)
    (slope,) = torch.autograd.grad(leaky.sum(), ends)
    found = norm_reference.norm_forward(ends.detach(), activation="leaky_relu(0.2)").y
    torch.testing.assert_close(found, leaky.detach(), rtol=0.0, atol=0.0, equal_nan=True)
    found = norm_reference.norm_backward(torch.ones_like(ends), x=ends.detach(), activation="leaky_relu(0.2)").x
    assert torch.equal(found, slope)
    steep = torch.tensor([[0.0, -1e-6, 20.0, -40.0, 200.0, -torch.inf]])
    slope = norm_reference.norm_backward(torch.ones_like(steep), x=steep, activation="tanh").x
    torch.testing.assert_close(slope.double(), steep.double().cosh() ** -2.0, rtol=1e-6, atol=1e-45)


def test_non_finite_values_stay_in_their_rows(package):
    inputs = random_inputs(17, 479, torch.float32)
    clean = inputs.tensors["x"].clone()
    inputs.tensors["x"][2, 3], inputs.tensors["x"][5, 7] = float("nan"), float("inf")
    others = [row for row in range(17) if row not in (2, 5)]
    for spec in FORWARDS[479]:
        arguments = [inputs.tensors[name] for name in spec.parameters]
        poisoned = package.run(spec, *arguments, *plain_dtype(spec))
        whole = package.run(spec, clean, *arguments[1:], *plain_dtype(spec))
        name = "values" if spec.quantize else "out"
        assert torch.equal(poisoned[name].float()[others], whole[name].float()[others])
        row = poisoned[name].float()[2]
        assert row.isnan().all() if spec.norm else row.isnan().nonzero().flatten().tolist() == [3]


def padding(count: int, index: int, values: Tensor) -> int:
    """Columns of zeros behind a transposed copy: those of operands of the batch have a multiple of 16 columns."""
    return -len(values) % 16 if count > 1 and index < 2 else 0


def test_requantize_transpose_is_the_reference(package):
    generator = torch.Generator().manual_seed(0)
    operands = []
    for rows, columns in ((17, 24), (1, 479), (0, 13)):
        x = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 6, rows)[:, None]
        operands.append(norm_reference.quantize_rows(x))
    for count in (1, 2, 3):
        got = package.run(RequantizeTranspose(count), *itertools.chain(*operands[:count]))
        for index, (values, scale, _) in enumerate(operands[:count]):
            expected = requantize_transpose(Quantized(values, scale), check=True)
            suffix = f"_{index}" if count > 1 else ""
            copy, zeros = (
                got[f"transposed{suffix}"].view(torch.uint8).split((len(values), padding(count, index, values)), 1)
            )
            assert torch.equal(copy, expected.values.view(torch.uint8))
            assert not zeros.any()
            assert torch.equal(got[f"scale_t{suffix}"], expected.scale)


def test_reduction(package):
    first, second = torch.randn(7, 24), torch.randn(1, 3)
    first_total, second_total = runtime.reduced(package.fused.reduce, [first, second], [torch.bfloat16, torch.float32])
    assert torch.equal(first_total, first.sum(0).bfloat16())
    assert torch.equal(second_total, second[0])


def test_an_activation_or_norm_that_does_not_exist_is_refused():
    x = torch.zeros(2, 3)
    with pytest.raises(InputError, match="no kernel has an activation 'softplus'"):
        norm_reference.norm_forward(x, activation="softplus")
    with pytest.raises(InputError, match="no kernel has an activation 'softplus'"):
        norm_reference.norm_backward(x, x=x, activation="softplus")
    with pytest.raises(InputError, match="needs x"):
        norm_reference.norm_backward(x, activation="relu")
    with pytest.raises(InputError, match="layer_norm needs the statistics"):
        norm_reference.norm_backward(x, x=x, norm="layer_norm", rstd=torch.ones(2))


@pytest.mark.parametrize("x", [torch.zeros(3, 480), torch.zeros(479), torch.zeros(3, 479, dtype=torch.int32)])
def test_rows_of_another_width_are_refused(package, x):
    spec = FORWARDS[479][0]
    with pytest.raises(InputError, match="floating rows of 1, 13, 24, 479 or 512 elements"):
        package.run(spec, x, torch.ones(479), torch.ones(479))


def test_vectors_of_another_width_are_refused(package):
    with pytest.raises(InputError, match=r"rows of 512 elements got a vector of shape \(479,\)"):
        package.run(FORWARDS[479][0], torch.zeros(3, 512), torch.ones(479), torch.ones(479))


@pytest.mark.slow
def test_operators_hold_what_the_compiler_expects(package):
    inputs = random_inputs(3, 24, torch.float32)
    checked = [spec for spec in [*FORWARDS[24], *BACKWARDS[24]] if spec.add]
    assert len(checked) > 12
    for spec in checked:
        op = getattr(package.fused, spec.function).overload
        torch.library.opcheck(op, tuple(arguments_of(spec, inputs)))
    # test_schema cannot compare FP8 arguments.
    values, scale, largest = norm_reference.quantize_rows(inputs.tensors["x"])
    utils = ("test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(package.fused.requantize_transpose.overload, ([values, scale, largest],), test_utils=utils)
    torch.library.opcheck(package.fused.reduce.overload, ([torch.ones(3, 5)], torch.float16), test_utils=utils)


def test_fakes_tell_the_number_of_programs_of_a_gpu(package, monkeypatch):
    monkeypatch.setattr(operators, "multiprocessors", lambda device: 132)
    backward = next(s for s in BACKWARDS[512] if s.norm == "layer_norm" and s.activation == "silu" and s.quantize)
    with torch._subclasses.FakeTensorMode():
        for rows, programs in ((0, 1), (1, 1), (17, 5), (100_000, 132 * 8)):  # four rows and more for each
            x = torch.empty(rows, 512, device="cuda", dtype=torch.bfloat16)
            vector, statistic = torch.empty(512, device="cuda"), torch.empty(rows, device="cuda")
            got = package.run(backward, x, x, vector, vector, vector, statistic, statistic)
            assert [tuple(got[name].shape) for name in ("values", "scale", "scale_max", "dweight", "dadd")] == [
                (rows, 512), (rows, 1), (programs,), (programs, 512), (programs, 512),
            ]  # fmt: skip
            assert {t.device.type for t in got.values()} == {"cuda"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_graph_under_the_compiler(package, dynamic):
    fused = package.fused
    forward = next(
        s for s in FORWARDS[24] if s.norm == "layer_norm" and s.add and s.quantize and s.activation == "silu"
    )
    backward = next(
        s for s in BACKWARDS[24] if s.norm == "layer_norm" and s.add and s.quantize and s.activation == "silu"
    )
    run_forward, run_backward = getattr(fused, forward.function), getattr(fused, backward.function)

    def step(x: Tensor, add: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        values, scale, largest, mean, rstd = run_forward(x, add, weight, bias)
        dvalues, dscale, dlargest, dweight, dbias, dadd = run_backward(grad, x, add, weight, bias, mean, rstd)
        transposed, spread, dtransposed, dspread = fused.requantize_transpose(
            [values, scale, largest, dvalues, dscale, dlargest]
        )
        sums = runtime.reduced(fused.reduce, [dweight, dbias], [torch.bfloat16, torch.float32])
        return transposed.float() * spread, dtransposed.float() * dspread, dadd.sum(0), *sums

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (4, 7, 1) if dynamic else (4,):
        inputs: Inputs = random_inputs(rows, 24, torch.bfloat16)
        arguments = (*[inputs.tensors[name] for name in ("x", "add", "weight", "bias")], inputs.grad)
        for ours, plain in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(ours, plain)


class AddsOne(operators.KernelOperator):
    function = "adds_one"
    schema = "(Tensor x) -> Tensor"

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def outputs(self, x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def launch(self, kernels: str, results: object, arguments: object, launch: object) -> None:
        self.calls.append(kernels)

    def reference(self, x: Tensor) -> Tensor:
        return x + 1


NAMES = ("first", "second")


def test_a_name_is_registered_once_and_runs_the_last_kernel(package):
    calls: list[str] = []
    first, second = (operators.define("registered_twice", AddsOne(calls), lambda word=word: word) for word in NAMES)
    assert first.overload is second.overload
    assert first(torch.zeros(2)).tolist() == [1.0, 1.0]
    operators._cuda["registered_twice"](torch.zeros(2))
    assert calls == ["second"]
    assert str(first.overload._schema) == "loka_generated::registered_twice(Tensor x) -> Tensor"


@pytest.mark.slow
def test_a_package_runs_its_reference_without_triton_jinja_or_pydantic(package):
    folder = Path(package.fused.__file__).parent
    spec = FORWARDS[13][0]
    program = (
        "import sys\n"
        "for name in ('triton', 'jinja2', 'pydantic'): sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(folder.parent)!r})\n"
        f"import torch, {folder.name}.fused as fused\n"
        f"print(fused.{spec.function}(torch.ones(2, 13), torch.ones(13), torch.ones(13))[1].tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (
        done.stdout == "[[0.00390625], [0.00390625]]\n"
    )  # LayerNorm of equal elements is its bias, 1; up from 1 / 448
