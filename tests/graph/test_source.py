"""The functions that a forward may call, and their definitions."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from loka.graph.source import definition, functions_of
from tests.support.models import ir_models as zoo

CODE = """
import torch
from torch import nn

SCALE = 2.0

def helper(x):
    return x * SCALE

class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.width, self.eps, self.unused = 4, 0.5, 1
        self.act = torch.relu
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.act(self.inner(x)) * self.eps

    def inner(self, x):
        return helper(x) @ self.w + self.width

class Derived(Base):
    def forward(self, x):
        return super().forward(self.norm(x))
"""


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], nn.Module]:
    def load(code: str) -> nn.Module:
        load.count += 1  # type: ignore[attr-defined]
        path = tmp_path / f"hashed_{load.count}.py"  # type: ignore[attr-defined]
        path.write_text(code)
        spec = importlib.util.spec_from_file_location("hashed", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "hashed", module)
        spec.loader.exec_module(module)
        return module.Derived()  # type: ignore[no-any-return]

    load.count = 0  # type: ignore[attr-defined]
    return load


def test_what_a_forward_runs_through_is_followed() -> None:
    names = [function.__qualname__ for function in functions_of(zoo.FunctionWithBlock())]
    assert names == ["FunctionWithBlock.forward", "detached_gate"]
    assert functions_of(nn.Linear(2, 2)) == ()
    assert [f.__qualname__ for f in functions_of(zoo.Decorated())] == ["Decorated.forward"]


def test_a_comment_at_the_left_margin_does_not_hide_a_method(load: Callable[[str], nn.Module]) -> None:
    code = CODE.replace("        return super()", "# at the left margin\n        return super()")
    forward = type(load(code)).forward
    tree = definition(forward)  # type: ignore[arg-type]
    assert tree is not None
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.Return))
    assert code.splitlines()[found.lineno - 1].strip() == "return super().forward(self.norm(x))"


LAMBDAS = CODE.replace(
    "self.act = torch.relu", "self.act, self.other = lambda x: (x +\n            SCALE), lambda x: x * 3"
)


def test_a_lambda_is_read(load: Callable[[str], nn.Module]) -> None:
    module = load(LAMBDAS)
    found = {function.__name__: definition(function) for function in functions_of(module)}
    made = found["<lambda>"]
    assert isinstance(made, ast.Lambda)
    assert ast.unparse(made) == "lambda x: x + SCALE"
    assert LAMBDAS.splitlines()[made.lineno - 1].lstrip().startswith("self.act")
