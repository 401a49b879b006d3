"""The functions that a forward may call."""

from __future__ import annotations

from torch import nn

from loka.graph.source import functions_of
from tests.support.models import ir_models as zoo


def test_what_a_forward_runs_through_is_followed() -> None:
    names = [function.__qualname__ for function in functions_of(zoo.FunctionWithBlock())]
    assert names == ["FunctionWithBlock.forward", "detached_gate"]
    assert functions_of(nn.Linear(2, 2)) == ()
    assert [f.__qualname__ for f in functions_of(zoo.Decorated())] == ["Decorated.forward"]
