"""The text of all families of kernels: as ruff formats it, and nothing that its linter finds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loka.kernels.fused.matrix_kernels import Reduce, RequantizeTranspose
from loka.kernels.fused.rendering import render_all, render_files
from loka.templating.templates import load_templates
from tests.support.kernels import recorded_cases
from tests.support.kernels.aligned_cases import ALIGNED
from tests.support.kernels.product_cases import backwards, every, forwards
from tests.support.kernels.quantized_cases import CAST_TRANSPOSES, specs, sum_specs
from tests.support.kernels.recorded_cases import TRANSPOSES, fused_cast_transposes, recorded
from tests.support.kernels.rendered_cases import BLOCK_PARTS, PARTS, norm_specs
from tests.support.kernels.weight_cases import WEIGHTS, WIDE
from tests.support.pairwise import pairwise

ROOT = Path(__file__).parents[3]


def norms(width: int) -> list[Any]:
    return norm_specs(width, PARTS if width % 256 else PARTS + BLOCK_PARTS)


def wide(width: int) -> list[Any]:
    specs = [*norms(width), *forwards(width), *backwards(width), *recorded(width)]
    return list({spec.function: spec for spec in specs}.values())


BY_WIDTH: dict[str, tuple[Callable[[int], list[Any]], tuple[int, ...]]] = {
    "norms": (norms, (13, 24, 512, 2048, 4096, 8192, 8256)),
    "wide": (wide, (16389, 24576, 123200)),
    "modes": (specs, (13, 24, 479, 624, 2048, 8192)),
    "sums": (sum_specs, (13, 512, 16384)),
    "products": (every, (13, 512, 3456, 8256)),
    "counted": (recorded, (13, 479, 512, 2048, 8192)),
    "transposed": (fused_cast_transposes, (13, 512, 2048)),
}
OTHERS = [
    *map(RequantizeTranspose, (1, 2, 3)),
    *map(Reduce, range(1, 7)),
    *CAST_TRANSPOSES,
    *recorded_cases.CAST_TRANSPOSES,
    *TRANSPOSES,
    *WEIGHTS,
    *WIDE,
    *ALIGNED,
]


@pytest.mark.slow
def test_every_family_is_formatted_and_linted_as_rendered(tmp_path: Path) -> None:
    files = {"others": OTHERS}
    for family, (of_width, widths) in BY_WIDTH.items():
        chosen = pairwise(spec for width in widths for spec in of_width(width))
        files |= {f"{family}_{width}": [spec for spec in chosen if spec.width == width] for width in widths}
    templates = load_templates()
    for file, rendered in files.items():
        kernels = render_all(rendered)
        for name, text in render_files(kernels, templates, "a test", stamp="0" * 64).items():
            (tmp_path / f"{file}_{name}").write_text(text)
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
    for command in (["format", "--check", "--diff"], ["check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command, *config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.parametrize("of_width", [specs, sum_specs, every, fused_cast_transposes], ids=lambda of: of.__name__)
def test_every_kernel_has_a_name_of_its_own(of_width: Callable[[int], list[Any]]) -> None:
    assert len({spec.function for spec in of_width(512)}) == len(of_width(512))
