"""Parts of interactions: what is measured, that it is right, and that a step counts without its forward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from loka.bench.packages import Workshop
from loka.bench.record.check_numbers import Check
from loka.bench.record.clock import Span
from loka.bench.record.grid import grid, interaction_parts
from loka.bench.record.interaction_parts import InteractionParts, specs_of
from loka.bench.record.record import in_order, measure
from loka.bench.record.run_record import rendered
from loka.errors import InputError
from loka.kernels.measurements.interaction_forms import BACKWARDS, ConcatNormForm, FmForm, parts_of
from loka.kernels.measurements.parts import COMPILED, RENDERED, Part, PartKind
from tests.support.plan.recorded_parts import FORMS

PARTS = tuple(part for form, columns in FORMS for part in parts_of(form, 40, columns, RENDERED))
COMPILED_PARTS = tuple(replace(part, kernel=COMPILED) for part in PARTS)


@pytest.fixture(scope="module")
def operators() -> Iterator[ModuleType]:
    with Workshop() as workshop:
        yield workshop.kernels(rendered(PARTS))


@pytest.fixture
def interactions(operators: ModuleType, monkeypatch: pytest.MonkeyPatch) -> InteractionParts:
    """The parts' kernels as operators, which run their references on the CPU; nothing is compiled there."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return InteractionParts(operators, "cpu")


@pytest.mark.parametrize("part", [*PARTS, *COMPILED_PARTS], ids=str)
def test_every_form_can_be_run_and_agrees_with_float64(interactions: InteractionParts, part: Part) -> None:
    prepared = interactions.prepare(part)
    assert prepared.check(prepared.call(*prepared.arguments)) == Check()
    assert (prepared.less is not None) == (part.kernel == COMPILED and part.work in BACKWARDS)


@pytest.mark.parametrize("part", [*PARTS, *COMPILED_PARTS], ids=str)
def test_wrong_samples_are_found(interactions: InteractionParts, part: Part) -> None:
    prepared = interactions.prepare(part)
    made = prepared.call(*prepared.arguments)
    first = (made[0] if isinstance(made, tuple | list) else made).detach()
    first.copy_(first.roll(1, 0))
    assert "dB against its reference" in prepared.check(made).wrong


def test_wrong_sums_are_found_where_all_samples_are_looked_at(interactions: InteractionParts) -> None:
    part = next(part for part in PARTS if part.work is PartKind.FM_INTERACTION_BACKWARD)
    prepared = interactions.prepare(part)
    made = prepared.call(*prepared.arguments)
    made[1].mul_(1.5)
    assert prepared.check(made).wrong.startswith("drank")


def test_gradients_are_measured_with_the_reduction_of_their_sums() -> None:
    backwards = {part.around: part for part in PARTS if part.work in BACKWARDS}
    names = {around: [spec.function for spec in specs_of(part)] for around, part in backwards.items()}
    assert names["16 embeddings, rank 8, 6 sums, passing"] == [
        "fm_interaction_backward_16x32_to_8_6_passed",
        "reduce",
    ]
    assert names["5 + 3 + 1 rows, rms_norm"] == ["concat_norm_3_rms_norm_unweighted_backward_24"]


@dataclass
class StepClock:
    """A forward takes 3 us and a step 10; what was called is noted."""

    called: list[str] = field(default_factory=list)

    def time(self, call: Any, arguments: Any) -> Span:
        self.called.append(call.__name__)
        return Span({"forward": 3.0, "step": 10.0}[call.__name__], 0.02, 5)


def test_a_compiled_backward_is_its_step_less_its_forward(interactions: InteractionParts) -> None:
    part = next(part for part in COMPILED_PARTS if part.work is PartKind.CONCAT_NORM_BACKWARD)
    clock = StepClock()
    span, check = measure(part, interactions.prepare, clock.time)
    assert (span.us, check) == (7.0, Check())
    assert span.spread == pytest.approx((0.2**2 + 0.06**2) ** 0.5 / 7)
    assert clock.called == ["step", "forward"]


def test_a_forward_and_its_step_are_compiled_once(
    interactions: InteractionParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: compiled.append(function) or function)
    form, columns = FORMS[3]
    for part in in_order(parts_of(form, 8, columns, COMPILED)):
        interactions.prepare(part)
    assert len(compiled) == 1
    interactions.prepare(COMPILED_PARTS[0])
    assert len(compiled) == 2


def test_another_kernel_is_refused(interactions: InteractionParts) -> None:
    with pytest.raises(InputError, match="rendered or compiled, not on a kernel"):
        interactions.prepare(replace(PARTS[0], kernel="torch.scaled_mm"))


def test_the_grid_holds_the_interactions_of_the_shipped_policies() -> None:
    wanted = [parts_of(FmForm(64, 32, 32, True), 16384, 128, kernel) for kernel in (RENDERED, COMPILED)]
    wanted += [parts_of(ConcatNormForm((32, 32), True, "rms_norm", False, False), 16384, 128, COMPILED)]
    wanted += [
        parts_of(FmForm(12, 8, 6, True), 256, 32, COMPILED),
        parts_of(FmForm(16, 8, 8, True), 4096, 32, COMPILED),
    ]
    known = set(interaction_parts())
    assert {part for pair in wanted for part in pair} <= known
    assert all(specs_of(part) for part in known)
    assert {part.work for part in grid(("mix", "mix-backward"))} == {
        PartKind.FM_INTERACTION,
        PartKind.FM_INTERACTION_BACKWARD,
    }
