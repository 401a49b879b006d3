"""The checklists of CONTRIBUTING.md: the files that they name exist, and what they ask for is enough."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from loka.devices import targets
from loka.devices.hopper import H100
from loka.devices.targets import spec_of
from loka.errors import InputError, LokaError
from loka.graph.patterns.norm import TORCH_NORMS
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.norm_spec import NormForward
from loka.kernels.fused.norm.norm_values import norm_title
from loka.kernels.fused.norm.norms import NORMS
from loka.kernels.gemm import catalogue, scaled_mm
from loka.kernels.gemm.catalogue import GEMM_KERNELS, kernel_named, operator_named
from loka.mods import mod_settings
from loka.mods.protocols import ModuleMod
from loka.mods.registry import module_mod
from loka.numerics import scalings
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import dequantize, quantize
from loka.numerics.scalings import BLOCKS, TOGETHER, Block
from loka.policy.policy_schema import json_schema
from loka.policy.site_schema import ScalingChoice
from tests.support import added_mods, markdown
from tests.support.added_activation import activation_edits
from tests.support.added_norm import norm_edits
from tests.support.edited_loka import Edit, write_edited_loka
from tests.support.processes.launch import environment

PAGE = markdown.read(markdown.REPOSITORY / "CONTRIBUTING.md")
CHECKLISTS = {title: text for title, _, text in (part.partition("\n") for part in PAGE.split("\n## Add ")[1:])}
AT_MOST = {
    "a GEMM library": 2,
    "a mod": 3,
    "a target device": 2,
    "a scaling recipe": 6,
    "a norm": 3,
    "an activation": 2,
}


def _files(checklist: str) -> list[str]:
    """The file that each box of a checklist names first."""
    return re.findall(r"^- \[ \] `([^`]+)`", checklist.partition("\n## ")[0], re.MULTILINE)


def test_there_is_a_checklist_for_each_kind_of_addition() -> None:
    assert {title: len(_files(text)) for title, text in CHECKLISTS.items()} == AT_MOST


@pytest.mark.parametrize("title", AT_MOST)
def test_the_files_of_a_checklist_exist(title: str) -> None:
    """A file that is to be made is called NAME or TARGET; one that is made so already stands for it."""
    made = ("hard_swish", "mslk", "h100", "rms_norm")
    for path in _files(CHECKLISTS[title]):
        names = [path.replace("NAME", name).replace("TARGET", name) for name in made]
        assert any((markdown.REPOSITORY / name).exists() for name in names), path


def test_every_other_path_on_the_page_exists() -> None:
    assert [
        path for path in markdown.paths(PAGE) if not (markdown.REPOSITORY / path.replace("TARGET", "h100")).exists()
    ] == []


def test_every_make_target_on_the_page_is_there() -> None:
    makefile = markdown.read(markdown.REPOSITORY / "Makefile")
    named = set(re.findall(r"`make ([\w-]+)", PAGE))
    assert {"test", "test-gpu", "demo"} <= named
    assert [name for name in named if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


@dataclass(frozen=True, slots=True)
class _Toy:
    """A kernel of a library that only this file knows."""

    name: str = "toy.rowwise"
    operator: str = "loka::scaled_mm"
    library: None = None


def test_a_library_is_found_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"there is no kernel 'toy\.rowwise'"):
        kernel_named("toy.rowwise")
    monkeypatch.setattr(catalogue, "GEMM_KERNELS", (*GEMM_KERNELS, _Toy()))
    operator_named.cache_clear()
    assert kernel_named("toy.rowwise") == _Toy()
    assert operator_named("toy.rowwise") is torch.ops.loka.scaled_mm.default
    operator_named.cache_clear()


def test_a_mod_is_found_by_its_line_its_schema_and_its_file() -> None:
    with added_mods.registered():
        assert isinstance(module_mod("six_relu"), ModuleMod)
        assert "six_relu" in str(json_schema(mod_settings.MOD_SCHEMAS))


def test_a_target_is_found_by_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="target 'toy' is not known"):
        spec_of("toy")
    toy = replace(H100, name="toy", multiprocessors=144)
    monkeypatch.setitem(targets.DEVICES, "toy", toy)
    assert spec_of("toy") is toy


def test_quantizers_follow_the_table_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1x32 by the table alone: here in the place of 1x128, as a test cannot add a member to an enum."""
    monkeypatch.setitem(scalings.BLOCKS, Scaling.BLOCKWISE_1X128, Block(1, 32, "1x32", "one scale for 32 neighbours"))
    x = torch.randn(6, 80)
    x[2, 40] = 1000.0
    blocks = quantize(x, format=Format.E4M3, scaling=Scaling.BLOCKWISE_1X128, power_of_two=True)
    assert blocks.scale.shape == (6, 3)
    for column in range(3):
        part = x[:, 32 * column : 32 * (column + 1)]
        alone = quantize(part, format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True)
        torch.testing.assert_close(blocks.scale[:, column : column + 1], alone.scale, rtol=0, atol=0)
        left = dequantize(blocks)[:, 32 * column : 32 * (column + 1)]
        torch.testing.assert_close(left, dequantize(alone), rtol=0, atol=0)


def test_every_scaling_is_in_each_table_of_the_checklist() -> None:
    assert set(BLOCKS) == set(Scaling) == {scaling for pair in TOGETHER for scaling in pair}
    assert {scaling.value for scaling in Scaling} == {choice.value for choice in ScalingChoice} - {"blockwise"}
    taken = {scaling for pair in H100.scaled_mm.pairs for scaling in pair}
    assert taken <= {scaling.value for scaling in scaled_mm._SCALING_TYPE}


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_has_a_title_and_a_reference_with_its_gradient(norm: str) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    forward = norm_reference.norm_forward(x, norm=norm, eps=1e-5, block=16)
    (expected,) = torch.autograd.grad(forward.y.square().sum(), x)
    saved: dict[str, Tensor | None] = {name: getattr(forward, name).detach() for name in NORMS[norm].saved}
    grad = (2 * forward.y).detach()
    made = norm_reference.norm_backward(grad, x=x.detach(), norm=norm, eps=1e-5, block=16, **saved)
    torch.testing.assert_close(made.x, expected, rtol=1e-4, atol=1e-5)
    given = NORMS[norm].over_columns  # its vectors
    spec = NormForward(64, norm, given, False, 1e-5, None, add=given, quantize=False, save=False, block=16)
    assert NORMS[norm].title in norm_title(spec)


def test_every_norm_is_in_each_table_of_the_checklist() -> None:
    """A block_norm is an rms_norm between changes of view, which are put together; a batch_norm is a module."""
    assert set(NORMS) - set(TORCH_NORMS) == {"block_norm", "batch_norm"}
    assert [norm for norm in TORCH_NORMS if not hasattr(F, norm)] == []
    with pytest.raises(LokaError, match=r"Toy goes over whole rows and saves no rstd; name it in `saved`"):
        replace(NORMS["rms_norm"], title="Toy", saved=("mean",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "edits", "added", "compared"),
    [
        ("a norm", norm_edits.EDITS, "added_norm.norm_taken_through", 96),
        ("an activation", activation_edits.EDITS, "added_activation.activation_taken_through", 4),
    ],
)
def test_it_is_added_by_the_files_of_the_checklist(
    tmp_path: Path, title: str, edits: tuple[Edit, ...], added: str, compared: int
) -> None:
    """torch.nn.functional.normalize or softsign, in a copy of LoKA: its kernels, and a model from policy to `verify`.

    `compared` results of kernels are compared.
    """
    pytest.importorskip("triton", reason="Triton interprets kernels; this platform has none")
    assert {edit.file for edit in edits} == set(_files(CHECKLISTS[title]))
    write_edited_loka(tmp_path, edits)
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{added}"],
        cwd=tmp_path,  # first on the path of what is imported
        env=environment(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == compared
