"""A model that is no longer what a package was generated from is refused, whenever the two would compute unlike."""

from __future__ import annotations

import copy

import pytest
from hypothesis import assume, given, reject
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from loka import dispatch
from tests.support.models.changed_models import SHAPES, agree, bound_as, inputs, made, outcome
from tests.support.models.model_changes import changes

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WAYS = [(name, inline) for name, shape in SHAPES.items() for inline in shape.inlines]
ENDS = [
    (name, inline) for name, shape in SHAPES.items() for inline in dict.fromkeys((shape.inlines[0], shape.inlines[-1]))
]


def bind(model, shape, inline):
    binding = bound_as(shape, inline)[0]
    return dispatch.apply(model, "p", (binding,), target="reference")


@pytest.mark.parametrize(("shape", "inline"), ENDS)
def test_an_unchanged_model_is_bound_and_computes_the_same(shape, inline):
    model = made(shape)
    patch = bind(model, shape, inline)
    assert agree(model, made(shape), inputs(shape))
    patch.verify()


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
@hypothesis_settings(max_examples=8)
@given(st.data(), st.sampled_from(WAYS))
def test_what_changed(before, data, which):
    """Before apply, which refuses it, or after, which verify finds; otherwise the two compute the same."""
    model, twin = made(which[0]), made(which[0])
    patch, refusal = (None, dispatch.BindError) if before else (bind(model, *which), dispatch.VerifyError)
    change(data, (model, twin))
    try:
        patch = patch or bind(model, *which)
        patch.verify()
    except refusal:
        return
    assert agree(model, twin, inputs(which[0]))


@pytest.mark.slow
@hypothesis_settings(max_examples=7)
@given(st.data(), st.sampled_from(WAYS), st.booleans())
def test_what_changed_inside_a_child_that_is_called(data, which, before):
    binding, _ = bound_as(*which)
    lines = binding.fingerprint.calls[0].training
    free = [name for name, _ in made(which[0]).named_modules() if any(f" = self.{name}(" in line for line in lines)]
    free = [name for name in free if not any(f"self.{name}." in line for line in lines)]
    assume(free and which[0] != "shared")  # what is shared is not inside one child alone
    path = data.draw(st.sampled_from(free))
    model, twin = made(which[0]), made(which[0])
    patch = None if before else bind(model, *which)
    change(data, (twin.get_submodule(path), model.get_submodule(path)))
    assume(
        not isinstance(outcome(copy.deepcopy(twin), inputs(which[0]), training=True), str)
    )  # a child that cannot run is refused
    # A copy of torch's Softmax has the `dim` again that the child itself has lost.
    assume(not isinstance(outcome(twin, inputs(which[0]), training=False), str))
    patch = patch or bind(model, *which)
    patch.verify()
    assert agree(model, twin, inputs(which[0]))


def change(data, models):
    """One or two changes, drawn from those that the first of the models allows, made in each."""
    for _ in range(data.draw(st.integers(1, 2), "how many")):
        drawn = data.draw(st.sampled_from(changes(models[0])), "change")
        for model in models:
            try:
                drawn.make(model)
            except (AttributeError, IndexError, KeyError, TypeError):
                reject()  # torch cannot make the second change after the first
