"""What a forward does to tensors in place, in modules and at random is the same in canonical form."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.graph.canonical.recording import out_of_place, recorded
from loka.graph.equivalence import with_forward
from loka.graph.expression import local
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ExampleCall, Examples, ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from tests.support.canonical_forms import assert_same, canonical, statements, templates, texts
from tests.support.expressions import template

INPUTS = {"x": (6,), "z": (6,)}
PRODUCT = "u = mul x z: {0} * {1}"


def runs_of(*lines: str) -> int:
    """The number of runs that are recorded of a forward of x and z, 0 where it has no canonical form."""
    forward = ForwardIR("", "", ("x", "z"), statements(*lines), local("y"), (), "")
    calls = tuple(ExampleCall(batch, (torch.randn(batch, 6), torch.randn(batch, 6)), {}) for batch in (3, 5))
    runs = recorded(forward, Examples("", calls), nn.Module)
    return len(runs) if out_of_place(forward, runs) is None else 0


def test_a_change_of_what_another_statement_made_has_no_canonical_form() -> None:
    assert runs_of(PRODUCT, "a = add_ u z: {0}.add_({1})", "y = mul a z: {0} * {1}") == 0
    assert runs_of(PRODUCT, "v = getitem u: {0}[:, :2]", "a = mul_ v: {0}.mul_(2)", "y = mul u z: {0} * {1}") == 0


def test_a_change_of_what_the_same_statement_made_has_one() -> None:
    norm = "u = rms_norm x: torch.nn.functional.rms_norm({0}, (6,))"  # adds its eps in place
    assert runs_of(norm, "y = mul u z: {0} * {1}") == 2
    assert runs_of("u = mul_ x z: ({0} * {1}).view(-1).mul_(2)", "y = sum u: {0}.sum()") == 0  # of a view


def test_changes_of_arguments_have_no_canonical_form() -> None:
    assert runs_of("a = add_ x z: {0}.add_({1})", "y = mul a z: {0} * {1}") == 0
    assert runs_of("v = getitem x: {0}[:, :2]", "a = mul_ v: {0}.mul_(2)", "y = mul a a: {0} * {1}") == 0


class Counts(nn.Module):
    """A module with an effect of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.tanh() + self.calls.clone()


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6))
        self.child, self.other = Counts(), Counts()


class TwiceTheSame(Body):
    """A module that is called twice, and once without a reader, amid what has other canonical forms."""

    def forward(self, x: Tensor) -> Tensor:
        u = x @ self.w
        y = self.child(u * torch.sigmoid(u))
        self.other(y)
        y = torch.add(self.child(x), y)
        return y * torch.sigmoid(y)


class Drops(Body):
    """Random numbers are drawn in the order in which they are in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = F.dropout(x, 0.5), torch.rand_like(x)
        u = (x @ self.w) * second
        return torch.add(u * torch.sigmoid(u), first)


def traced(module: nn.Module) -> ForwardIR:
    inputs = {batch: ModelInputs((torch.randn(batch, 6),), {}) for batch in (3, 5)}
    found = trace_forward(module, "", capture_examples(module, [""], inputs)[""], sites=("w",))
    assert isinstance(found, ForwardIR), found
    return found


def test_module_calls_stay_in_their_order() -> None:
    module = TwiceTheSame()
    forward = traced(module)
    assert "torch.nn.functional.silu({0})" in templates(forward)
    calls = [template(step) for step in forward.statements if step.op == "module"]
    assert calls == ["self.child({0})", "self.other({0})", "self.child({0})"]
    x = torch.randn(4, 6)
    ours, theirs = copy.deepcopy(module), copy.deepcopy(module)
    torch.testing.assert_close(with_forward(ours, forward)(x), theirs(x))
    assert torch.equal(ours.child.calls, theirs.child.calls)
    assert torch.equal(ours.other.calls, theirs.other.calls)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_numbers_are_drawn_in_order(seed: int) -> None:
    module = Drops()
    forward = traced(module)
    x = torch.randn(4, 6)
    torch.manual_seed(seed)
    right = module(x)
    torch.manual_seed(seed)
    torch.testing.assert_close(with_forward(copy.deepcopy(module), forward)(x), right)


class Detached(Body):
    """A gradient that is cut off: no SiLU, though the numbers are one's."""

    def forward(self, x: Tensor) -> Tensor:
        u = x @ self.w
        return u * torch.sigmoid(u.detach())


def test_gradients_that_are_cut_off_stay_cut_off() -> None:
    module = Detached()
    forward = traced(module)
    x = torch.randn(4, 6, requires_grad=True)
    right, got = module(x), with_forward(copy.copy(module), forward)(x)
    torch.testing.assert_close(got, right)
    ours, theirs = (torch.autograd.grad(y.square().sum(), [x, module.w]) for y in (got, right))
    torch.testing.assert_close(ours, theirs)


def test_checks_stay_where_they_are_among_effects() -> None:
    checks = [f"_ = check {name}: torch._assert({{0}}.dim() == 2, '{name}')" for name in "xsz"]
    lines = (checks[0], "g = sigmoid x: torch.sigmoid({0})", "s = mul x g: {0} * {1}", *checks[1:])
    found = canonical((*lines, "y = add s z: torch.add({0}, {1})"), INPUTS, {})
    assert [text for text in texts(found) if "_assert" in text] == [
        f"_ = torch._assert({name}.dim() == 2, '{name}')" for name in "xsz"
    ]


def test_the_same_operation_twice_is_one_value() -> None:
    lines = (
        "GEMM u = linear x self.w: torch.nn.functional.linear({0}, {1})",
        "v = matmul x t: {0} @ {1}".replace(" t:", " self.w:").replace("{1}", "{1}.t()"),
        "y = add u v: torch.add({0}, {1})",
    )
    found = canonical(lines, {"x": (6,)}, {"w": (6, 6)})
    assert sum(step.call is not None for step in found.statements) == 1
    assert template(found.statements[-1]) == "{0} + {0}"
    assert_same(found, lines, {"x": (6,)}, {"w": (6, 6)})
