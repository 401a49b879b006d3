"""The text of rendered kernels: formatted, one for each spec, with nothing in it that the spec decided against."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

from loka.devices.spec import RowLaunch
from loka.errors import InputError
from loka.kernels.fused.kernel_values import padded_width
from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose
from loka.kernels.fused.norm.activations import ACTIVATIONS, GATES
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norm_values import Rows, configuration
from loka.kernels.fused.norm.norms import NORMS
from loka.kernels.fused.quantization import SCALINGS
from loka.kernels.fused.rendering import kernel_texts, render, render_files, source_of
from loka.templating.templates import load_templates
from tests.support.kernels.rendered_cases import BLOCK_PARTS, PARTS, norm_specs
from tests.support.markdown import REPOSITORY
from tests.support.pairwise import pairwise

COUNTED = [*map(RequantizeTranspose, (1, 2, 3)), *map(Reduce, range(1, 7))]
WIDTHS = (13, 24, 479, 768, 2048, 4096, 8192, 8256)
EVERY = pairwise(spec for width in WIDTHS for spec in norm_specs(width, PARTS if width % 256 else PARTS + BLOCK_PARTS))


@pytest.fixture(scope="module")
def templates():
    return load_templates()


def all_norm_specs(width: int) -> list[NormForward | NormBackward]:
    specs: list[NormForward | NormBackward] = []
    for norm, activation in itertools.product((None, *NORMS), (None, "relu", "silu")):
        for weight, bias, add, quantize in itertools.product((False, True), repeat=4):
            if norm is None and (weight or bias or activation is None):
                continue
            if (norm == "block_norm" and (weight or bias)) or (norm == "batch_norm" and not (weight and add)):
                continue
            specs.append(NormBackward(width, norm, weight, bias, 1e-5, activation, add, quantize))
            for save, eps in itertools.product((False, True), (1e-5, 0.0)):
                specs.append(NormForward(width, norm, weight, bias, eps, activation, add, quantize, save))
    return specs


@pytest.mark.slow
def test_one_name_is_one_operator_and_one_operator_one_name(templates):
    operators: dict[str, str] = {}
    functions: dict[str, str] = {}
    for spec in all_norm_specs(512):
        kernel = render(spec)
        text = source_of(kernel.operator)
        assert operators.setdefault(kernel.function, text) == text
        assert functions.setdefault(text, kernel.function) == kernel.function
    assert len(operators) > 150


@pytest.mark.parametrize("spec", [*EVERY, *COUNTED], ids=str)
def test_a_kernel_has_the_branches_that_its_operators_need(spec, templates):
    rendered = render(spec)
    *functions, kernel = kernel_texts([rendered], templates)
    text = "".join([*functions, kernel])
    ast.parse(text)
    if not isinstance(spec, NormForward | NormBackward):
        return
    named = {name for name in (*NORMS, *ACTIVATIONS, *GATES, *SCALINGS, spec.activation) if f'"{name}"' in text}
    gates = {"gate_sigmoid", "gate_hardsigmoid"} if spec.activation in GATES else set()
    saves = {"layer_norm", "rms_norm"} if spec.norm in ("layer_norm", "rms_norm") else set()
    compared = {"sigmoid"}  # whose zeros are no zeros
    assert named - gates - saves - compared <= {spec.norm, spec.activation, spec.how.scaling if spec.quantize else None}
    assert {name for name in (spec.norm, spec.activation) if name} <= named


def test_slopes_have_kernels_of_their_own(templates):
    specs = [NormForward(24, activation=name, quantize=True) for name in ("leaky_relu", "leaky_relu(1e-05)")]
    kernels = [render(spec) for spec in specs]
    assert [kernel.function for kernel in kernels] == ["leaky_relu_e4m3", "leaky_relu_1e_05_e4m3"]
    assert [kernel.title for kernel in kernels] == [
        f"LeakyReLU {slope} -> e4m3 with one power-of-two scale a row" for slope in ("0.01", "1e-05")
    ]
    text = render_files(kernels, templates, "a test")["triton_kernels.py"]
    assert [f"z = leaky_relu(z, {slope})" in text for slope in ("0.01", "1e-05", "0.2")] == [True, True, False]


def test_a_configuration_changes_the_operator(templates):
    spec = NormForward(2048, "layer_norm", True, True, 1e-5, "silu", False, True, True)
    assert spec.function == "layer_norm_silu_e4m3"
    usual, other = render(spec), render(spec, RowLaunch(rows=1, warps=8, programs=3))
    assert usual == render(spec, configuration(spec))
    assert other.operator.launches == {2048: Rows(rows=1, warps=8, least=1, programs=3)}
    assert usual.operator != other.operator
    with pytest.raises(InputError, match="two different kernels are called layer_norm_silu_e4m3"):
        render_files([usual, other], templates, "a test")


def test_a_row_fits_its_configuration():
    for spec in (s for width in range(1, 16385, 97) for s in norm_specs(width, PARTS[:1])):
        launched = configuration(spec)
        padded = padded_width(spec.width)
        assert padded >= spec.width > padded // 2
        assert launched.rows & (launched.rows - 1) == 0
        assert launched.rows * max(padded, 16) <= 32 * 32 * launched.warps  # 32 elements a thread
        assert launched.programs * launched.warps <= 64  # warps of a multiprocessor


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NormForward(0, "layer_norm", True, True, 1e-5, None, False, True, True), "0 wide"),
        (lambda: NormForward(2**20 + 1, "layer_norm", True, True, 1e-5, None, False, True, True), "1048577 wide"),
        (lambda: NormForward(8, "batch_norm", True, True, 1e-5, None, False, True, True), "batch_norm"),
        (lambda: NormForward(8, "rms_norm", True, False, 1e-5, "softplus", False, True, True), "softplus"),
        (lambda: NormForward(8, "rms_norm", activation="gate_sigmoid", multiplied=True), "not a gate"),
        (lambda: NormForward(8, add=True, multiplied=True), "multiplies what an activation, or a norm over rows"),
        (
            lambda: NormBackward(256, "block_norm", multiplied=True),
            "multiplies what an activation, or a norm over rows",
        ),
        (lambda: NormForward(8, "rms_norm", True, False, float("nan"), None, False, True, True), "eps"),
        (lambda: NormBackward(8, "rms_norm", True, False, -1.0, None, False, True), "eps"),
        (lambda: NormForward(8, activation="leaky_relu(1.0)"), r"no kernel has an activation 'leaky_relu\(1.0\)'"),
        (lambda: NormForward(8, activation="leaky_relu(-0.2)"), r"leaky_relu\(-0.2\)"),
        (lambda: NormBackward(8, activation="silu(0.2)"), r"silu\(0.2\)"),
        (lambda: NormForward(8, None, True, False, 1e-5, None, False, True, True), "neither weight nor bias"),
        (lambda: NormForward(8, None, False, False, 1e-5, None, False, False, True), "copy its input"),
        (lambda: NormBackward(8, None, False, False, 1e-5, None, True, False), "copy its input"),
        (lambda: NormForward(256, "block_norm", True, False, 1e-5, None, False, True, True), "neither weight nor bias"),
        (lambda: NormForward(624, "block_norm", False, False, 1e-5, None, False, True, True), "not 624"),
        (lambda: NormBackward(288, "block_norm", False, False, 1e-5, None, False, True, block=96), "power of two"),
        (lambda: RequantizeTranspose(4), "1 to 3 operands"),
        (lambda: Reduce(0), "1 to 6 operands"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


TAKES_NO_NONE = re.compile(r"^ *(return None\b|\w+, .*= .*\b(load_vector|mask_of|inside_of)\()", re.MULTILINE)


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "templates" / "triton").rglob("*.j2")), ids=lambda path: path.name
)
def test_none_is_returned_in_a_variable_of_its_own(path: Path) -> None:
    """Triton 3.6, that of torch 2.11, compiles neither `return None` nor None as one of several values."""
    assert TAKES_NO_NONE.search(path.read_text(encoding="utf-8")) is None
