"""The record that tracing makes of a model: everything that the forward read, as text that tells values apart."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from loka.graph.ir import ForwardIR, Refused
from loka.graph.reads import Reads
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from loka.graph.value_text import ValueTexts
from tests.support.models import ir_models as zoo

LAYER_NORM, LINEAR = "torch.nn.modules.normalization.LayerNorm", "torch.nn.modules.linear.Linear"


def traced(module: nn.Module, *inline: str, size: tuple[int, ...] = (zoo.WIDTH,)) -> ForwardIR | Refused:
    batches = {batch: ModelInputs((torch.randn(batch, *size),)) for batch in (5, 8)}
    return trace_forward(module, "", capture_examples(module, [""], batches)[""], inline=inline)


def test_a_wukong_layer_says_what_it_read() -> None:
    forward = traced(zoo.Layer(), "fmb.1", "fmb.2", size=(8, 16))
    assert isinstance(forward, ForwardIR)
    assert forward.reads == (
        Reads(("",), f"{zoo.__name__}.Layer", values=(("d", "16"), ("n", "8"))),
        Reads(("fmb",), "torch.nn.modules.container.Sequential", holds=4),
        Reads(("fmb.1",), LAYER_NORM, values=(("eps", "1e-05"), ("normalized_shape", "(32,)"))),
        Reads(("fmb.2",), "torch.nn.modules.activation.SiLU", values=(("inplace", "False"),)),
    )
    assert forward.called == ("fmb_norm", "fmb.0", "fmb.3", "out_norm")
    assert forward.constants == ()


@pytest.mark.parametrize("module", [zoo.Layer(), zoo.SizeBranch(), zoo.NoGrad()])
def test_modules_are_read_as_before_afterwards(module: nn.Module) -> None:
    size = (8, 16) if isinstance(module, zoo.Layer) else (zoo.WIDTH,)
    assert isinstance(traced(module, size=size), Refused) != isinstance(module, zoo.Layer)
    assert "__getattribute__" not in vars(nn.Module)


class Norm(nn.LayerNorm):
    """Its eps is named by torch's forward alone, so that it is built in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


FACTOR = 2.0


class Outside(zoo.Plain):
    """Reads a global variable, and a default that is none of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(zoo.WIDTH)

    def forward(self, x: Tensor, power: float = FACTOR, plain: int = 1) -> Tensor:
        return self.norm(x @ self.w) ** power * FACTOR + plain


def test_a_class_of_ones_own_around_a_norm_of_torch() -> None:
    forward = traced(Outside(), "norm")
    assert isinstance(forward, ForwardIR)
    (reads,) = forward.reads
    assert (reads.modules, reads.values) == (("norm",), (("eps", "1e-05"), ("normalized_shape", "(8,)")))
    name = f"{Outside.__module__}.FACTOR"
    assert forward.constants == ((f"power of {Outside.__module__}.Outside.forward", "2.0"), (name, "2.0"))


class Colour(IntEnum):
    RED = 1
    BLUE = 2


@dataclass
class Settings:
    size: int
    inner: Any = None


class Plain:
    def __init__(self, size: int) -> None:
        self.size, self.me = size, self


def shifted(by: int) -> Any:
    return lambda x: x + by


UNLIKE = [
    None, 0, 1, True, 1.0, -0.0, 0.0, float("nan"), "1", b"1", 1j, ..., (1,), [1], {1}, frozenset({1, 2}), {1: 2},
    {2: 1}, (), [], range(3), slice(1), torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda:1"),
    torch.Size([1]), Colour.RED, Colour.BLUE, Settings(1), Settings(2), Settings(1, Settings(2)), Plain(1), Plain(2),
    SimpleNamespace(a=1), SimpleNamespace(a=2), torch.relu, torch.tanh, nn.functional.relu, nn.ReLU, shifted(1),
    shifted(2), lambda x: x, lambda x: x + 1, functools.partial(torch.clamp, min=0),
    functools.partial(torch.clamp, min=1), functools.partial(torch.clamp, 0), np.float64(1.0), np.float64(2.0),
    np.arange(3), np.arange(4), "x" * 500,
    "x" * 500 + "y", list(range(300)), [*range(299), 0], torch.zeros(2), torch.zeros(3), nn.Linear(2, 2), nn.ReLU(),
]  # fmt: skip


def test_unlike_values_have_unlike_words() -> None:
    texts = ValueTexts(nn.Module())
    said = [texts.text(value) for value in UNLIKE]
    assert len(set(said)) == len(said)
    assert said == [texts.text(value) for value in UNLIKE]
    assert max(map(len, said)) < 160
    assert not any(" at 0x" in text for text in said)


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(DATA, DATA)
def test_data_is_told_apart_as_by_its_repr(one: object, other: object) -> None:
    texts = ValueTexts(nn.Module())
    assert (texts.text(one) == texts.text(other)) == (repr(one) == repr(other))


def test_what_a_module_holds_is_called_by_its_name() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    texts = ValueTexts(module)
    held = [module[0], module[0].bias, module[1].running_mean]
    assert texts.text(held) == "[the module '0', the tensor '0.bias', the tensor '1.running_mean']"
