"""Mixing layers are found whichever way they are written."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from tests.support.spellings.mixing_layers import mixing_module

SIZES = (12, 20, 4, 5)
SPELLINGS = 40


def written(folder: Path, name: str, text: str) -> nn.Module:
    """The layer of a module with this text."""
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    layer: nn.Module = module.Layer()
    return layer


def traced(layer: nn.Module, sites: tuple[str, ...]) -> ForwardIR:
    inputs = {batch: ModelInputs((torch.randn(batch, *SIZES[:2]),), {}) for batch in (5, 8)}
    found = trace_forward(layer, "", capture_examples(layer, [""], inputs)[""], sites=sites)
    assert isinstance(found, ForwardIR), found
    return found


@pytest.mark.parametrize("seed", range(SPELLINGS))
def test_every_spelling_is_one_mixing_layer(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, text = f"spelled_{seed}", mixing_module(seed, SIZES)
    monkeypatch.setitem(sys.modules, name, sys)  # forgotten after the test
    forward = traced(written(tmp_path, name, text), ("rank", "compress"))
    assert [mix.sizes for mix in forward.mixes] == [SIZES], text
    (mix,) = forward.mixes
    assert len(mix.gemms) == len(mix.views) == 2
    inside = {forward.statements[place].target for place in mix.skipped}
    read = {
        ref.text for place, step in enumerate(forward.statements) if place not in mix.places for ref in step.operands
    }
    assert not inside & read, text
