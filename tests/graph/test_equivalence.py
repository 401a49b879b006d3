"""The identity gate sees every way in which two forwards can differ, and says which in words."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from loka.graph import equivalence
from loka.graph.expression import Ref, RefKind
from loka.graph.ir import ForwardIR, Statement
from loka.graph.trace.examples import ExampleCall, Examples
from tests.support.expressions import expression, statement
from tests.support.models import ir_models as zoo

X, Y, W = Ref(RefKind.LOCAL, "x"), Ref(RefKind.LOCAL, "y"), Ref(RefKind.ATTRIBUTE, "self.w")
PRODUCT = statement("y", "matmul", "{0} @ {1}", (X, W))


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = zoo.weight()
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("seen", torch.zeros(()))
        self.notes = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def said(
    *statements: Statement,
    result: str = "y",
    module: Callable[[], nn.Module] = Module,
    size: int = 8,
    quick: bool = False,
) -> str | None:
    forward = ForwardIR("m", "M", ("x",), statements, expression(result), (), "")
    made = module()
    calls = tuple(ExampleCall(batch, (torch.randn(batch, size),), {}) for batch in (4, 7))
    given = made, forward, Examples("m", calls), lambda: copy.deepcopy(made), quick
    return equivalence.difference(*given)


def rounded(module: nn.Module, step: Statement) -> str | None:
    """The first difference beyond rounding of a forward of one statement."""
    calls = tuple(ExampleCall(batch, (torch.randn(batch, 8),), {}) for batch in (4, 7))
    forward = ForwardIR("m", "M", ("x",), (step,), Y, (), "")
    return equivalence.rounding_difference(module, forward, Examples("m", calls), lambda: copy.deepcopy(module))


def step(template: str, *operands: Ref, target: str = "y") -> Statement:
    return statement(target, "step", template, operands)


def test_the_same_function_passes() -> None:
    assert said(PRODUCT) is None


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        ((PRODUCT, step("{0} * 1.0001", Y)), "gives other outputs (largest difference"),
        ((PRODUCT, step("{0}.double()", Y)), "gives other outputs (float64 of (4, 8) instead of float32 of (4, 8))"),
        ((PRODUCT, step("{0}.detach()", Y)), "without a gradient instead of with"),
        ((PRODUCT, step("{0}.t().contiguous().t()", Y)), "strides (1, 4) instead of (8, 1)"),
        ((step("{0}.detach()", X, target="x"), PRODUCT), "gives another gradient for input 0"),
        ((step("{0} @ {1} + {0} @ {1}.detach() - {0} @ {1}", X, W),), "gives another gradient for 'w'"),
        ((PRODUCT, step("torch.rand(1)", target="_")), "draws other random numbers"),
        ((PRODUCT, step("self.seen.add_(1)", target="_")), "leaves the buffer 'seen' otherwise (largest difference 2)"),
        ((PRODUCT, step("self.frozen.add_(1)", target="_")), "leaves the Parameter 'frozen' otherwise"),
        ((PRODUCT, step("self.notes.update(calls=1)", target="_")), "leaves the attribute 'notes' otherwise"),
        ((PRODUCT, step("setattr(self, 'more', 1)", target="_")), "leaves the attribute 'more' otherwise"),
        ((PRODUCT, step("{0}.data.add_(1)", X, target="_")), "leaves its inputs otherwise"),
        ((PRODUCT, step("{0}.no_such_method()", Y)), "raises AttributeError"),
        ((PRODUCT, step("{0} * (1 + ({1}.shape[0] == 7))", Y, X)), "in training at batch 7"),
        ((PRODUCT, step("{0} * (1 if self.training else 2)", Y)), "in evaluation at batch 4"),
        ((PRODUCT, step("{0} * (1 + torch.is_autocast_enabled('cpu'))", Y)), "at batch 4 under bfloat16 autocast"),
    ],
)
def test_each_difference_is_named(statements: tuple[Statement, ...], words: str) -> None:
    found = said(*statements)
    assert found is not None
    assert words in found


def test_gradients_of_parameters_are_compared_in_training_and_up_to_rounding_in_evaluation() -> None:
    detached = step("{0} @ {1}.detach() + 0 * {0} @ {1}", X, W)
    assert "gives another gradient for 'w'" in str(said(PRODUCT, detached))
    evaluated = step("{0} @ ({1} if self.training else {1}.detach() + 0 * {1})", X, W)
    assert said(PRODUCT, evaluated) is None
    assert "gives another gradient for 'w'" in str(rounded(Module(), evaluated))


def test_a_quick_check_compares_outputs_and_state_without_gradients() -> None:
    assert said(PRODUCT, quick=True) is None
    assert "gives other outputs" in str(said(PRODUCT, step("{0} * 1.0001", Y), quick=True))
    assert "leaves the buffer 'seen'" in str(said(PRODUCT, step("self.seen.add_(1)", target="_"), quick=True))
    other_gradient = step("{0}.detach() + 0 * {0}", Y)
    assert said(PRODUCT, other_gradient) is not None
    assert said(PRODUCT, other_gradient, quick=True) is None


def test_other_containers_are_other_outputs() -> None:
    assert "values instead of 1" in str(said(PRODUCT, result="(y, 1)"))


class Coarse(Module):
    """A bfloat16 Parameter, used in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(self.w.detach().bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w.float()


def test_a_canonical_form_may_differ_by_the_rounding_of_the_coarsest_parameter() -> None:
    assert rounded(Module(), step("{0} @ {1} * 1.01", X, W)) is not None
    assert rounded(Coarse(), step("{0} @ {1}.float() * 1.01", X, W)) is None


def test_a_module_that_fails_on_its_examples_cannot_be_judged() -> None:
    assert str(said(PRODUCT, size=9)).startswith("the module cannot be run on its examples (RuntimeError")


class Unrepeatable(Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w).new_full((1,), id(self) % 1000003)


def test_what_depends_on_the_instance_does_not_pass() -> None:
    assert said(step("({0} @ {1}).new_full((1,), 1.5)", X, W), module=Unrepeatable) is not None


def test_nan_equals_nan_and_nothing_else() -> None:
    class Nan(Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.w) * float("nan")

    assert said(PRODUCT, step('{0} * float("nan")', Y), module=Nan) is None
    assert "largest difference inf" in str(said(PRODUCT, module=Nan))


class Normed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (8,), eps=1e-5)


def test_what_rounding_of_float32_hides_is_seen_in_float64() -> None:
    module, calls = Normed(), tuple(ExampleCall(batch, (torch.randn(batch, 8),), {}) for batch in (4, 7))

    def found(eps: str) -> tuple[str | None, ...]:
        norm = statement("y", "layer_norm", f"torch.nn.functional.layer_norm({{0}}, (8,), eps={eps})", (X,))
        forward, examples = ForwardIR("m", "M", ("x",), (norm,), Y, (), ""), Examples("m", calls)
        rounded = equivalence.rounding_difference(module, forward, examples, lambda: copy.deepcopy(module))
        return rounded, equivalence.float64_difference(forward, examples, lambda: copy.deepcopy(module))

    assert found("1e-5") == (None, None)
    in_float32, in_float64 = found("2e-5")
    assert in_float32 is None
    assert in_float64 is not None
    assert "in float64" in in_float64
