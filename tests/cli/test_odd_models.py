"""Models whose own methods do not keep to torch's conventions."""

from __future__ import annotations

import pytest

TOWER = """
import sys
import torch
from torch import nn

class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n, self.b = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 32)
{method}
    {kind} forward(self, x):
        {line}
        {last} self.b(self.n(self.a(x)))

def build():
    made = Tower()
    {made}
    return made

def example_inputs(batch_size):
    return (torch.randn({rows}, 64),)
"""
INVENTS = """
    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return lambda *arguments: None
"""
POLICY = """version: 1
name: tower
model: {factory: "towermodel:build", inputs: "towermodel:example_inputs", batch_size: 64}
defaults: {compute: fp8, scaling: rowwise, fuse: always}
"""


@pytest.fixture
def generated(tmp_path, monkeypatch, loka):
    """Generate for a variant of the tower."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tower.yaml").write_text(POLICY)

    def call(method="", kind="def", line="pass", last="return", made="pass", rows="batch_size"):
        text = TOWER.format(method=method, kind=kind, line=line, last=last, made=made, rows=rows)
        (tmp_path / "towermodel.py").write_text(text)
        monkeypatch.delitem(__import__("sys").modules, "towermodel", raising=False)
        return loka("generate", "tower.yaml")

    return call


def test_a_train_that_returns_nothing(generated):
    ran = generated("    def train(self, mode=True): super().train(mode)")
    assert ran.status == 0
    assert "2 of 2 sites" in ran.out


def test_a_copy_that_is_no_module(generated):
    ran = generated(INVENTS)
    assert ran.status == 0
    assert "copy.deepcopy made a NoneType of it" in ran.out


@pytest.mark.parametrize(
    ("kind", "last", "made"), [("async def", "return", "coroutine"), ("def", "yield", "generator")]
)
def test_a_forward_that_computes_nothing(kind, last, made, generated):
    ran = generated(kind=kind, last=last)
    assert ran.status == 2
    assert f"it returned a {made}, which computes nothing until it is run" in ran.err


def test_inputs_without_samples(generated):
    ran = generated(rows="0")
    assert ran.status == 2
    assert "returned empty tensors alone; return as many samples as are asked for" in ran.err


def test_a_shape_error_has_one_message(generated, caplog):
    ran = generated(line="x = x[:, 1:]")
    assert ran.status == 2
    assert "shapes cannot be multiplied" in ran.err
    assert "Traceback" not in caplog.text
