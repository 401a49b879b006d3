"""Torch's capture of a forward: what it tells of it, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import gc
import random
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from loka.graph.capture.captured import CannotCaptureError, Captured, line_of, modules_around
from loka.graph.capture.dynamo import capture

WIDTH = 16
SETTINGS = types.SimpleNamespace(scale=1.5)


@dataclasses.dataclass
class Result:
    hidden: Tensor
    rows: int


class Block(nn.Module):
    """What the cases vary: a product, and what stands around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.temperature, self.config = 2.0, {"t": 3.0}
        self.offset = torch.ones(WIDTH)
        self.calls, self.kept = 0, collections.deque(maxlen=3)
        self.generator = random.Random(0)
        self.register_buffer("mean", torch.zeros(WIDTH))


def x(rows: int = 6) -> Tensor:
    return torch.randn(rows, WIDTH)


def operations(captured: Captured) -> list[fx.Node]:
    return [node for node in captured.graph.nodes if node.op.startswith("call")]


def sources(captured: Captured) -> set[str]:
    return {source.expression for source in captured.sources.values()}


class Whole(Block):
    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 1.0) -> dict[str, Any]:
        h = self.norm(self.linear(x)) / self.temperature * self.config["t"] + self.offset
        if mask is not None:
            h = h * mask
        h = h * SETTINGS.scale * scale
        return {"h": h, "rows": x.shape[0], "pair": (h.sum(1), None), "r": Result(h, x.shape[0] * 2), "x": x}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_graph_says_where_everything_comes_from(training: bool, device: str) -> None:
    model = Whole().train(training).to(device)
    model.offset = model.offset.to(device)
    captured = capture(model, (x().to(device),), {"mask": x().to(device)}, result=True)
    names = [str(getattr(node.target, "__name__", node.target)) for node in operations(captured)]
    assert names[:5] == ["linear", "layer_norm", "truediv", "mul", "add"]
    assert {"x", "mask", "self.linear.weight", "self.norm.bias", "self.offset"} <= sources(captured)
    linear = operations(captured)[0]
    assert modules_around(linear) == ("linear",)
    assert line_of(operations(captured)[2])[0] == __file__  # type: ignore[index]
    assert str(linear.meta["example_value"].shape[1]) == str(WIDTH)
    assert isinstance(linear.meta["example_value"].shape[0], torch.SymInt)
    read = {each.source.expression for each in captured.reads}
    assert {"self.temperature", "self.config['t']", "scale"} <= read
    assert any("SETTINGS" in each for each in read)
    result = captured.result
    assert result["h"] is result["r"].hidden
    assert isinstance(result["rows"], fx.Node)
    assert result["pair"][1] is None
    assert result["x"].expression == "x"


def products(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T + x @ weight.mT + x @ weight.H + x @ weight.mH


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: products(x, self.linear.weight),
        lambda self, x: checkpoint(products, x, self.linear.weight, use_reentrant=False),
    ],
    ids=["plain", "checkpoint"],
)
def test_attributes_that_transpose_are_read_alike_by_every_torch(forward: Any) -> None:
    """torch 2.14 reads operators of aten instead, in which nobody saw the Parameter."""
    captured = capture(body(forward), (x(),))
    graphs = [captured.graph, *(each.graph for each in captured.constants.values())]
    read = [node.args[1] for graph in graphs for node in graph.nodes if node.target is getattr]
    assert read == ["T", "mT", "H", "mH"]


class Spread(Block):
    def forward(self, *parts: Tensor, **named: Tensor) -> Tensor:
        return self.linear(parts[0] + parts[1]) * named["gate"]


def test_arguments_have_the_names_of_the_signature() -> None:
    captured = capture(Spread(), (x(), x()), {"gate": x()})
    assert {"parts[0]", "parts[1]", "named['gate']"} <= sources(captured)


class Conditional(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if x.shape[0] > 4:
            h = h + 1
        return h.view(x.shape[0], -1)


def test_conditions_are_those_by_which_python_decided() -> None:
    (condition,) = capture(Conditional(), (x(6),)).conditions
    assert condition.text == "x.shape[0] > 4"
    assert re.fullmatch(r"at test_capture.py:\d+ 'if x.shape\[0\] > 4:'", condition.place)
    single = capture(Conditional(), (x(1),)).conditions
    assert [each.text for each in single] == ["x.shape[0] == 1"]  # whatever read it has a constant


class Normed(Block):
    """torch's own rms_norm asks whether there are elements."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.unflatten(-1, (-1, 4)), (4,)).flatten(-2)


def test_what_an_operation_asks_is_no_condition() -> None:
    assert not capture(Normed(), (x(),)).conditions


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        h = self.inner(x)
        return {"a": h, "b": (h + 1, 3)}


class Branching(Child):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        return super().forward(x * 2 if bool(x.sum() > 0) else x)


class Parent(Block):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: Tensor) -> Tensor:
        made = self.child(self.linear(x), mask=None)
        total: Tensor = made["a"] + made["b"][0] * made["b"][1]
        return total


def test_the_call_of_a_leaf_is_one_node() -> None:
    model = Parent(Child())
    hook = model.child.register_forward_hook(lambda module, args, result: None)
    captured = capture(model, (x(),), leaves=["child"])
    (call,) = (node for node in captured.graph.nodes if node.op == "call_module")
    assert (call.target, call.kwargs) == ("child", {"mask": None})
    assert [node.args[1] for node in captured.graph.nodes if node.name.startswith("getitem")] == ["a", "b", 0]
    assert not any("inner" in source for source in sources(captured))
    assert list(model.child._forward_hooks) == [hook.id]
    assert "forward" not in vars(model.child)


def test_every_operation_says_which_modules_it_is_of() -> None:
    captured = capture(nn.Sequential(Parent(Child())), (x(),), leaves=["0.child"])
    items = [node for node in captured.graph.nodes if node.name.startswith("getitem")]
    assert {modules_around(node) for node in items} == {("0", "0.child")}


def test_a_leaf_that_reads_values_has_its_observed_result() -> None:
    model = Parent(Branching())
    with pytest.raises(CannotCaptureError):
        capture(model, (x(6),), leaves=["child"])
    observed = tuple(model.child(model.linear(x(rows))) for rows in (6, 9))
    captured = capture(model, (x(6),), leaves=["child"], observed={"child": observed})
    (call,) = (node for node in captured.graph.nodes if node.op == "call_module")
    assert [type(each.shape[0]) for each in call.meta["example_value"]] == [torch.SymInt] * 2


def body(function: Callable[[Any, Tensor], Any]) -> nn.Module:
    return type("Made", (Block,), {"forward": function})()


def keeps(self: Any, x: Tensor) -> Any:
    """As an HSTU does with its cache of keys, in training."""
    self.calls, self.cache, self.offset = (lambda *each: each)(self.calls, self.cache, self.offset)
    return self.linear(x)


def test_an_attribute_that_is_set_to_what_it_holds_does_not_change() -> None:
    module = body(keeps)
    module.cache = None
    captured = capture(module, (x(),), result=True)
    assert [str(getattr(node.target, "__name__", node.target)) for node in operations(captured)] == ["linear"]
    assert (module.calls, module.cache) == (0, None)


def counts(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return self.linear(x)


def swaps(self: Any, x: Tensor) -> Any:
    self.temperature, self.config = self.config, self.temperature
    return self.linear(x)


def resets(self: Any, x: Tensor) -> Any:
    """To what it is at the moment, which it may not be in another call."""
    self.calls = 0
    return self.linear(x)


def remembers(self: Any, x: Tensor) -> Any:
    self.kept.append(1)
    return self.linear(x) * len(self.kept)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda self, x: self.linear(x) if x.sum() > 0 else x, "[Dd]ata-dependent.* at test_capture.py:"),
        (lambda self, x: self.linear(x) if self.generator.random() < 0.5 else x, "at test_capture.py:"),
        (counts, "changes self.calls in each call, and a graph keeps no Python state"),
        (swaps, "changes self.config, self.temperature in each call"),
        (resets, "changes self.calls in each call"),
        (remembers, "changes self.kept in each call"),
        (lambda self, x: self.linear(x, x), "argument"),
    ],
    ids=["data", "generator", "counter", "swap", "reset", "deque", "wrong call"],
)
def test_what_a_graph_cannot_hold_is_refused_in_torchs_words(function: Any, reason: str) -> None:
    with pytest.raises(CannotCaptureError, match=reason):
        capture(body(function), (x(),), result=True)


def hooks_its_weight(self: Any, x: Tensor) -> Any:
    self.linear.weight.register_hook(torch.abs)
    return self.linear(x)


def test_hooks_on_parameters_are_refused_and_go() -> None:
    module = body(hooks_its_weight)
    held = module.linear.weight.register_hook(torch.neg)
    with pytest.raises(CannotCaptureError, match=r"a hook on the gradient of self\.linear\.weight"):
        capture(module, (x(),), result=True)
    assert list(module.linear.weight._backward_hooks) == [held.id]


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CannotCaptureError, match="do not fit the forward of Conditional"):
        capture(Conditional(), (x(), x()))


def test_where_dynamo_is_off_it_says_so() -> None:
    with torch._dynamo.config.patch(disable=True), pytest.raises(CannotCaptureError, match="Dynamo is off"):
        capture(Conditional(), (x(),))


def test_dtypes_are_those_of_the_callers_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(Conditional(), (x(),))
    assert operations(captured)[0].meta["example_value"].dtype == torch.bfloat16


class Compilations:
    """A backend that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("captures", [0, 1, 20])
def test_the_users_own_code_is_compiled_as_often_as_without(captures: int) -> None:
    model, backend = Conditional(), Compilations()
    found = []
    with fresh_dynamo():
        for rows in (6, 7, 2, 9):
            for each in range(captures):  # more than the limit of recompilations, and of other sizes
                capture(model, (x(30 + each),))
            torch.compile(model, backend=backend)(x(rows))
            found.append(backend.count)
    assert found == [1, 2, 3, 3]  # a second size makes the batch a symbol; a third takes the other branch


def state(model: nn.Module) -> list[Any]:
    drawn = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    counters = {name: dict(counter) for name, counter in torch._dynamo.utils.counters.items()}
    modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()
    attributes = [{**vars(child)} for child in model.modules()]
    return [*drawn, counters, *modes, torch._dynamo.config.get_config_copy(), attributes]


@pytest.mark.parametrize("result", [True, False])
@pytest.mark.parametrize("function", [counts, remembers, Conditional.forward], ids=["counter", "deque", "plain"])
def test_nothing_is_left_behind(function: Any, result: bool) -> None:
    model = body(function)
    capture(Conditional(), (x(),))  # what the first import of Dynamo sets
    before, kept, values = state(model), list(model.kept), copy.deepcopy(model.state_dict())
    with contextlib.suppress(CannotCaptureError):
        capture(model, (torch.ones(6, WIDTH),), result=result)
    assert state(model) == before
    assert (model.calls, list(model.kept)) == (0, kept)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


def test_no_graph_is_kept_by_anybody() -> None:
    def graphs() -> int:
        gc.collect()
        return sum(isinstance(each, fx.GraphModule) for each in gc.get_objects())

    model, found = Parent(Child()), []
    for _ in range(3):
        capture(model, (x(),), leaves=["child"], result=True)
        found.append(graphs())
    assert found[2] <= found[0]  # fewer where something else of the process let go of graphs of its own


def test_importing_it_imports_no_dynamo() -> None:
    code = "import sys, loka.graph.capture.dynamo; print('torch._dynamo.eval_frame' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"


def test_buffers_and_dropout_are_read_not_run() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.mean.add_(1)
        return F.dropout(self.linear(x), 0.5, self.training) + self.mean

    model = body(forward)
    captured = capture(model, (x(),))
    assert "add_" in [node.target for node in operations(captured)]
    assert not model.mean.any()
