"""GEMMs that a live model has and its plan has not: told by name and share, and nothing else is."""

from __future__ import annotations

import sys
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from generated import ranker as package
from loka import dispatch
from loka.dispatch.bind.unplanned import planned_model_of, unplanned_products
from loka.graph.planned_model import planned_model
from loka.graph.sites import discover
from loka.zoo import ranker
from tests.support import dispatch_sample as sample
from tests.support.models.dispatch_models import mlp
from tests.support.models.growing_models import HIDDEN, WIDTH, Attention, Expert, Experts, inputs

BATCH = 64
EXPERT, MATRIX = 2 * WIDTH * HIDDEN, WIDTH * WIDTH  # multiplications a sample
REST = 2 * MATRIX + WIDTH  # of the head
AGAIN = "run loka generate again"


@pytest.fixture(autouse=True)
def imported(monkeypatch):
    """The package under its name: tests that import folders of packages may have taken it away."""
    monkeypatch.setitem(sys.modules, package.__name__, package)


def planned(model):
    """What a plan of the model knows of it."""
    return planned_model(model, inputs(BATCH), {}, BATCH)


def told(live, model=None):
    """What is said of a live model that was planned as `model`, by default without what was added."""
    return unplanned_products(live, planned(model or Experts()))


def share(new, all_):
    return f"{100 * new / all_:.3g} % of the FLOPs of all GEMMs in a forward of {BATCH} samples"


def test_new_experts_are_counted_among_those_of_their_class():
    assert told(Experts(8)) == (
        f"12 GEMMs of the model are not in the package, {share(6 * EXPERT, 8 * EXPERT + REST)}: 6 of 8 Expert in "
        f"'experts' ('experts.2', 'experts.3', 'experts.4', 'experts.5' and 2 more): {AGAIN}"
    )


def test_new_modules_and_parameters_are_named():
    live = Experts()
    live.between = nn.Sequential(Expert(), nn.LayerNorm(WIDTH), Attention())
    live.head.more = nn.Parameter(torch.randn(WIDTH, WIDTH))
    live.head.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    scores = 2 * BATCH * WIDTH
    new = EXPERT + scores + MATRIX + MATRIX + WIDTH
    assert told(live) == (
        f"7 GEMMs of the model are not in the package, {share(new, 3 * EXPERT + scores + 4 * MATRIX + WIDTH)}: "
        f"'between.0', 'between.2', 'head.more', 'head.last.0', 'head.last.2': {AGAIN}"
    )


def test_one_new_gemm():
    live = Experts()
    live.head.more = nn.Parameter(torch.randn(WIDTH, WIDTH))
    text = told(live)
    assert text.startswith(f"1 GEMM of the model is not in the package, {share(MATRIX, 2 * EXPERT + REST + MATRIX)}")


def with_what_multiplies_nothing(model):
    model.between = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(), nn.PReLU())
    model.other = nn.Linear(WIDTH, WIDTH)  # not called
    model.tables = nn.ModuleList([nn.Embedding(30, WIDTH), nn.EmbeddingBag(30, WIDTH)])
    model.free = nn.Parameter(torch.randn(WIDTH, WIDTH))
    model.loss = nn.BCEWithLogitsLoss()
    return model


def with_fewer(model):
    model.spare = nn.Identity()
    del model.experts[1]
    return model


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model,
        with_what_multiplies_nothing,
        with_fewer,
        lambda model: model.bfloat16(),
        lambda model: model.to("meta"),
        lambda model: model.requires_grad_(False).eval(),
        nn.DataParallel,
        checkpoint_wrapper,
        lambda model: torch.compile(model, backend="eager"),
    ],
)
def test_nothing_is_told_of_what_was_planned_or_multiplies_nothing(change):
    live = dispatch.patch.unwrap(change(Experts()))
    assert told(live) == ""


def wrapped_inside(model):
    """With every expert in wrappers."""
    for place, expert in enumerate(model.experts):
        model.experts[place] = checkpoint_wrapper(torch.compile(nn.DataParallel(expert), backend="eager"))
    return model


def test_wrappers_have_no_part_in_names():
    assert told(wrapped_inside(Experts())) == ""
    assert "2 of 4 Expert in 'experts' ('experts.2', 'experts.3')" in told(wrapped_inside(Experts(4)))


def test_what_the_plan_calls_never_called_is_known():
    live = Experts()
    live.run_spare = True
    assert told(live) == ""
    live.between = live.spare  # under another name
    assert told(live).endswith(f"'between.weight': {AGAIN}")


def test_nothing_is_read_where_nothing_is_new(monkeypatch):
    def fail(built):
        raise AssertionError(built)

    monkeypatch.setattr(discover, "find_sites", fail)
    assert told(Experts()) == ""


def test_the_model_and_the_random_state_are_left_alone():
    live, known = Experts(3), planned(Experts())
    state, seen = torch.get_rng_state(), []
    live.experts[2].register_forward_hook(lambda *_: seen.append(1))
    before = {name: (id(value), value.clone()) for name, value in live.named_parameters()}
    assert unplanned_products(live, known)
    assert not seen
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in live.named_parameters():
        assert id(value) == before[name][0]
        assert torch.equal(value, before[name][1])


class Reads(Experts):
    """Its forward asks for a value."""

    def forward(self, x, ids):
        return super().forward(x, ids) if x.sum() > 0 else x


def test_matrices_are_told_where_the_forward_cannot_be_run_without_values():
    live = Reads(3)
    live.tables = nn.Embedding(30, WIDTH)
    live.norm = nn.LayerNorm(WIDTH)
    text = told(live, Reads())
    matrices = 3 * EXPERT + 3 * MATRIX + WIDTH
    assert text.startswith(
        f"2 matrices of the model are not in the package, {100 * EXPERT / matrices:.3g} % of the elements of all: "
        "'experts.2.up.weight', 'experts.2.down.weight'; which GEMMs they are in was not found (model: the forward of "
        "Reads reads the value of a tensor"
    )
    assert text.endswith(AGAIN)


def test_matrices_are_told_where_the_arguments_have_no_description():
    known = planned_model(Experts(), (*inputs(BATCH), object()), {}, BATCH)
    text = unplanned_products(Experts(3), known)
    assert "2 matrices" in text
    assert "(the package cannot describe the arguments of its forward)" in text
    live = Experts()
    live.tables, live.norm = nn.Embedding(30, WIDTH), nn.LayerNorm(WIDTH)
    assert unplanned_products(live, known) == ""


OUT = (
    "generated.ranker: 2 GEMMs of the model are not in the package, 0.392 % of the FLOPs of all GEMMs in a forward of "
    f"16384 samples: 'head.out.0', 'head.out.2': {AGAIN}"
)


def deeper():
    """The ranker with a deeper last layer, which the plan keeps: no generated forward is another."""
    model = ranker()
    model.head.out = nn.Sequential(nn.Linear(2048, 64), nn.ReLU(), nn.Linear(64, 1))
    return model


@pytest.mark.filterwarnings("ignore:.*is on cpu")
def test_apply_warns_of_it():
    with pytest.warns(dispatch.LokaWarning) as caught:
        patch = package.apply(deeper())
    assert [str(each.message) for each in caught if "on cpu" not in str(each.message)] == [OUT]
    assert caught[-1].filename == __file__
    assert len(patch.sites) > 0


@pytest.mark.filterwarnings("ignore:.*is on cpu")
def test_strict_refuses_it_and_leaves_the_model():
    model = deeper()
    with pytest.raises(dispatch.BindError) as error:
        package.apply(model, strict=True)
    assert str(error.value).startswith(
        "generated.ranker does not know all of this model, which is left as it was [LK052]:\n  2 GEMMs of the model "
    )
    assert not any(isinstance(module, dispatch.Bound) for module in model.modules())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not in the package")
        package.apply(ranker(), strict=True)


def test_a_difference_inside_a_planned_owner_is_told_as_before():
    model = deeper()
    model.head.mlp.append(nn.Linear(2048, 2048))
    with pytest.raises(dispatch.BindError, match="its own forward is another"):
        package.apply(model)


def test_strict_needs_a_plan_that_knows_the_model():
    assert planned_model_of(package.__name__).parameters
    assert planned_model_of(sample.__name__) is None
    assert planned_model_of("no.such.package") is None
    with pytest.raises(dispatch.BindError, match=r"strict needs a plan\.json of this LoKA beside the package"):
        dispatch.apply(mlp(), sample.__name__, sample.MLP, target="reference", strict=True)
