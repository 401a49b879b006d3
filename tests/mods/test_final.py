"""Which linears are final prediction layers, which linear alone reads another's product, and who else reads a bias."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.errors import InputError
from tests.support.models import adapted_models as models


class Heads(nn.Module):
    """A trunk with several heads, whose results come back in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.click, self.like = nn.Linear(16, 1), nn.Sequential(nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 1))
        self.form = form

    def forward(self, x: Tensor) -> object:
        h = torch.relu(self.trunk(x))
        click, like = torch.sigmoid(self.click(h)), self.like(h)
        forms = {
            "tuple": (click, [like]),
            "dict": {"click": click.squeeze(1), "rest": {"like": like}},
            "sum": click + 0.5 * like,
            "stacked": torch.stack([click, like]).mean(),
            "product": click * like,
        }
        return forms[self.form]


@pytest.mark.parametrize("form", ["tuple", "dict", "sum", "stacked", "product"])
def test_every_head_of_a_model_is_final(form):
    assert models.seen(Heads(form), torch.randn(4, 8)).final == {"click", "like.2"}


class Embedding(nn.Module):
    """A trunk whose representation is an output beside the prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.layer_norm(self.trunk(x), (16,))
        return {"embedding": h, "logit": self.head(h)}


def test_a_representation_that_comes_back_is_final_too():
    assert models.seen(Embedding(), torch.randn(4, 8)).final == {"trunk", "head"}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        x = x + self.b(x)
        return self.head(x)


def test_residuals_before_a_head_are_not_final():
    assert models.seen(Residual(), torch.randn(4, 8)).final == {"head"}


class Written(nn.Module):
    """Writes predictions into its output through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        out = torch.empty(x.size(0), 2)
        out[:, 0:1] = self.one(h)
        out.narrow(1, 1, 1).copy_(self.two(h))
        return out


def test_predictions_written_into_an_output_are_final():
    assert models.seen(Written(), torch.randn(4, 8)).final == {"one", "two"}


class Values(nn.Module):
    """Reads a value, which fake tensors do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.head(h if float(h.sum()) > -1e9 else -h)


def test_a_forward_that_reads_values_is_run_on_real_samples():
    assert models.seen(Values(), torch.randn(4, 8)).final == {"head"}


class Modes(nn.Module):
    """Gives another head's result in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.train_head, self.eval_head = nn.Linear(8, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return self.train_head(h) if self.training else self.eval_head(h)


def test_heads_of_either_mode_are_final():
    model = Modes()
    found = models.seen(model, torch.randn(4, 8))
    assert found.final == {"train_head", "eval_head"}
    assert found.into == {}
    assert model.training


def test_a_subclass_with_torchs_forward_counts():
    class Mine(nn.Linear):
        pass

    assert models.seen(nn.Sequential(nn.Linear(8, 8), Mine(8, 1)), torch.randn(4, 8)).final == {"1"}


class Views(nn.Module):
    def __init__(self, change: str) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:  # (B, 6, 6)
        y = self.a(x)
        changes = {
            "none": lambda: y,
            "rows": lambda: y.reshape(-1, 6).unsqueeze(0),
            "transposed": lambda: y.transpose(1, 2),
            "relu": lambda: torch.relu(y),
            "half": lambda: y[:, :3],
            "flat": lambda: y.flatten(1).view(-1, 6),
        }
        return self.head(self.b(changes[self.change]())).sum() + (y.sum() if self.change == "read" else 0.0)


@pytest.mark.parametrize(
    ("change", "into"),
    [("none", "b"), ("rows", "b"), ("flat", "b"), ("transposed", None), ("relu", None), ("half", None)],
)
def test_only_views_that_keep_rows_may_stand_between_two_linears(change, into):
    found = models.seen(Views(change), torch.randn(4, 6, 6))
    assert found.into.get("a") == into
    assert found.into.get("b") == "head"


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = self.a(x), self.b(x)
        return self.c(y) + y, self.c(z)


def test_a_product_that_two_read_and_a_linear_that_reads_two_fold_nowhere():
    assert models.seen(ReadTwice(), torch.randn(4, 6)).into == {}


class Weighted(nn.Module):
    """Uses a product as a weight: nothing to fold into."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.a(x[:6])) + F.linear(x, self.w.weight, self.w.bias)


def test_who_else_reads_a_bias_is_seen():
    found = models.seen(Weighted(), torch.randn(8, 6))
    assert found.into == {}
    assert found.read["w.bias"] == "linear"
    assert "w" not in found.called
    assert [call.op for call in found.written] == ["linear"]
    assert found.written[0].place.startswith("test_final.py:")


def test_a_model_that_cannot_run_is_refused():
    with pytest.raises(InputError, match="make model"):
        models.seen(nn.Linear(5, 1), torch.randn(4, 8))


def test_the_model_stays_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    models.seen(model, torch.randn(4, 8, generator=torch.Generator().manual_seed(0)))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert all("forward" not in vars(module) for module in model.modules())
