"""What mods find, and what they refuse by name with the reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from loka.mods.dataflow import Adaptable
from loka.mods.protocols import ModMatch
from loka.mods.registry import ModKind, module_mod, names_of
from tests.support.models import adapted_models as models


def names(found: ModMatch) -> list[str]:
    return [name for adaptation in found.adaptations for name in adaptation.modules]


def reasons(found: ModMatch) -> dict[str, str]:
    return {each.name: each.reason for each in found.unchanged}


class Wrapped(nn.Module):
    """A body between two linears; the last is the model's prediction."""

    def __init__(self, body: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight) + self.bias


class ReadsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.linear.bias.sum()


class NeverCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        out: Tensor = self.attention(x, x, x, need_weights=False)[0].squeeze(1)
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.unsqueeze(1)).squeeze(1)
        return out


def shared_module() -> nn.Module:
    linear = nn.Linear(8, 8)
    return nn.Sequential(linear, nn.ReLU(), linear)


def shared_bias() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].bias = model[0].bias
    return model


def parametrised() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU())


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        (OwnForward(8, 8), "body", "forward of OwnForward is its own"),
        (ReadsBias(), "body.linear", "read outside of its own forward too, by 'sum'"),
        (NeverCalls(), "body.linear", "not called"),
        (Attention(), "body.attention.out_proj", "nn.MultiheadAttention reads its bias"),
        (Encoder(), "body.layer.linear1", "nn.TransformerEncoderLayer reads its bias"),
        (shared_module(), "body.0", "it is 'body.2' too"),
        (shared_bias(), "body.2", "its bias is shared"),
        (parametrised(), "body.0", "parametrised"),
        (nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.ReLU()), "body.0", "its weight is no Parameter"),
        (nn.Identity(), "head", "final prediction layer"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_no_bias_refuses(body, name, reason):
    model = Wrapped(body)
    found = models.find("no_bias", model, torch.randn(4, 8))
    assert reason in reasons(found)[name]
    assert name not in names(found)
    (only,) = models.find("no_bias", model, torch.randn(4, 8), match=[name]).unchanged
    assert only.name == name


def test_no_bias_takes_final_layers_when_told():
    model = models.mlp(8, 16)
    assert names(models.find("no_bias", model, torch.randn(4, 8))) == ["0"]
    assert names(models.find("no_bias", model, torch.randn(4, 8), final="drop")) == ["0", "3"]


def test_biases_on_paths_that_join_fold_towards_one_linear():
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "b", "c", "d", "end", "round", "about")})
    into = {"a": "c", "b": "c", "c": "d", "d": "end", "round": "about", "about": "round"}
    seen = Adaptable(model, frozenset({"end"}), into, frozenset(model.keys()))
    found = module_mod("no_bias").find(seen, models.asked(settings={"final": "keep"}))
    assert [(each.modules, dict(each.settings).get("into")) for each in found.adaptations] == [
        (("a", "b"), "c"), (("c",), "d"), (("d",), "end"), (("round", "about"), None),
    ]  # fmt: skip


def test_what_a_pattern_names_and_is_nothing_for_the_mod_is_told():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    assert reasons(models.find("no_bias", model, x, match=["0", "1"])) == {
        "0": "it has no bias", "1": "it is a nn.ReLU, no nn.Linear",
    }  # fmt: skip
    assert "nn.Linear, no nn.LayerNorm" in reasons(models.find("block_norm", model, x, match=["0"]))["0"]
    assert "neither an nn.SiLU" in reasons(models.find("hard_swish", model, x, match=["1"]))["1"]
    assert "not followed by a norm" in reasons(models.find("norm_first", model, x, match=["0"]))["0"]
    for mod in names_of(ModKind.MODULES):
        assert models.find(mod, nn.Sequential(nn.Linear(8, 1, bias=False)), x) == ModMatch()


def test_biases_in_functional_linears_are_told():
    found = models.find("no_bias", Wrapped(NeverCalls()), torch.randn(4, 8))
    assert "F.linear at test_mods_find.py:" in reasons(found)["body"]


def test_block_norm_takes_norms_by_their_widths():
    model = nn.Sequential(nn.LayerNorm(96), nn.RMSNorm(96), nn.Linear(96, 24), nn.LayerNorm(24), nn.Linear(24, 1))
    found = models.find("block_norm", model, torch.randn(4, 96))
    assert [(each.modules, dict(each.settings)) for each in found.adaptations] == [
        (("0",), {"block": 32, "eps": 1e-5, "width": 96}),
        (("1",), {"block": 32, "eps": 1e-6, "width": 96}),
    ]
    assert "width of 24" in reasons(found)["3"]


class MyNorm(nn.LayerNorm):
    pass


class Held(nn.Module):
    """Calls its norms by a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.norms = [self.norm]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norms[0](x)
        return out


def hooked() -> nn.Module:
    norm = nn.LayerNorm(16)
    norm.register_forward_hook(lambda module, args, out: None)
    return norm


@pytest.mark.parametrize(
    ("body", "name", "reason"),
    [
        (MyNorm(16), "body", "a norm of its own kind"),
        (nn.LayerNorm((4, 16)), "body", "2 dimensions together"),
        (Held(), "body.norm", "'body.norms' holds it too"),
        (hooked(), "body", "hooks"),
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), "body.norm1", "nn.TransformerEncoderLayer reads"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_block_norm_refuses(body, name, reason):
    found = models.find("block_norm", Wrapped(body, 16), torch.randn(4, 4, 16))
    assert reason in reasons(found)[name]
    assert names(found) == []


class OwnBlockNorm(nn.Module):
    """A norm over blocks that a model has already, in its own words."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.unflatten(-1, (-1, 16)), (16,), eps=1e-6).flatten(-2)


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(F.silu(x), (16,))
        return y * torch.sigmoid(F.rms_norm(y, (16,), eps=1e-6)) + torch.sigmoid(x)


def test_functions_are_told_with_their_places():
    x = torch.randn(4, 16)
    norms = [each.reason for each in models.find("block_norm", Wrapped(Functional(), 16), x).unchanged]
    assert [reason.split(" at ")[0] for reason in norms] == ["it calls F.layer_norm", "it calls F.rms_norm"]
    swishes = [each.reason for each in models.find("hard_swish", Wrapped(Functional(), 16), x).unchanged]
    assert len(swishes) == 2  # the sigmoid that is only added is none
    assert "calls F.silu at test_mods_find.py:" in swishes[0]
    assert "sigmoid(F.rms_norm" in swishes[1]
    assert models.find("block_norm", Wrapped(OwnBlockNorm(), 16), x) == ModMatch()


class Often(nn.Module):
    """Six calls of one function at places of their own, and one norm."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(x)
        x = F.silu(x + 1)
        x = F.silu(x + 2)
        x = F.silu(x + 3)
        x = F.silu(x + 4)
        x = F.silu(x + 5)
        return F.layer_norm(x, (16,))


def test_several_calls_of_one_function_are_told_with_their_places():
    (often,) = models.find("hard_swish", Wrapped(Often(), 16), torch.randn(4, 16)).unchanged
    first = Often.forward.__code__.co_firstlineno + 1
    places = ", ".join(f"test_mods_find.py:{line}" for line in range(first, first + 5))
    assert often.name == "body"
    assert often.reason == f"it calls F.silu at {places} and 1 more: write an nn module for it"


class SwishNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.gate = norm, nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gate(self.norm(x)) * x
        return out


class TorchrecSwishNorm(nn.Module):
    """As torchrec writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(width), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = input * self.norm(input)
        return out


@pytest.mark.parametrize(
    ("body", "sigmoid"),
    [(SwishNorm(nn.LayerNorm(16)), "body.gate"), (SwishNorm(nn.Identity()), "body.gate"),
     (SwishNorm(OwnBlockNorm()), "body.gate"), (TorchrecSwishNorm(16), "body.norm.1")],
)  # fmt: skip
def test_hard_swish_takes_the_sigmoids_of_swish_norms(body, sigmoid):
    model, x = Wrapped(body, 16), torch.randn(4, 16)
    found = models.find("hard_swish", model, x)
    assert (names(found), found.named) == ([sigmoid], ("body",))
    assert names(models.find("hard_swish", model, x, match=["body"])) == [sigmoid]
    assert models.find("hard_swish", model, x, match=["head"]).adaptations == ()


@pytest.mark.slow
def test_torchrecs_swish_layer_norm():
    mlp = pytest.importorskip("torchrec.modules.mlp")
    model, x = Wrapped(mlp.MLP(16, [32, 16], activation="swish_layernorm"), 16), torch.randn(4, 16)
    found = models.find("hard_swish", model, x)
    assert names(found) == [f"body._mlp.{place}._activation_fn.norm.1" for place in (0, 1)]
    assert found.named == ("body._mlp.0._activation_fn", "body._mlp.1._activation_fn")
    assert names(models.find("block_norm", model, x)) == [
        f"body._mlp.{place}._activation_fn.norm.0" for place in (0, 1)
    ]
    models.carried_out(("no_bias", "block_norm", "hard_swish"), model, x)
    model(x).sum().backward()
    assert type(model.get_submodule("body._mlp.0._activation_fn.norm.1")) is nn.Hardsigmoid


def test_a_function_in_a_module_of_torch_is_told_too():
    layer = nn.TransformerEncoderLayer(16, 2, 32, activation=F.silu, batch_first=True)
    assert reasons(models.find("hard_swish", Wrapped(layer, 16), torch.randn(4, 4, 16))) == {
        "body": "it calls F.silu: write an nn module for it"
    }


class Gate(nn.Module):
    """Sigmoids that make no Swish."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sigmoid, self.twice, self.last = nn.Linear(16, 16), nn.Sigmoid(), nn.Sigmoid(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.sigmoid(self.linear(x))
        gate = self.twice(y)
        return self.last(y * gate + gate)


def test_other_sigmoids_stay():
    model, x = Wrapped(Gate(), 16), torch.randn(4, 16)
    assert models.find("hard_swish", model, x) == ModMatch()
    named = models.find("hard_swish", model, x, match=["body.sigmoid"])
    assert "neither an nn.SiLU nor a SwishNorm" in reasons(named)["body.sigmoid"]


def test_a_shared_activation_is_taken_under_all_its_names_or_not_at_all():
    silu = nn.SiLU()
    model = nn.Sequential(nn.Linear(8, 8), silu, nn.Linear(8, 8), silu, nn.Linear(8, 1))
    x = torch.randn(4, 8)
    assert names(models.find("hard_swish", model, x)) == ["1", "3"]
    found = models.find("hard_swish", model, x, match=lambda name: name != "3")
    assert reasons(found) == {"1": "it is '3' too, which the mod does not match"}


class Indexed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts[1](self.parts[0](x))
        return out


class Reversed(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self[0](self[1](input))
        return out


def shared_norm() -> nn.Module:
    norm = nn.LayerNorm(8)
    return nn.Sequential(nn.Linear(8, 8), norm, nn.ReLU(), norm)


def block_of_narrow() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    models.carried_out(["block_norm"], model, torch.randn(4, 8))
    return model


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (Indexed(), "not called as a whole"),
        (Reversed(nn.Linear(8, 8), nn.LayerNorm(8)), "forward of Reversed"),
        (shared_norm(), "is 'body.3' too"),
        (nn.Sequential(nn.Linear(8, 8), MyNorm(8)), "a norm of its own kind"),
        (block_of_narrow(), "its width of 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_norm_first_refuses(body, reason):
    found = models.find("norm_first", Wrapped(body), torch.randn(4, 8))
    assert found.adaptations == ()
    assert [reason in text for text in reasons(found).values()] == [True]


def test_norm_first_refuses_an_input_of_one_feature():
    found = models.find("norm_first", nn.Sequential(nn.Linear(1, 8), nn.LayerNorm(8)), torch.randn(4, 1))
    assert "1 feature, too few" in reasons(found)["0"]


def test_norm_first_is_chosen_by_the_linear():
    model, x = models.mlp(8, 16), torch.randn(4, 8)
    found = models.find("norm_first", model, x, match=["0"])
    assert (names(found), found.named, found.unchanged) == (["1"], ("0",), ())
    assert models.find("norm_first", model, x, match=lambda name: name == "1") == ModMatch()
