"""Random models: all of them run unbound, each fault of a bound one is seen, and nothing else is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.random_models import __main__ as command
from benchmarks.random_models.comparison import Case, mapped, run
from benchmarks.random_models.generator import CORE, INPUTS, KINDS, OUTPUTS, RandomModel, Step, draw
from benchmarks.random_models.judge import Judgement, Verdict, Workplace
from benchmarks.random_models.report import reduced, table
from loka.errors import InputError

BLOCK = Step(*CORE, owner=0, number=1)
BUFFER = Step("in place", "counting buffer", 0, 2)


class FaultyPackage:
    """A package whose `apply` puts a fault into the model, once it is bound."""

    def __init__(self, package: Any, fault: Callable[..., Any]) -> None:
        self.package, self.fault = package, fault

    def apply(self, model: nn.Module) -> Any:
        patch, bound = self.package.apply(model), type(model)
        right = bound.__dict__.get("right_forward", bound.forward)
        bound.right_forward = right
        bound.forward = lambda model, x, ids: self.fault(model, partial(right, model), x, ids)
        return patch


class Faulty(Workplace):
    fault: Callable[..., Any] = staticmethod(lambda model, forward, x, ids: forward(x, ids))

    def package(self, name: str) -> Any:
        return FaultyPackage(super().package(name), self.fault)


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Faulty]:
    with Faulty(tmp_path) as made:
        yield made


def judged(workplace: Faulty, *steps: Step, outputs: str = "tensor") -> Judgement:
    return workplace.judge(RandomModel(0, steps or (BLOCK, BUFFER), outputs=outputs))


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.01


def when(condition: Callable[[nn.Module, Any], bool]) -> Callable[..., Any]:
    """A fault of 1 % in some calls alone."""
    return lambda model, forward, x, ids: forward(x, ids) * (1.01 if condition(model, x) else 1.0)


FAULTS: dict[str, Callable[..., Any]] = {
    "another output": when(lambda model, x: True),
    "bfloat16": lambda model, forward, x, ids: forward(x, ids).to(torch.bfloat16),
    "(1, 15)": lambda model, forward, x, ids: forward(x, ids)[:, :15],
    "requires_grad": lambda model, forward, x, ids: forward(x, ids).detach(),
    "has no output": lambda model, forward, x, ids: [forward(x, ids)],
    "gradient of an input": lambda model, forward, x, ids: forward(_Gradient.apply(x), ids),
    "gradient a1.bias": lambda model, forward, x, ids: forward(x, ids) + (model.a1.bias - model.a1.bias.data).sum(),
    "another input": lambda model, forward, x, ids: (forward(x.clone(), ids), x.detach().add_(1))[0],
    "random state torch": lambda model, forward, x, ids: (torch.rand(1), forward(x, ids))[1],
    "random state random": lambda model, forward, x, ids: (random.random(), forward(x, ids))[1],
    "buffer seen2": lambda model, forward, x, ids: (forward(x, ids), model.seen2.add_(1))[0],
    "300 rows": when(lambda model, x: len(x) == 300),
    "evaluation": when(lambda model, x: not model.training),
    "some children": when(lambda model, x: model.n1.training != model.training),
    "no gradients": when(lambda model, x: not torch.is_grad_enabled()),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("words", FAULTS)
def test_a_planted_fault_is_silent(workplace: Faulty, words: str) -> None:
    workplace.fault = FAULTS[words]
    found = judged(workplace)
    assert found.verdict is Verdict.SILENT, found
    assert words in found.reason


NARROWS = Step("modes", "autocast on", 0, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("off", "verdict"), [(2.0**-23, Verdict.EQUAL), (0.1, Verdict.SILENT)])
def test_rounding_that_the_model_enlarges_is_no_fault(workplace: Faulty, off: float, verdict: Verdict) -> None:
    workplace.fault = lambda model, forward, x, ids: forward(x * (1 + off), ids)
    found = judged(workplace, NARROWS, BLOCK)  # rounds to bfloat16, where a few values round the other way
    assert found.verdict is verdict, found


@pytest.mark.parametrize(("seed", "policy"), [(0, "fp8"), (7, "keep")])
def test_a_seed_has_a_policy(workplace: Faulty, seed: int, policy: str) -> None:
    workplace.fault = when(lambda model, x: True)
    assert workplace.judge(RandomModel(seed, (BLOCK,))).reason.startswith(f"{policy}: ")


def test_without_a_fault_a_model_is_equal(workplace: Faulty) -> None:
    found = judged(workplace, BLOCK)
    assert found.verdict is Verdict.EQUAL, found
    assert found.modules == ("",)


def test_an_attribute_that_is_frozen_is_silent(workplace: Faulty) -> None:
    frozen: list[Tensor] = []

    def fault(model, forward, x, ids):
        frozen[:] = frozen or [model.t2.clone()]
        return forward(x, ids) / model.t2 * frozen[0]

    workplace.fault = fault
    found = judged(workplace, BLOCK, Step("values", "buffer", 0, 2))
    assert found.verdict is Verdict.SILENT
    assert "after the change" in found.reason


def test_a_change_after_apply_that_verify_names_is_told_apart(workplace: Faulty) -> None:
    found = judged(workplace, BLOCK, Step("hooks", "hook added later", 0, 2))
    assert found.verdict is Verdict.VERIFY, found
    assert "has forward hooks" in found.reason


def test_a_change_after_apply_that_a_bound_model_refuses_is_refused(workplace: Faulty) -> None:
    found = judged(workplace, Step("sharing", "module replaced", 0, 1))
    assert found.verdict is Verdict.REFUSED, found
    assert "cannot be put around 'a1'" in found.reason


def test_what_a_bound_model_alone_raises_is_a_traceback_or_a_refusal(workplace: Faulty) -> None:
    for error, verdict in ((ValueError("odd"), Verdict.TRACEBACK), (InputError("no"), Verdict.REFUSED)):

        def fault(*_: object, error: Exception = error) -> None:
            raise error

        workplace.fault = fault
        found = judged(workplace)
        assert found.verdict is verdict
        assert str(error) in found.reason


def test_what_the_unbound_model_raises_has_to_be_raised(workplace: Faulty) -> None:
    steps = (BLOCK, Step("torch", "BatchNorm", 0, 2))
    assert judged(workplace, *steps).verdict is Verdict.EQUAL  # one row in training
    workplace.fault = lambda model, forward, x, ids: forward(x, ids) if len(x) > 1 else x
    assert "runs where the unbound model raises ValueError" in judged(workplace, *steps).reason


def test_a_model_that_does_not_run_is_invalid(workplace: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OUTPUTS, "tensor", "x.absent")
    assert judged(workplace).verdict is Verdict.INVALID


def assert_runs(workplace: Faulty, model: RandomModel) -> None:
    module = workplace.module(workplace.write(model))
    made = module.build()
    try:
        for rows in (64, 7):
            outcome = run(made, module, Case(rows, "training", False, True, 1.0, 0))
            assert outcome.raised is None, (str(outcome.raised), model.source())
            module.change(made)
    finally:
        module.restore()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_construct_runs_before_and_after_its_change(workplace: Faulty, kind: str) -> None:
    for name in KINDS[kind]:
        assert_runs(workplace, RandomModel(0, (BLOCK, Step(kind, name, 0, 2))))
        assert_runs(workplace, RandomModel(1, (Step(kind, name, 0 if "ids" in KINDS[kind][name] else 1, 2), BLOCK)))


def test_every_input_and_output_runs(workplace: Faulty) -> None:
    for inputs in INPUTS:
        assert_runs(workplace, RandomModel(0, (BLOCK,), inputs=inputs))
    for outputs in OUTPUTS:
        assert_runs(workplace, RandomModel(0, (BLOCK,), outputs=outputs))


def test_a_seed_draws_the_same_model_again() -> None:
    assert draw(5).source() == draw(5).source()
    assert len({draw(seed).source() for seed in range(50)}) == 50


def test_drawn_models_reach_every_kind() -> None:
    assert {step.kind for seed in range(300) for step in draw(seed).steps} == set(KINDS)


def test_a_step_says_the_same_whatever_the_others_are() -> None:
    other = Step("layers", "linear", 0, 3)
    assert RandomModel(0, (BLOCK, BUFFER, other)).without(BUFFER) == RandomModel(0, (BLOCK, other))
    lines = RandomModel(0, (BLOCK, BUFFER, other)).source().splitlines()
    assert all(line in lines for line in RandomModel(0, (BLOCK, other)).source().splitlines()[1:])


def test_a_failing_model_is_reduced_to_the_steps_that_it_needs(workplace: Faulty) -> None:
    workplace.fault = lambda model, forward, x, ids: mapped(
        forward(x, ids), lambda each: each * (1.01 if hasattr(model, "seen2") else 1)
    )
    steps = (BLOCK, BUFFER, Step("layers", "linear", 0, 3))
    found = reduced(workplace, RandomModel(0, steps, outputs="tuple"), Verdict.SILENT)
    assert BUFFER in found.steps
    assert len(found.steps) < 3
    assert found.outputs == "tensor"


def test_the_table_counts_verdicts_by_kind() -> None:
    rows = [
        {"seed": 1, "verdict": "equal", "steps": ["rows: zeros", "layers: block"]},
        {"seed": 2, "verdict": "silent", "steps": ["rows: zeros"], "reduced": ["rows: zeros"], "inputs": "two"},
        {"seed": 3, "verdict": "silent", "steps": ["rows: zeros"], "reduced": ["rows: zeros"], "inputs": "two"},
    ]
    text = table(rows)
    assert text.splitlines()[-1] == "silent: rows: zeros: seeds 2, 3"
    assert [line.split()[1:] for line in text.splitlines() if line.startswith(("all", "rows"))] == 2 * [list("001002")]


@pytest.mark.slow
def test_the_command_writes_a_line_for_each_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--models", "1", "--seed", "1", "-o", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "models.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [1]
    assert "models with" in capsys.readouterr().out
