"""Carrying adaptations out on live models, all or nothing, and taking checkpoints across."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from loka.errors import InputError
from loka.mods.adapt import AdaptError, ConvertError, adapt, convert, is_adapted
from loka.mods.adaptation import Adaptation
from loka.mods.norms import BlockNorm
from loka.mods.registry import module_mod
from tests.support.models import adapted_models as models

MODS = ("no_bias", "block_norm", "hard_swish", "norm_first")
X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def model(*widths: int) -> nn.Sequential:
    torch.manual_seed(1)
    made = models.mlp(*(widths or (32, 64, 48)))
    models.random_parameters(made)
    return made


def structure(module: nn.Module) -> list[tuple[str, str]]:
    return [(name, repr(child)) for name, child in module.named_modules()] + [
        (name, str(tuple(parameter.shape))) for name, parameter in module.named_parameters()
    ]


@pytest.fixture(scope="module")
def adaptations() -> tuple[Adaptation, ...]:
    return models.carried_out(MODS, model(), X)


def test_adapting_a_fresh_model_gives_what_finding_gave(adaptations):
    planned, live = model(), model()
    models.carried_out(MODS, planned, X)
    assert not is_adapted(live, adaptations)
    adapt(live, adaptations)
    assert structure(live) == structure(planned)
    assert torch.equal(live(X), planned(X))
    assert is_adapted(live, adaptations)
    adapt(live, adaptations)  # again: nothing happens
    assert structure(live) == structure(planned)


def test_no_mods_change_nothing():
    live = model()
    before, parameters = structure(live), list(live.parameters())
    adapt(live, ())
    assert structure(live) == before
    assert all(a is b for a, b in zip(live.parameters(), parameters, strict=True))
    assert is_adapted(live, ())


def test_either_order_of_block_norm_and_norm_first_is_the_same_model():
    made = []
    for order in (("block_norm", "norm_first"), ("norm_first", "block_norm")):
        planned, live = model(64, 64, 64), model(64, 64, 64)
        adaptations = models.carried_out(order, planned, torch.randn(4, 64))
        adapt(live, adaptations)
        assert is_adapted(live, adaptations)
        made += [structure(planned), structure(live)]
    assert all(each == made[0] for each in made)


@pytest.mark.parametrize("wrong", ["missing", "type", "width", "bias", "order"])
def test_another_model_is_refused_as_a_whole(adaptations, wrong):
    live = model()
    if wrong == "missing":
        del live[5]
    elif wrong == "type":
        live[4] = nn.RMSNorm(48)
    elif wrong == "width":
        live[3], live[4] = nn.Linear(64, 40), nn.LayerNorm(40)
    elif wrong == "bias":
        live[3].bias = None
    else:
        live._modules["4"], live._modules["3"] = live._modules.pop("4"), live._modules.pop("3")
    before, parameters = structure(live), [id(parameter) for parameter in live.parameters()]
    with pytest.raises(AdaptError, match="nothing was changed") as caught:
        adapt(live, adaptations)
    assert structure(live) == before
    assert [id(parameter) for parameter in live.parameters()] == parameters
    assert caught.value.problems


@pytest.mark.parametrize("place", [1, 2])
def test_modules_with_hooks_are_not_exchanged(adaptations, place):
    live = model()
    live[place].register_forward_hook(lambda module, args, out: None)
    before = structure(live)
    with pytest.raises(AdaptError, match=f"{place} cannot be exchanged: it has hooks"):
        adapt(live, adaptations)
    assert structure(live) == before


def test_all_problems_are_told_at_once(adaptations):
    live = model()
    live[1], live[4], live[2] = nn.RMSNorm(64), nn.LayerNorm((48,), elementwise_affine=False), nn.ReLU()
    live[4].normalized_shape = (4, 12)
    with pytest.raises(AdaptError) as caught:
        adapt(live, adaptations)
    text = str(caught.value)
    assert "1 is a torch.nn.modules.normalization.RMSNorm, not a torch" in text
    assert "4 normalises (4, 12), not (48,)" in text
    assert "2 is a torch.nn.modules.activation.ReLU" in text


def test_a_model_that_is_adapted_in_part_is_refused(adaptations):
    live = model()
    module_mod("hard_swish").change(live, next(each for each in adaptations if each.mod == "hard_swish"))
    before = structure(live)
    for ask in (adapt, is_adapted):
        with pytest.raises(AdaptError, match="some modules are changed already"):
            ask(live, adaptations)
    assert structure(live) == before


def test_a_wrapped_model_is_told():
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model()

    with pytest.raises(AdaptError, match=r"wrapped in a Wrapper, adapt what it wraps \('.module'\)"):
        adapt(Wrapper(), models.carried_out(("no_bias",), model(), X))


def test_an_exception_midway_leaves_the_model_as_it_was(adaptations, monkeypatch):
    live = model()
    before = structure(live)
    broken = module_mod("hard_swish")
    change = type(broken).change

    def stop(self: object, module: nn.Module, adaptation: Adaptation) -> None:
        change(broken, module, adaptation)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(broken), "change", stop)
    with pytest.raises(KeyboardInterrupt):
        adapt(live, adaptations)
    assert structure(live) == before
    assert all(isinstance(live[place], nn.Linear) for place in (0, 3, 6))


def test_an_unknown_mod_is_refused():
    with pytest.raises(InputError, match="no mod is called 'no_bais'"):
        adapt(model(), (Adaptation("no_bais", ("0",), "torch.nn.modules.linear.Linear"),))
    with pytest.raises(InputError, match="no mod is called"):
        convert({}, (Adaptation("no_bais", ("0",), "torch.nn.modules.linear.Linear"),))


def test_the_mode_stays():
    live = model().eval()
    adapt(live, models.carried_out(MODS, model(), X))
    assert not any(module.training for module in live.modules())


class Shared(nn.Module):
    """One block, one norm and one activation under several names."""

    def __init__(self) -> None:
        super().__init__()
        norm, activation = nn.LayerNorm(32), nn.SiLU()
        self.one = nn.Sequential(nn.Linear(32, 32), norm, activation)
        self.two = nn.Sequential(nn.Linear(32, 32), norm, activation)
        self.three = self.one
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.three(self.two(self.one(x))))
        return out


def test_shared_modules_stay_shared_and_keep_their_names():
    live = Shared()
    adaptations = models.carried_out(("block_norm", "hard_swish"), Shared(), X)
    state = {name: value.clone() for name, value in live.state_dict().items()}
    adapt(live, adaptations)
    assert is_adapted(live, adaptations)
    assert live.one[1] is live.two[1] is live.three[1]
    assert isinstance(live.one[1], BlockNorm)
    assert live.one[2] is live.two[2]
    converted = convert(state, adaptations)
    assert not [name for name in converted if "1." in name]
    live.load_state_dict(converted)


@pytest.mark.parametrize("mods", [(mod,) for mod in MODS] + [MODS], ids=lambda mods: "_".join(mods))
def test_copies_pickles_and_checkpoints_of_adapted_models(mods):
    live = model()
    adaptations = models.carried_out(mods, live, X)
    expected = live(X)
    for twin in (copy.deepcopy(live), pickle.loads(pickle.dumps(live))):  # noqa: S301 - our own bytes
        assert torch.equal(twin(X), expected)
        assert is_adapted(twin, adaptations)
    other = model()
    adapt(other, adaptations)
    other.load_state_dict(live.state_dict())
    assert torch.equal(other(X), expected)
    assert {name: value.tolist() for name, value in convert(live.state_dict(), adaptations).items()} == {
        name: value.tolist() for name, value in live.state_dict().items()
    }


def test_a_bias_folds_through_a_linear_only_to_one_that_keeps_its_own():
    plain = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 16, bias=False), nn.Linear(16, 8))
    assert models.seen(plain, X).into == {"0": "1", "1": "2"}
    (only,) = models.find("no_bias", plain, X).adaptations
    assert (only.modules, only.settings) == (("0",), ())


def test_what_would_be_lost_is_told_and_left_out_when_told():
    live = model()
    adaptations = models.carried_out(MODS[:3], model(), X)
    state = live.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    with pytest.raises(ConvertError, match="drop=True") as caught:
        convert(state, adaptations)
    assert [each.name for each in caught.value.lost] == [
        "0.bias", "3.bias", "1.weight", "1.bias", "4.weight", "4.bias",
    ]  # fmt: skip
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], value) for name, value in before.items())
    adapt(live, adaptations)
    live.load_state_dict(convert(before, adaptations, drop=True))
    assert torch.equal(live[0].weight, before["0.weight"])


def test_zeros_and_ones_go_in_silence():
    live = models.mlp(32, 64)
    with torch.no_grad():
        live[0].bias.zero_()
    state = live.state_dict()
    adaptations = models.carried_out(MODS, models.mlp(32, 64), X)
    adapt(live, adaptations)
    live.load_state_dict(convert(state, adaptations))


def test_norm_first_makes_parameters_for_the_other_width():
    live = model()
    adaptations = models.carried_out(("norm_first",), model(), X)
    state = live.state_dict()
    with pytest.raises(ConvertError) as caught:
        convert(state, adaptations)
    assert [each.name for each in caught.value.lost] == ["1.weight", "1.bias", "4.weight", "4.bias"]
    converted = convert(state, adaptations, drop=True)
    assert torch.equal(converted["1.weight"], torch.ones(32))
    assert torch.equal(converted["4.bias"], torch.zeros(64))
    adapt(live, adaptations)
    live.load_state_dict(converted)


def test_norm_first_keeps_the_parameters_of_an_equal_width():
    live = model(32, 32)
    adaptations = models.carried_out(("norm_first",), model(32, 32), X)
    converted = convert(live.state_dict(), adaptations)
    assert {name: value.tolist() for name, value in converted.items()} == {
        name: value.tolist() for name, value in live.state_dict().items()
    }
    norm = live[1]
    adapt(live, adaptations)
    assert list(live._modules) == ["1", "0", "2", "3"]
    assert live[0] is norm


def test_a_checkpoint_of_another_model_is_refused():
    plain = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 16))
    adaptations = models.find("no_bias", plain, X).adaptations
    state = {name: value for name, value in plain.state_dict().items() if name != "1.weight"}
    with pytest.raises(InputError, match=r"no '1\.weight', which no_bias needs"):
        convert(state, adaptations)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (model(), "takes a state_dict, not Sequential"),
        (None, "takes a state_dict, not NoneType"),
        ({}, "has no '.*weight'"),
        ({"epoch": 3, "model": model().state_dict()}, "has no '.*weight'"),
        ({f"module.{name}": value for name, value in model().state_dict().items()}, "take 'module.' off"),
        ({f"_orig_mod.{name}": value for name, value in model().state_dict().items()}, "take '_orig_mod.' off"),
        ({name: value.numpy() for name, value in model().state_dict().items()}, "of type ndarray, and no tensor"),
        (model().state_dict() | {"0.bias": torch.ones(3)}, r"bias of '0' has shape \(3,\).* \(64,\): it is of another"),
    ],
)
@pytest.mark.parametrize("drop", [True, False])
def test_what_is_no_state_dict_of_the_model_is_refused(adaptations, state, says, drop):
    with pytest.raises(InputError, match=says):
        convert(state, adaptations, drop=drop)


def test_a_bias_that_does_not_fit_what_takes_it_is_refused():
    plain = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 1))
    found = models.find("no_bias", plain, X)
    other = nn.Sequential(nn.Linear(32, 20), nn.Linear(24, 1)).state_dict()
    before = {name: value.clone() for name, value in other.items()}
    with pytest.raises(InputError, match=r"shape \(20,\).*\(24,\)"):
        convert(other, found.adaptations)
    assert all(torch.equal(other[name], value) for name, value in before.items())


def test_a_state_dict_keeps_its_versions():
    state = nn.BatchNorm1d(4).state_dict()
    assert convert(state, ())._metadata == state._metadata  # type: ignore[attr-defined]


def test_values_without_storage_are_told():
    with torch.device("meta"):
        state = models.mlp(32, 64).state_dict()
    adaptations = models.carried_out(("no_bias", "block_norm"), models.mlp(32, 64), X)
    with pytest.raises(ConvertError) as caught:
        convert(state, adaptations)
    assert len(caught.value.lost) == 3


def test_models_on_the_meta_device_are_adapted():
    with torch.device("meta"):
        live = models.mlp(32, 64, 48)
    adapt(live, models.carried_out(MODS, models.mlp(32, 64, 48), X))
    assert {parameter.device.type for parameter in live.parameters()} == {"meta"}


def test_dtypes_and_gradients_of_new_norms_are_those_of_the_old():
    live = models.mlp(32, 64).to(torch.bfloat16)
    live[1].weight.requires_grad_(False)
    adapt(live, models.carried_out(("norm_first",), models.mlp(32, 64), X))
    norm = live.get_submodule("1")
    assert norm.weight.dtype == torch.bfloat16
    assert (norm.weight.requires_grad, norm.bias.requires_grad) == (False, True)


def test_an_adaptation_of_another_width_is_refused(adaptations):
    changed = [replace(each, settings=(("block", 64), ("eps", 1e-5), ("width", 128))) for each in adaptations[2:3]]
    with pytest.raises(AdaptError, match=r"not \(128,\)"):
        adapt(model(), changed)
