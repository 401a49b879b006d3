"""GEMMs of the backward are there where a gradient needs them: weights, inputs, and what the model returns."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ALL, NONE = ["fprop", "dgrad", "wgrad"], ["fprop"]
TO_WEIGHT, TO_INPUT = ["fprop", "wgrad"], ["fprop", "dgrad"]


def linear() -> nn.Linear:
    return nn.Linear(8, 8)


class Two(nn.Module):
    """A linear, and another one on what `between` makes of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(), linear()

    def between(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


def gemms(find, model):
    """The GEMMs of each site."""
    return {site.name: [gemm.value for gemm in site.gemms] for site in find(model, torch.randn(6, 8)).sites}


def frozen(*names):
    """Two linears, of which some are frozen."""
    model = Two()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("names", "first", "last"),
    [
        ((), TO_WEIGHT, ALL),
        (("first",), NONE, TO_WEIGHT),
        (("last",), TO_WEIGHT, TO_INPUT),
        (("first", "last"), NONE, NONE),
    ],
)
def test_frozen_weights_have_no_wgrad_and_a_frozen_tower_no_backward(find, names, first, last):
    assert gemms(find, frozen(*names)) == {"first": first, "last": last}


class Adapted(nn.Module):
    """LoRA on a frozen base."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_lora(find):
    assert gemms(find, nn.Sequential(Adapted(), Adapted())) == {
        "0.base": NONE, "0.down": TO_WEIGHT, "0.up": ALL, "1.base": TO_INPUT, "1.down": ALL, "1.up": ALL,
    }  # fmt: skip


class Parameters(nn.Module):
    """Products of Parameters, one of which is frozen, and of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.frozen = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.frozen.t()
        y = y @ self.w
        y = torch.addmm(y, y, self.frozen)
        y = torch.einsum("bi,io->bo", y, self.w)
        y = y @ y.t()
        return y + x @ x.t()


def test_products_of_parameters(find):
    sites = find(Parameters(), torch.randn(6, 8)).sites
    assert [(site.weight, [gemm.value for gemm in site.gemms]) for site in sites] == [
        ("frozen", NONE), ("w", TO_WEIGHT), ("frozen", TO_INPUT), ("w", ALL), (None, ALL), (None, NONE),
    ]  # fmt: skip


class Level(Two):
    """The last of several levels: one of its results is for a next one."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return self.last(y), torch.sigmoid(self.unused(y)) * y


class Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.level = Level()

    def forward(self, x: Tensor) -> Tensor:
        return self.level(x)[0]


def test_what_no_output_reads_has_no_backward(find):
    assert gemms(find, Levels()) == {"level.first": TO_WEIGHT, "level.last": ALL, "level.unused": NONE}
    assert gemms(find, Level()) == {"first": TO_WEIGHT, "last": ALL, "unused": ALL}


class Detached(Two):
    def between(self, y: Tensor) -> Tensor:
        return F.relu(y).detach()


class WithoutGradients(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.first(x)
        return self.last(y)


class Asked(Two):
    """What is only compared gets no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.first(x) > 0, self.last(x), 0.0)


@pytest.mark.parametrize("kind", [Detached, WithoutGradients, Asked])
def test_gradients_end_where_the_forward_ends_them(find, kind):
    assert gemms(find, kind()) == {"first": NONE, "last": TO_WEIGHT}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class ThroughFunction(Two):
    def between(self, y: Tensor) -> Tensor:
        return Doubled.apply(y)


class Checkpointed(Two):
    def between(self, y: Tensor) -> Tensor:
        return checkpoint(F.relu, y, use_reentrant=False)


class WrittenInto(Two):
    """Into a view of what is returned."""

    def between(self, y: Tensor) -> Tensor:
        made = torch.zeros(y.shape[0], 2, 8)
        made.select(1, 0).copy_(y)
        made[:, 1] += y
        return made.sum(1)


class Kept(Two):
    """As an attribute, for a loss to read."""

    def forward(self, x: Tensor) -> Tensor:
        self.aside = self.first(x)
        return self.last(x)


class Unread(Two):
    """Asks for a value, so that its children are read alone."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y) if float(y.sum()) > 0 else self.last(-y)


@pytest.mark.parametrize("kind", [ThroughFunction, Checkpointed, WrittenInto, Unread])
def test_gradients_come_through_what_is_not_plain(find, kind):
    assert gemms(find, kind()) == {"first": TO_WEIGHT, "last": ALL}


def test_what_is_kept_as_an_attribute_may_be_in_a_loss(find):
    assert gemms(find, Kept()) == {"first": TO_WEIGHT, "last": TO_WEIGHT}
