"""Text that becomes code: constants, attribute paths and names that are hostile stay data."""

from __future__ import annotations

import ast
import copy

import pytest
import torch
from torch import Tensor, nn

from loka.errors import InputError
from loka.graph.equivalence import with_forward
from loka.graph.ir import CannotTraceError, ForwardIR, Refused
from loka.graph.trace.examples import ExampleCall, Examples
from loka.graph.trace.printer import attribute, constant, public_name, variable
from loka.graph.trace.trace import trace_forward
from tests.support.as_written import as_written
from tests.support.models import ir_models as zoo

EVIL = "__import__('os').abort()"


@pytest.mark.parametrize(
    "value",
    [
        None, ..., True, -3, 2.5, 1e-5, float("inf"), float("-inf"), 1 + 2j, "plain", "quo'te\"{0}\n\\", b"\x00", (),
        (1,),
        (1, (2.0, "x")), [1, None], {"a{b": 1, 2: [3]}, slice(None, 3, -1), torch.float8_e4m3fn, torch.channels_last,
        torch.device("cpu"), torch.strided,
    ],
    ids=repr,
)  # fmt: skip
def test_constants_read_back(value: object) -> None:
    assert eval(constant(value), {"torch": torch}) == value  # noqa: S307


def test_nan_reads_back() -> None:
    assert constant(float("nan")) == 'float("nan")'


class Loud(int):
    def __repr__(self) -> str:
        return EVIL


@pytest.mark.parametrize("value", [Loud(3), object(), {1}, nn.Linear, (1, object())])
def test_constants_of_other_types_are_refused(value: object) -> None:
    with pytest.raises(CannotTraceError, match="cannot be printed"):
        constant(value)


def test_public_names() -> None:
    assert public_name(torch.nn.functional.linear) == "torch.nn.functional.linear"
    assert public_name(torch.matmul) == "torch.matmul"
    assert public_name(torch.nn.functional.gelu) == "torch.nn.functional.gelu"
    assert public_name(torch.ops.aten.relu) == "torch.ops.aten.relu"
    with pytest.raises(CannotTraceError, match="no public function of torch"):
        public_name(zoo.detached_gate)


def test_variables_hide_nothing() -> None:
    taken = {"x"}
    names = [variable(hint, taken) for hint in ("x", "x", "class", "torch", "self", "0", "a-b", EVIL, "Ünï", "sum")]
    assert len(set(names) | {"x"}) == 11
    assert all(name.isidentifier() and name.isascii() for name in names)
    assert not {"class", "torch", "self", "sum"} & set(names)


class Named(nn.Module):
    """Children and Parameters with names that are no identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"user": nn.Linear(8, 8), 'a"]; b{0}': nn.Linear(8, 8)})
        self.add_module(EVIL.replace(".", "_"), nn.Linear(8, 8))
        self.register_parameter("for", zoo.weight())
        self.register_parameter("__hidden", zoo.weight())
        self.register_buffer("a-b", torch.ones(8))
        self.reordered = nn.Sequential()
        self.reordered.add_module("1", nn.ReLU())
        self.reordered.add_module("0", nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for tower in self.towers.values():
            x = tower(x)
        x = getattr(self, EVIL.replace(".", "_"))(x)
        x = x @ getattr(self, "for") @ getattr(self, "__hidden") + getattr(self, "a-b")
        return self.reordered(x)


def test_names_that_are_no_identifiers() -> None:
    module = Named()
    evil = EVIL.replace(".", "_")
    calls = tuple(ExampleCall(batch, (torch.randn(batch, 8),), {}) for batch in (4, 7))
    sites = ("towers.user", 'towers.a"]; b{0}', evil, "for", "__hidden")
    answer = trace_forward(module, "m", Examples("m", calls), ("reordered.0",), sites)
    assert isinstance(answer, ForwardIR), answer
    texts = [ref.text for statement in answer.statements for ref in statement.operands]
    assert 'self.towers["user"].weight' in texts
    assert "self.towers['a\"]; b{0}'].weight" in texts
    assert f"self.get_submodule({evil!r}).weight" in texts
    assert 'self.get_parameter("for")' in texts
    assert 'self.get_parameter("__hidden")' in texts
    assert 'self.get_buffer("a-b")' in texts
    for statement in answer.statements:
        called = [node.func for node in ast.walk(ast.parse(statement.text())) if isinstance(node, ast.Call)]
        assert not any(isinstance(function, ast.Name) for function in called), statement.text()
    x = torch.randn(3, 8)
    printed = as_written(module, "m", Examples("m", calls), ("reordered.0",), sites)
    assert torch.equal(with_forward(copy.deepcopy(module), printed)(x), module(x))


def test_a_sequential_whose_names_are_out_of_order_is_not_indexed() -> None:
    assert attribute(Named(), "reordered.0") == 'self.reordered.get_submodule("0")'
    assert attribute(zoo.Layer(), "fmb.0.weight") == "self.fmb[0].weight"


def test_a_plain_attribute_without_a_usable_name_is_refused() -> None:
    with pytest.raises(CannotTraceError, match="'a b' has no name that could be printed"):
        attribute(Odd(), "a b")


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        setattr(self, "a b", 1.0)


class Constants(zoo.Plain):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.full_like(x, -1.5, dtype=torch.float32)[:, 1:-1:2]
        z = (-2) ** torch.clamp(x, min=-1, max=float("inf")) + x.new_zeros((1, 8))
        return (x @ self.w)[..., None] * z[:, :, None] - abs(-y).sum(dim=(0, 1)).to(torch.float32)


class Results(zoo.Plain):
    def forward(self, x: Tensor) -> dict[str, object]:
        batch, _width = x.shape
        return {"y{0}": x @ self.w, "rest": [(x.shape[0], batch), (None,)]}


@pytest.mark.parametrize("kind", [Constants, Results])
def test_constants_and_results_survive(kind: type[zoo.Plain]) -> None:
    calls = tuple(ExampleCall(batch, (torch.randn(batch, 8),), {}) for batch in (4, 7))
    answer = trace_forward(kind(), "m", Examples("m", calls), sites=("w",))
    assert isinstance(answer, ForwardIR), answer
    assert not any(statement.target == "_" for statement in answer.statements)  # sizes that nobody reads are gone


class CallsAPrivateFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch._C._nn.hardsigmoid(x)


def test_a_private_name_of_a_public_function_is_printed_as_that() -> None:
    calls = tuple(ExampleCall(rows, (torch.randn(rows, 4),), {}) for rows in (2, 3))
    forward = trace_forward(CallsAPrivateFunction(), "", Examples("", calls))
    assert isinstance(forward, ForwardIR), forward
    assert [step.text() for step in forward.statements] == ["hardsigmoid = torch.nn.functional.hardsigmoid(x)"]


class Shadows(zoo.Plain):
    def forward(self, torch: Tensor) -> Tensor:
        return torch @ self.w


def test_an_argument_that_hides_a_name_of_the_text_is_refused() -> None:
    answer = trace_forward(Shadows(), "m", Examples("m", ()), sites=("w",))
    assert isinstance(answer, Refused)
    assert "argument 'torch' has a name that the generated text needs for itself" in answer.reason


def test_names_that_do_not_exist_are_errors() -> None:
    for options in ({"inline": ("missing",)}, {"sites": ("missing",)}, {"inline": ("",)}):
        with pytest.raises(InputError):
            trace_forward(zoo.Plain(), "m", Examples("m", ()), **options)  # type: ignore[arg-type]
