"""The fingerprint of a forward: it tells when the module's own forward is no longer the planned one, and only then."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from loka.graph.capture.captured import CannotCaptureError
from loka.graph.fingerprint import Fingerprint, changed_forward, fingerprint
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
        self.width, self.slope, self.unused = 4, 0.5, 1
        self.act = torch.relu
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return self.act(self.inner(x)) * self.slope

    def inner(self, x):
        return helper(x) @ self.w + self.width

class Derived(Base):
    def forward(self, x):
        return super().forward(self.norm(x))
"""
Load = Callable[[str], nn.Module]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    loaded: list[Path] = []

    def load(code: str) -> nn.Module:
        path = tmp_path / f"planned_{len(loaded)}.py"
        loaded.append(path)
        path.write_text(code)
        spec = importlib.util.spec_from_file_location("planned", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "planned", module)
        spec.loader.exec_module(module)
        return module.Derived()  # type: ignore[no-any-return]

    return load


def taken(module: nn.Module, *inlined: str, size: tuple[int, ...] = (4,)) -> Fingerprint:
    calls = [[((torch.randn(rows, *size),), dict[str, Any]())] for rows in (5, 8)]
    return fingerprint(module, inlined, *calls)


def difference(module: nn.Module, planned: Fingerprint, *inlined: str) -> str | None:
    return changed_forward(module, inlined, planned, {})


def test_it_reads_as_the_operations_of_the_forward(load: Load) -> None:
    (call,) = taken(load(CODE), "norm").calls
    assert call.inputs == "(('tuple', (('tensor', 'float32', ((5, 8), 4)),)), ('dict', ()))"
    assert call.training == (
        "v0 = layer_norm(x, [4], self.norm.weight, self.norm.bias, 1e-05)",
        "v1 = mul(v0, 2.0)",
        "v2 = matmul(v1, self.w)",
        "v3 = add(v2, 4)",
        "v4 = relu(v3)",
        "v5 = mul(v4, 0.5)",
        "return v5",
    )
    assert call.evaluation == ()  # the same


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("super().forward(self.norm(x))", "super().forward(self.norm(x) + 1)", "v1 = add(v0, 1)"),
        ("self.inner(x)) * self.slope", "self.inner(x)) / self.slope", "v5 = div(v4, 0.5)"),
        ("@ self.w + self.width", "@ self.w - self.width", "v3 = sub(v2, 4)"),
        ("return x * SCALE", "return x + SCALE", "v1 = add(v0, 2.0)"),
        ("SCALE = 2.0", "SCALE = 3.0", "v1 = mul(v0, 3.0)"),
        ("= 4, 0.5, 1", "= 5, 0.5, 1", "v3 = add(v2, 5)"),
        ("= 4, 0.5, 1", "= 4, 0.25, 1", "v5 = mul(v4, 0.25)"),
        ("torch.relu", "torch.tanh", "v4 = tanh(v3)"),
    ],
)
def test_a_change_of_what_was_planned_is_named_with_its_line(load: Load, old: str, new: str, found: str) -> None:
    assert old in CODE
    planned = taken(load(CODE), "norm")
    said = difference(load(CODE.replace(old, new)), planned, "norm")
    assert said is not None
    place, _, operations = said.partition("': ")
    assert place.startswith("its own forward is another at planned_1.py:")
    assert operations.startswith(f"{found}, planned was v")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("4, 0.5, 1", "4, 0.5, 2"),  # nothing reads it
        ("torch.ones", "torch.zeros"),
        ("import torch\n", "import torch\n# a comment\n"),
        ("self.act(self.inner(x)) * self.slope", "torch.mul(self.act(self.inner(x)), self.slope)"),
    ],
)
def test_a_change_of_anything_else_is_none(load: Load, old: str, new: str) -> None:
    assert old in CODE
    assert difference(load(CODE.replace(old, new, 1)), taken(load(CODE), "norm"), "norm") is None


def test_another_value_of_a_float_is_seen(load: Load) -> None:
    module = load(CODE)
    planned = taken(module, "norm")
    module.slope = 0.25  # type: ignore[assignment]
    assert "0.25), planned was" in str(difference(module, planned, "norm"))
    module.slope = 0.5  # type: ignore[assignment]
    assert difference(module, planned, "norm") is None


def test_an_inlined_child_of_torch_counts_and_a_called_one_may_be_another() -> None:
    module = zoo.Layer()
    inlined = ("fmb_norm", "fmb", "fmb.1")
    planned = taken(module, *inlined, size=(8, 16))
    module.out_norm = nn.Sequential(nn.Identity(), nn.Tanh())
    assert difference(module, planned, *inlined) is None
    module.fmb[1].eps = 1e-3
    assert "0.001), planned was" in str(difference(module, planned, *inlined))
    module.fmb[1] = nn.RMSNorm(32)
    assert "rms_norm(" in str(difference(module, planned, *inlined))


def test_it_does_not_depend_on_values_dtypes_and_devices() -> None:
    planned = taken(zoo.Layer(), "fmb_norm", size=(8, 16))
    for made in (zoo.Layer().to(torch.bfloat16), zoo.Layer().double(), zoo.Layer().to("meta")):
        with torch.autocast("cpu"), torch.no_grad():
            assert difference(made, planned, "fmb_norm") is None
        assert taken(made.to_empty(device="cpu").float(), "fmb_norm", size=(8, 16)) == planned


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Batch:
    rows: Tensor
    mask: Tensor | None
    scale: float


class Structured(nn.Module):
    def forward(self, batch: Batch, *, sides: dict[str, Any]) -> dict[str, Any]:
        x = batch.rows * batch.scale
        return {"pair": Pair(x + sides["left"][0], x), "rows": x.shape[0], "mask": batch.mask}


def test_arguments_and_results_may_be_nested() -> None:
    def call(rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (Batch(torch.randn(rows, 3), None, 2.0),), {"sides": {"left": [torch.randn(rows, 3)], "name": "a"}}

    planned = fingerprint(Structured(), (), [call(5)], [call(8)])
    assert planned.calls[0].training == (
        "v0 = mul(batch.rows, 2.0)",
        "v1 = add(v0, sides['left'][0])",
        "return {'pair': Pair[v1, v0], 'rows': n0, 'mask': None}",
    )
    assert difference(Structured(), planned) is None


class Opaque:
    rows = 2


def test_an_argument_that_cannot_be_described_is_refused() -> None:
    with pytest.raises(CannotCaptureError, match=r"among its arguments is a .*\.Opaque, which"):
        fingerprint(nn.Identity(), (), [((Opaque(),), {})], [((Opaque(),), {})])


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 6 else x


def test_a_condition_on_sizes_is_part_of_it() -> None:
    planned = taken(Branches())
    assert planned.calls[0].training == ("return x", "if x.shape[0] <= 6")


class Around(nn.Module):
    """Calls a child that branches on data, which no fake tensor has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.branch = nn.Linear(4, 4), Signed()

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(self.linear(x)) + 1


class Signed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_called_child_may_do_what_torch_cannot_read() -> None:
    module = Around()
    planned = taken(module, "linear")
    (call,) = planned.calls
    assert call.results == (("branch", "('tensor', 'float32', ((5, 8), 4))"),)
    assert "v1 = self.branch(v0) -> [?, 4]" in call.training
    assert difference(module, planned, "linear") is None
    module.branch = nn.Tanh()
    assert difference(module, planned, "linear") is None
    module.linear.bias = None
    assert "v0 = linear(x, self.linear.weight, None), planned was" in str(difference(module, planned, "linear"))


class Moving(nn.Module):
    """Another number in each call, by objects of every kind that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.drawn, self.numbers = itertools.cycle([1.0, 2.0, 3.0]), random.Random(7), iter(range(100))
        self.last, self.seen = deque([0], maxlen=3), defaultdict[str, int](int)
        self.rows: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen["calls"] += 1
        self.last.append(self.seen["calls"])
        self.rows.add(self.seen["calls"])
        return x * (next(self.turns) + next(self.numbers) + self.drawn.random() + sum(self.last) + len(self.rows))


def test_what_a_called_child_keeps_in_python_does_not_move() -> None:
    module = Around()
    module.branch = Moving()
    twin = copy.deepcopy(module)
    planned = taken(module, "linear")
    assert difference(module, planned, "linear") is None
    x = torch.ones(3, 4)
    for _ in range(3):
        assert torch.equal(module(x), twin(x))
