"""Rankers in random spellings get the kernels of the zoo's way of writing them."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.support.codegen.policy_packages import Make
from tests.support.spellings.rankers import MODELS, Speller

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

SPELLINGS = int(os.environ.get("LOKA_SPELLINGS", "2"))  # of each model; more by `make fuzz`
RECIPE = "{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}"
MIXED = (
    "rules: [{match: '*.rank*', compute: keep}, {match: '*.compress*', compute: keep, optional: true}]\n"
    "mods: [{use: fuse_interaction}]\n"
)


def kernels(files: dict[str, str]) -> str:
    """The file of Triton kernels without the digest of what it was generated from."""
    return "\n".join(line for line in files["triton_kernels.py"].splitlines() if not line.startswith("STAMP = "))


@pytest.mark.parametrize("model", MODELS)
def test_every_spelling_has_the_same_kernels(model: str, package: Make, tmp_path: Path) -> None:
    texts: dict[tuple[str, ...], list[int | None]] = {}
    for seed in (None, *range(SPELLINGS)):
        name = f"spelled_{model}_{seed}"
        source = MODELS[model](Speller(seed))
        (tmp_path / f"{name}.py").write_text(source)
        policy = (
            f'version: 1\nname: spelled\nmodel: {{factory: "{name}:Model", inputs: "{name}:inputs", batch_size: 256}}\n'
            f"defaults: {RECIPE}\n{MIXED if model == 'wukong' else ''}"
        )
        plan, files, generated = package(f"gen_{name}", policy)
        assert not plan.skipped, source
        fused = sorted(each.what for each in plan.interactions)  # in each layer: one has the kernels of all
        texts.setdefault((kernels(files), *fused), []).append(seed)
        written = importlib.import_module(name)
        sys.modules.pop(name)
        torch.manual_seed(0)
        native = written.Model()
        patched = copy.deepcopy(native)
        inputs = written.inputs(32)
        with generated.apply(patched):
            error = patched(*inputs) - native(*inputs)
        assert error.norm() <= 0.15 * native(*inputs).norm(), source
    assert list(texts.values()) == [[None, *range(SPELLINGS)]]
