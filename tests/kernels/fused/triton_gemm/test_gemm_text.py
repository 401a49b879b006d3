"""The text of rendered products: formatted, one for each spec, with nothing in it that is not read."""

from __future__ import annotations

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loka.devices.launches import Tiling
from loka.errors import InputError
from loka.kernels.fused.rendering import render, render_files
from loka.kernels.fused.triton_gemm import gemm_launch
from loka.kernels.fused.triton_gemm.gemm_spec import Epilogue, GroupedGemm, TiledGemm
from loka.kernels.fused.triton_gemm.gemm_tiling import candidates
from loka.numerics.enums import Scaling
from loka.templating.templates import load_templates
from tests.support.kernels.gemm_cases import EPILOGUES, FAST, NORM, PRECISE, blocked

ROOT = Path(__file__).parents[4]
SHAPES = [(512, 512), (479, 512), (512, 479), (24, 13), (1, 13), (256, 3456)]
SPECS = [
    *[
        TiledGemm(n, k, operands, epilogue=epilogue)
        for (n, k), operands, epilogue in itertools.product(SHAPES, ("e4m3", "bfloat16"), EPILOGUES)
    ],
    *[
        TiledGemm(1024, 1024, accumulation=a, scaling_a=s, scaling_b=t, epilogue=e)
        for a, s, t, e in itertools.product(
            (FAST, PRECISE),
            (Scaling.ROWWISE, Scaling.TENSORWISE),
            (Scaling.ROWWISE, Scaling.TENSORWISE),
            (EPILOGUES[0], EPILOGUES[1], blocked(64), blocked(128), blocked(256)),
        )
    ],
    *[GroupedGemm(tuple((SHAPES * 2)[:count]), o) for count in range(1, 9) for o in ("e4m3", "bfloat16")],
]  # fmt: skip


@pytest.fixture(scope="module")
def templates():
    return load_templates()


@pytest.mark.slow
def test_every_variant_is_formatted_and_linted_as_rendered(tmp_path, templates):
    kernels = {kernel.function: kernel for kernel in (render(spec, templates) for spec in SPECS)}
    others = [
        render(spec, templates, launched=tiling)
        for spec in (
            TiledGemm(512, 512),
            TiledGemm(512, 512, epilogue=NORM),
            GroupedGemm(((24, 64),)),
        )
        for tiling in candidates(spec)[1:]
    ]
    for index, group in enumerate([list(kernels.values()), *([other] for other in others)]):
        for name, text in render_files(group, templates, "a test", stamp="0" * 64).items():
            (tmp_path / f"g{index}_{name}").write_text(text)
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for command in (["format", "--check", "--diff"], ["check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_one_name_is_one_text_and_one_text_one_name(templates):
    texts: dict[str, str] = {}
    functions: dict[str, str] = {}
    for spec in SPECS:
        kernel = render(spec, templates)
        assert texts.setdefault(kernel.name, kernel.text) == kernel.text
        assert functions.setdefault(kernel.function, kernel.name) == kernel.name
    assert len(set(texts.values())) == len(texts) > 130


@pytest.mark.slow
def test_nothing_is_passed_or_made_that_is_not_read(templates):
    for spec in SPECS:
        tree = ast.parse(render(spec, templates).text)
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert functions[-1].name == spec.function
        for function in functions:
            names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            assert {argument.arg for argument in function.args.args} <= read, (spec, function.name)
            assert {node.id for node in names if isinstance(node.ctx, ast.Store)} <= read, (spec, function.name)


def test_only_what_is_used_is_imported(templates):
    plain = render_files([render(GroupedGemm(((13, 479),), "bfloat16"), templates)], templates, "a test")
    assert "TensorDescriptor" not in plain["triton_kernels.py"]
    assert "from loka.kernels.fused.triton_gemm import gemm_launch, gemm_reference\n" in plain["fused.py"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TiledGemm(0, 16), "n = 0"),
        (lambda: TiledGemm(16, 1 << 21), "k = 2097152"),
        (lambda: TiledGemm(16, 16, "e5m2"), "e5m2"),
        (lambda: TiledGemm(16, 16, scaling_a=Scaling.BLOCKWISE_1X128), "blockwise_1x128"),
        (lambda: TiledGemm(1024, 512, epilogue=NORM), "at most 512"),
        (lambda: TiledGemm(300, 512, epilogue=blocked(256)), "do not divide"),
        (lambda: TiledGemm(512, 512, epilogue=blocked(256, out="e4m3")), "several blocks"),
        (lambda: Epilogue(norm="batch_norm"), "batch_norm"),
        (lambda: Epilogue(norm="block_norm", block=100), "not 100"),
        (lambda: Epilogue(activation="tanh"), "tanh"),
        (lambda: Epilogue(weight=True), "neither weight nor bias"),
        (lambda: Epilogue(norm="rms_norm", eps=float("nan")), "eps"),
        (lambda: Epilogue(out="e5m2"), "e5m2"),
        (lambda: TiledGemm(16, 16, epilogue=Epilogue(out="float16")), "torch.scaled_mm"),
        (lambda: GroupedGemm(((16, 16),), out="e4m3"), "e4m3"),
        (lambda: GroupedGemm(((16, 0),)), "k = 0"),
        (lambda: GroupedGemm(()), "1 to 8 products"),
        (lambda: GroupedGemm(((16, 16),) * 9), "1 to 8 products"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_tile_that_is_no_block_is_refused(templates):
    with pytest.raises(InputError, match="not a block"):
        render(TiledGemm(512, 512, epilogue=blocked(256)), templates, launched=Tiling(64, 128, 128, 3, 4))


def test_one_row_has_the_stride_of_many():
    one = torch.arange(32.0).view(32, 1).t()
    assert one.is_contiguous()
    assert one.stride() == (1, 1)
    assert gemm_launch.aligned(one).stride() == (32, 1)
    assert torch.equal(gemm_launch.aligned(one), one)
