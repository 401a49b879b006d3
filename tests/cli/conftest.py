"""A small model in a temporary folder, and the command line called in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loka.codegen import generation
from loka.plan import planner
from loka.plan.planner import Planned
from tests.support.bench_device import short_turns

__all__ = ["short_turns"]

MODEL = """\
import torch
from torch import nn


class Cross(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = nn.Parameter(torch.randn(24, width) * 0.1)
        self.up = nn.Linear(24, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        low = torch.nn.functional.linear(x, self.down)
        return self.norm(self.up(low)) + x


class Shop(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(13, 32)
        self.layers = nn.ModuleList([Cross(32) for _ in range(2)])
        self.head = nn.Linear(32, 1)

    def forward(self, x):
        x = torch.relu(self.dense(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)


def build():
    return Shop()


def inputs(batch_size):
    return (torch.randn(batch_size, 13),)


def example_inputs(batch_size):
    return inputs(batch_size)


class Rows:
    def __init__(self, batch_size, seed, count):
        self.batch_size, self.seed, self.count = batch_size, seed, count

    def __len__(self):
        return self.count

    def __iter__(self):
        made = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            x = torch.randn(self.batch_size, 13, generator=made)
            yield (x,), (x[:, 0] + 0.5 * x[:, 1] > 0).float()


def batches(batch_size, seed):
    return Rows(batch_size, seed, 12)


def test_batches(batch_size, seed):
    return Rows(256, 1000, 2)


def loss(output, target):
    return torch.nn.functional.binary_cross_entropy_with_logits(output, target)


def many():
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(100)])


def many_inputs(batch_size):
    return (torch.randn(batch_size, 16),)


def raising():
    raise ValueError("no such table")


def raising_inputs(batch_size):
    raise KeyError("dense")


def no_module():
    return 3


def wrong_inputs(batch_size):
    return (torch.randn(batch_size, 14),)


number = 3
"""

POLICY = """\
version: 1
name: shop
model: {factory: "shopmodel:build", inputs: "shopmodel:inputs", batch_size: 64}
train:
  batches: "shopmodel:batches"
  test: "shopmodel:test_batches"
  loss: "shopmodel:loss"
defaults:
  compute: fp8
rules:
  - match: {max_n: 1}
    compute: keep
  - match: "layers.*.up"
    fuse: always
"""


@dataclass(frozen=True)
class Ran:
    """What one call of the command line gave."""

    status: int
    out: str
    err: str


@dataclass(frozen=True)
class Shop:
    """A folder with a model and a policy, which is the current directory."""

    folder: Path
    policy: str = "policies/shop.yaml"

    def write_policy(self, text: str) -> str:
        """Write the policy; gives its path."""
        path = self.folder / self.policy
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return self.policy

    def write_module(self, name: str, text: str) -> None:
        """Write NAME.py, which is imported anew."""
        (self.folder / f"{name}.py").write_text(text, encoding="utf-8")
        sys.modules.pop(name, None)

    def edit_model(self, old: str, new: str) -> None:
        """Change the model's file; the next call of the command line takes it anew."""
        text = (self.folder / "shopmodel.py").read_text(encoding="utf-8")
        assert old in text
        self.write_module("shopmodel", text.replace(old, new))

    def files(self) -> dict[str, bytes]:
        """Every file with its content, byte code left out."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }


PLANNED: dict[object, Planned] = {}  # by everything that a plan of a shop is made from


@pytest.fixture
def plans_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy is planned once for all tests whose folders hold the same files, but for what LoKA wrote there."""
    plan = planner.planned

    def once(policy: Any, gains: bool = False, prospects: bool = False, progress: Any = str) -> Planned:
        files = Shop(tmp_path).files().items()
        made_from = tuple(each for each in files if not each[0].startswith(("build/", "generated/")))
        key = (str(getattr(policy, "path", policy)), os.path.relpath(os.curdir, tmp_path), gains, prospects, made_from)
        if key not in PLANNED:
            made = plan(policy, gains, prospects, progress)
            if made.ignored:  # which warns
                return made
            PLANNED[key] = made
        return PLANNED[key]

    for module in (planner, generation):
        monkeypatch.setattr(module, "planned", once)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plans_once: None) -> Iterator[Shop]:
    """A fresh folder with shopmodel.py and policies/shop.yaml, whose policies are planned once."""
    (tmp_path / "shopmodel.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("shopmodel", None)
    made = Shop(tmp_path)
    made.write_policy(POLICY)
    yield made
    sys.modules.pop("shopmodel", None)


@pytest.fixture
def loka(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Call the command line; an exception that keeps its traceback is raised here.

    How draws decide a GEMM is tested in tests/probe: here four are enough.
    """
    from loka.cli.main import app

    monkeypatch.setattr("loka.probe.learn.LIMIT", 4)

    def call(*arguments: str) -> Ran:
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False, prog_name="loka")
        return Ran(result.exit_code, result.stdout, result.stderr)

    return call


@pytest.fixture
def refuse(shop: Shop, loka: Callable[..., Ran]) -> Callable[..., str]:
    """Call the command line, which has to refuse: nothing on stdout, no file changed. Gives the message."""

    def call(*arguments: str, status: int = 2) -> str:
        before = shop.files()
        ran = loka(*arguments)
        assert (ran.status, ran.out) == (status, ""), ran.err
        assert "Traceback" not in ran.err
        assert shop.files() == before
        return ran.err

    return call


@pytest.fixture
def policy_text() -> str:
    """The text of policies/shop.yaml."""
    return POLICY
