"""adapt, and apply where it was not called: another model, whole or not at all, and said once."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from loka import dispatch
from loka.mods.norms import BlockNorm
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

pytestmark = pytest.mark.filterwarnings("ignore:.*is on cpu.*:loka.dispatch.dispatch_errors.LokaWarning")

LINEAR = "torch.nn.modules.linear.Linear"
NORM = "torch.nn.modules.normalization.LayerNorm"
NAME = "pkg"


def tower(bias: bool = True) -> nn.Sequential:
    """Two linears with a norm and an activation between, and a head that keeps its bias."""
    torch.manual_seed(0)
    first = nn.Linear(32, 32, bias=bias)
    return nn.Sequential(first, nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 32, bias=bias), nn.Linear(32, 1))


ADAPTATIONS = (
    dispatch.Adaptation("no_bias", ("0",), LINEAR),
    dispatch.Adaptation("no_bias", ("3",), LINEAR, (("into", "4"),)),
    dispatch.Adaptation("block_norm", ("1",), NORM, (("block", 16), ("eps", 1e-5), ("width", 32))),
    dispatch.Adaptation("hard_swish", ("2",), "torch.nn.modules.activation.SiLU"),
)
BINDINGS = (sample.linears("0", "3", bias=False),)


def adapt(model: nn.Module, adaptations=ADAPTATIONS) -> None:
    """As a generated package has it."""
    dispatch.adapt(model, NAME, adaptations)


def apply(model: nn.Module, bindings=BINDINGS, mode: str = "train") -> dispatch.Patch:
    """As a generated package has it."""
    return dispatch.apply(model, NAME, bindings, target="reference", mode=mode, adaptations=ADAPTATIONS)


def quietly(model: nn.Module) -> nn.Module:
    """An adapted model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dispatch.NewModelWarning)
        adapt(model)
    return model


def is_adapted(model: nn.Module) -> bool:
    return isinstance(model[1], BlockNorm) and isinstance(model[2], nn.Hardswish) and model[0].bias is None


@pytest.mark.slow
def test_it_says_once_that_it_is_another_model_and_what_to_do():
    model = tower()
    with pytest.warns(dispatch.NewModelWarning) as said:
        adapt(model)
    assert is_adapted(model)
    (warning,) = said
    assert warning.filename == __file__  # one frame up: of a generated package, the line that called it
    text = str(warning.message)
    assert "no_bias 2 modules, block_norm 1 module, hard_swish 1 module" in text
    assert "has to be trained. Make its optimizer after this" in text
    assert "pkg.convert(state_dict)" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapt(model)
        adapt(models.mlp(), ())


def test_apply_adapts_where_that_was_not_done_and_remove_leaves_the_adapted_model():
    model, x = tower(), torch.randn(4, 32, requires_grad=True)
    with pytest.warns(dispatch.NewModelWarning, match="another model"):
        patch = apply(model)
    other = quietly(tower())
    assert is_adapted(model)
    model(x).sum().backward()
    patch.verify()
    assert not torch.equal(model(x), other(x))
    patch.remove()
    assert is_adapted(model)
    torch.testing.assert_close(model(x), other(x), rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", dispatch.NewModelWarning)
        apply(model)


def test_frozen_weights_are_those_of_the_adapted_model():
    model = tower().eval()
    with pytest.warns(dispatch.NewModelWarning):
        patch = apply(model, mode="infer")
    with torch.no_grad():
        model(torch.randn(4, 32))
    patch.verify(backward=False)


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything by which a change would show."""
    held = {name: (id(module), type(module)) for name, module in model.named_modules()}
    return held | {name: id(parameter) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("bindings", "mode", "says"),
    [
        ((sample.linears("0", "3", shape=(32, 16), bias=False),), "train", "weight has shape"),
        ((sample.linears("0", "9", bias=False),), "train", "no such module"),
        ((sample.linears("0", "3"),), "train", "no parameter 'bias'"),
        (BINDINGS, "trian", "mode must be"),
    ],
)
def test_where_kernels_cannot_be_bound_nothing_was_adapted(bindings, mode, says):
    model = tower()
    before = state_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(dispatch.BindError, match=says):
            apply(model, bindings, mode)
    assert state_of(model) == before
    assert list(model.state_dict()) == list(tower().state_dict())


def test_another_model_is_refused_with_every_reason_and_left_as_it_was():
    model = tower()
    model[1], model[2] = nn.LayerNorm(16), nn.GELU()
    before = state_of(model)
    for change in (adapt, apply):
        with pytest.raises(dispatch.BindError) as caught:
            change(model)
        assert len(caught.value.problems) == 2
        assert str(caught.value).startswith("pkg: ")
    assert state_of(model) == before
    half = tower()
    half[2] = nn.Hardswish()
    with pytest.raises(dispatch.BindError, match="changed already"):
        adapt(half)


def compiled_inside() -> nn.Module:
    model = tower()
    model[0].compile()
    return model


def bound() -> nn.Module:
    model = tower()
    sample.apply(model, (sample.linears("0", "3"),))
    return model


def wrapped_inside() -> nn.Module:
    model = tower()
    model[3] = checkpoint_wrapper(model[3])
    return model


class FSDPModule:
    """Stands in for torch's, which is known by its name."""


FSDPModule.__module__ = "torch.distributed.fsdp"


def sharded() -> nn.Module:
    model = tower()
    model[3].__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    return model


REFUSED = {
    "DataParallel": (lambda: nn.DataParallel(tower()), "wrapped in DataParallel, or a part of it is: adapt before"),
    "torch.compile": (lambda: torch.compile(tower()), "wrapped in OptimizedModule, or a part of it is: adapt before"),
    "a part": (wrapped_inside, "wrapped in CheckpointWrapper, or a part of it is: adapt before"),
    "compiled in place": (compiled_inside, "is compiled: adapt before compiling"),
    "bound": (bound, "take them off first"),
    "sharded": (sharded, "sharded by fully_shard: adapt before sharding"),
    "scripted": (
        lambda: torch.jit.script(tower()),
        "wrapped in torch.jit.script or torch.jit.trace: adapt before",
    ),
    "no model": (lambda: tower().state_dict(), "not OrderedDict"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_that_are_wrapped_or_bound_are_refused(case):
    make, says = REFUSED[case]
    with pytest.raises(dispatch.BindError, match=says):
        adapt(make())


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, checkpoint_wrapper])
def test_wrapping_after_adapt_is_right(wrap):
    model = quietly(tower())
    model[3] = checkpoint_wrapper(model[3])
    with warnings.catch_warnings():
        warnings.simplefilter("error", dispatch.NewModelWarning)
        adapt(wrap(model))
        patch = apply(wrap(model))
    assert patch.sites == ("0", "3")


def test_copies_pickles_and_state_dicts_of_the_adapted_model():
    model, x = quietly(tower()), torch.randn(4, 32)
    y = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), y)
        adapt(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", dispatch.NewModelWarning)
        patch = apply(model)
        copied = copy.deepcopy(model)
        adapt(copied)
    fresh = quietly(tower())
    fresh.load_state_dict(model.state_dict())
    patch.remove()
    assert torch.equal(fresh(x), y)
    assert dispatch.patch_of(copied).sites == ("0", "3")


def test_checkpoints_of_the_model_as_it_was():
    trained = tower().double()
    with torch.no_grad():
        trained[0].bias.zero_()
    state = trained.state_dict()
    converted = dispatch.convert(state, ADAPTATIONS)
    fresh = quietly(tower()).double()
    fresh.load_state_dict(converted)
    expected = quietly(tower()).double()
    assert set(converted) == set(expected.state_dict()) == {"0.weight", "3.weight", "4.weight", "4.bias"}
    folded = trained[4].weight @ trained[3].bias + trained[4].bias
    torch.testing.assert_close(converted["4.bias"], folded)
    assert set(state) == set(trained.state_dict())
    again = dispatch.convert(converted, ADAPTATIONS)
    assert all(torch.equal(again[name], value) for name, value in converted.items())
    with torch.no_grad():
        trained[1].weight.mul_(2)
        trained[0].bias.fill_(0.5)
    with pytest.raises(dispatch.ConvertError) as caught:
        dispatch.convert(trained.state_dict(), ADAPTATIONS)
    assert [each.name for each in caught.value.lost] == ["0.bias", "1.weight"]
    assert set(dispatch.convert(trained.state_dict(), ADAPTATIONS, drop=True)) == set(converted)
