"""Modes of quantization with products, residuals, kept sums and carried gradients: text, references, refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantization import Quantization
from loka.kernels.fused.rendering import render, render_files
from loka.templating.templates import load_templates
from tests.support.kernels.drawn_inputs import check_mode, last_arguments
from tests.support.kernels.product_cases import arguments, exact, inputs_of
from tests.support.kernels.quantized_cases import modes
from tests.support.kernels.rendered_cases import write_package

ROOT = Path(__file__).parents[3]
# norm, weight, bias, activation, add, times, residual
PARTS = [
    (None, False, False, None, True, True, True),
    ("layer_norm", True, True, "silu", True, False, True),
    ("block_norm", False, False, "hardswish", True, True, True),
]


def specs(width: int) -> list[NormForward | NormBackward]:
    """Each part in each mode, with the sum kept and a gradient carried where the mode writes values."""
    made: list[NormForward | NormBackward] = []
    for how in modes():
        writes = how.scaling != "maximum"
        for norm, weight, bias, activation, add, times, residual in PARTS:
            if norm == "block_norm" and width % 256:
                continue
            affine = (width, norm, weight, bias, 1e-5, activation, add, True)
            made.append(NormForward(*affine, writes, times=times, residual=residual, keep=writes, how=how))
            sums = {"times": times, "summed": norm is not None, "residual_grad_in": True, "residual_grad_out": writes}
            made.append(NormBackward(*affine, **sums, how=how))
    return made


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    every = [spec for width in (13, 512) for spec in specs(width)]
    return write_package(tmp_path_factory.mktemp("sums") / "rendered_mode_sums", every)


@pytest.mark.parametrize("width", [13, 512])
def test_every_mode_against_float64(package, width):
    tensors = inputs_of(33, width, torch.float32)
    for spec in specs(width):
        forward = isinstance(spec, NormForward)
        known = exact(spec, tensors, spec.residual if forward else spec.summed)
        y = known["y" if forward else "dx"]
        last = last_arguments(spec, y)
        dtype = [torch.float32] if forward and spec.takes_dtype else []
        got = package.run(spec, *arguments(spec, tensors, known), *last, *dtype)
        check_mode(got, spec, y, 1e-4 * y.abs().amax(1, keepdim=True), last)
        for name in ("kept", "residual_grad_out"):
            assert (name in got) == (name in spec.results)
            if name in got:
                torch.testing.assert_close(got[name].double(), known[name], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_rendered_as_ruff_formats_it(tmp_path):
    templates = load_templates()
    for width in (13, 512, 16384):
        kernels = [render(spec, templates) for spec in specs(width)]
        assert len({kernel.function for kernel in kernels}) == len(kernels)
        for name, text in render_files(kernels, templates, "a test").items():
            (tmp_path / f"w{width}_{name}").write_text(text)
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for command in (["format", "--check", "--diff"], ["check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_a_maximum_alone_keeps_and_carries_nothing():
    how = Quantization("maximum")
    with pytest.raises(InputError, match="keeps no sum"):
        NormForward(512, None, False, False, 0.0, None, True, True, False, keep=True, how=how)
    with pytest.raises(InputError, match="has no residual_grad_out"):
        NormBackward(
            512, "block_norm", False, False, 1e-5, None, True, True, summed=True, residual_grad_out=True, how=how
        )
