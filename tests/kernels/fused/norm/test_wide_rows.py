"""Rows that no program holds whole: their text, what is refused, and the kernels in Triton's interpreter."""

from __future__ import annotations

import ast

import pytest
import torch

from loka.errors import InputError
from loka.kernels.fused import operators
from loka.kernels.fused.kernel_values import LARGEST_HELD, LARGEST_WIDTH
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norm_values import wide_configuration
from loka.kernels.fused.quantization import Quantization
from loka.kernels.fused.rendering import render
from loka.templating.templates import load_templates
from tests.support.kernels.product_cases import backwards, forwards
from tests.support.kernels.recorded_cases import recorded
from tests.support.kernels.rendered_cases import BLOCK_PARTS, PARTS, norm_specs

LAYER_NORM = ("layer_norm", True, True, 1e-5, None, False)


def all_specs(width: int) -> list[NormForward | NormBackward]:
    norms = norm_specs(width, PARTS if width % 256 else PARTS + BLOCK_PARTS)
    return [*norms, *forwards(width), *backwards(width), *recorded(width)]


@pytest.mark.slow
@pytest.mark.parametrize("width", [16389, 24576])
def test_nothing_is_passed_or_made_that_is_not_read(width):
    templates = load_templates()
    for spec in all_specs(width):
        tree = ast.parse(render(spec, templates).text)
        for function in (node for node in tree.body if isinstance(node, ast.FunctionDef)):
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            made = {node.id for node in names if isinstance(node.ctx, ast.Store)} - {"_"}
            passed = {argument.arg for argument in function.args.args}
            assert passed | made <= read, (spec, function.name)
            tests = [ast.unparse(node.test) for node in ast.walk(function) if isinstance(node, ast.If)]
            guesses = isinstance(spec, NormForward) and spec.quantize and spec.how.scaling == "rowwise"
            assert tests == (["scale != guess"] if guesses and function.name.startswith("_") else [])


def test_wide_and_held_rows_meet():
    templates = load_templates()
    held, wide = (render(NormForward(width, *LAYER_NORM, True, True), templates) for width in (16384, 16385))
    assert not held.text  # one kernel for all widths
    assert list(held.operator.launches) == [16384]
    assert "tl.range(0, 16385, 4096" in wide.text


def test_chunks_hold_whole_blocks():
    for block in (2, 256, 2048, 16384):
        for spec in (
            NormForward(32768, "block_norm", False, False, 1e-5, None, False, True, True, block=block),
            NormBackward(32768, "block_norm", False, False, 1e-5, None, False, True, block=block),
        ):
            launched = wide_configuration(spec)
            assert launched.chunk % block == 0
            assert launched.rows * launched.chunk <= 32 * 32 * launched.warps  # 32 elements a thread


def test_parts_of_rows_fill_the_device_and_no_more(monkeypatch):
    monkeypatch.setattr(operators, "multiprocessors", lambda device: 132)
    parts = {}
    for rows in (0, 1, 16, 17, 2048):
        x = torch.empty(rows, 24576, device="meta")
        on_gpu = type("OnGpu", (), {"shape": x.shape, "device": torch.device("cuda", 0)})()
        parts[rows] = operators.row_parts(on_gpu, rows=16, across=24, per_multiprocessor=3)
    assert parts == {0: 1, 1: 1, 16: 1, 17: 2, 2048: 16}
    assert operators.row_parts(torch.empty(2048, 24576), rows=16, across=24, per_multiprocessor=3) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NormForward(LARGEST_WIDTH + 1, *LAYER_NORM, True, True), f"rows have 1 to {LARGEST_WIDTH}"),
        (
            lambda: NormForward(LARGEST_HELD + 1, *LAYER_NORM, True, True, how=Quantization("blockwise")),
            "rowwise or static or maximum, not blockwise",
        ),
        (
            lambda: NormBackward(LARGEST_HELD + 1, *LAYER_NORM, True, how=Quantization("tensorwise")),
            "rowwise or static or maximum, not tensorwise",
        ),
        (
            lambda: NormForward(2**15, "block_norm", False, False, 1e-5, None, False, True, True, block=2**15),
            f"2 to {LARGEST_HELD}, not 32768",
        ),
    ],
)
def test_what_no_kernel_does_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()
