"""Models of many shapes, for the tests of what apply and verify refuse.

A model is bound with its own traced forward as the generated one, nothing in FP8: what it computes then equals what the
model computes to the last bit, so that any difference comes from a change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka import dispatch
from loka.codegen.modules.binding_text import binding_text
from loka.errors import InputError
from loka.graph.equivalence import source
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from loka.plan.rewrite.plan_bindings import bind
from loka.zoo import SMALL_RANKER
from loka.zoo.wukong import WukongLayer, wukong_head

WIDTH = 6
SCALE = 0.5  # read by a forward below


def weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)


class Layer(nn.Module):
    """A residual layer whose activation and slope are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()
        self.drop, self.heads, self.gain = nn.Dropout(0.1), 2, 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(self.norm(x)))
        y = y.view(-1, self.heads, WIDTH // self.heads).flip(1).flatten(1)
        return x + self.gain * self.drop(y)


class Looped(nn.Module):
    """Loops over a ModuleList, and reads a Parameter of a child that it also calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.out, self.extra = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        for layer in self.extra:
            x = layer(x)
        return self.out(x) + x @ self.out[0].weight


class ByKey(nn.Module):
    """Towers and scales by their keys, which are no identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({"user id": tower(nn.LeakyReLU(0.2)), "it\"em's\n{0}": tower(nn.ELU())})
        self.scales = nn.ParameterDict({"a-b": torch.ones(WIDTH), "c": torch.full((WIDTH,), 2.0)})
        self.first = "user id"

    def forward(self, x: Tensor) -> Tensor:
        y = self.towers[self.first](x)
        for number, module in enumerate(self.towers.values()):
            y = module(y) + number
        for scale in self.scales.values():
            y = y * scale - 1
        return y


def tower(act: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH, eps=1e-5), act, nn.Identity())


class Products(nn.Module):
    """Weights in ParameterLists, in matmul and einsum, with a list of numbers and a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.ws = nn.ParameterList([weight() for _ in range(3)])
        self.pairs = nn.ParameterList([weight(), weight()])
        self.bias, self.order, self.config = None, [2, 0, 1], {"dim": -1, "keep": True}

    def forward(self, x: Tensor) -> Tensor:
        for place in self.order:
            x = x + torch.tanh(x @ self.ws[place])
        for w in self.pairs:
            x = torch.einsum("bi,ij->bj", x, w)
        if self.bias is not None:
            x = x + self.bias
        return x.cumsum(self.config["dim"])


def shifted_by(shift: int) -> Callable[[Tensor], Tensor]:
    def shifted(x: Tensor) -> Tensor:
        return x.roll(shift, 1)

    return shifted


@dataclass
class Settings:
    """A plain object that a forward reads from."""

    rounds: int = 2
    shift: int = 1


class Functional(nn.Module):
    """Activations as functions and names, an object of settings, constants from outside, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.name, self.act = nn.Linear(WIDTH, WIDTH), "gelu", torch.tanh
        self.leaky = functools.partial(F.leaky_relu, negative_slope=0.3)
        self.settings, self.own = Settings(), shifted_by(2)
        self.register_buffer("mask", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.settings.rounds):
            x = getattr(F, self.name)(self.lin(x)) * SCALE
        return self.own(self.leaky(self.act(x).roll(self.settings.shift, 1) - 0.5)) * self.mask


class Shared(nn.Module):
    """One linear under two names, one Parameter in two modules, one activation twice in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.Hardtanh(-0.5, 0.5)
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two, self.other.weight = self.one, self.one.weight
        self.net = nn.Sequential(self.one, act, nn.Linear(WIDTH, WIDTH), act)
        self.steps = [self.other, self.net]  # no child of its own

    def forward(self, x: Tensor) -> Tensor:
        x = self.two(self.one(x))
        for step in self.steps:
            x = step(x)
        return x


class Outer(nn.Module):
    """Custom modules in custom modules, optional children, children by computed names and by type."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = Inner(), None
        self.part0, self.part1 = nn.Linear(WIDTH, WIDTH), nn.Softplus(beta=2)
        self.whole = nn.Sequential(Inner(), nn.Tanh())
        self.parts = 2

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.parts):
            x = getattr(self, f"part{number}")(x)
        if self.gate is not None:
            x = self.gate(x)
        if hasattr(self, "late"):
            x = self.late(x)
        if isinstance(self.part1, nn.Softplus):
            x = x.flip(1)
        return self.whole(self.inner(x)).repeat(1, self.whole[0].times)


class Inner(nn.Module):
    """A block of its own, with a Sequential of Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()), nn.LayerNorm(WIDTH))
        self.scale, self.times, self.power = nn.Parameter(torch.rand(WIDTH)), 1, (2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        for power in self.power:
            y = y * self.scale**power
        return y


class Stack(nn.Module):
    """A container of its own kind, with a method that is called past its forward."""

    rounds = 1

    def __init__(self) -> None:
        super().__init__()
        self.items, self.offset = nn.ModuleList([Inner(), nn.Tanh()]), 1

    def __getitem__(self, place: int) -> nn.Module:
        return self.items[place - self.offset]

    def project(self, x: Tensor) -> Tensor:
        for _ in range(self.rounds):
            x = self.items[1](x).roll(self.offset, 1)
        return x


class Dynamic(nn.Module):
    """Goes through whatever it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.stack, self.second = nn.Linear(WIDTH, WIDTH), Stack(), nn.LeakyReLU(0.3)
        self.held, self.shift = nn.Module(), 1
        self.held.linear, self.gains = nn.Linear(WIDTH, WIDTH), nn.Module()
        self.gains.one, self.gains.two = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stack.project(self.stack[1](x))
        for name, child in self.named_children():
            if name not in ("stack", "held", "gains"):
                x = child(x)
        for number, gain in enumerate(self.gains.parameters()):
            x = x * gain + number
        return self.held.linear(x).roll(vars(self)["shift"], 1)


class InPlace(nn.Module):
    """An activation that writes into what the linear before it made, and a sum with what that was made from."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return x + self.act(self.linear(x)) * 2


def sequential() -> nn.Sequential:
    return nn.Sequential(tower(nn.SiLU()), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Softmax(-1)))


@dataclass(frozen=True)
class Shape:
    """A model, in several ways: with the children whose forwards are inlined; those that are left out stay calls."""

    make: Callable[[], nn.Module]
    inlines: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...] = (WIDTH,)  # of one row of its input


SHAPES: dict[str, Shape] = {
    "looped": Shape(
        Looped,
        (
            (),
            ("layers.0.act", "layers.0.drop", "layers.0.linear", "layers.1.norm", "layers.1.linear", "out.1"),
        ),
    ),
    "by key": Shape(
        ByKey,
        ((), ("towers.user id.1", "towers.user id.2", "towers.it\"em's\n{0}.0")),
    ),
    "products": Shape(Products, ((),)),
    "functional": Shape(Functional, ((), ("lin",))),
    "shared": Shape(Shared, ((), ("one", "net.1", "other"))),
    "outer": Shape(
        Outer,
        ((), ("part0", "inner")),
    ),
    "dynamic": Shape(Dynamic, ((), ("first", "second", "held.linear"))),
    "in place": Shape(InPlace, ((), ("act", "linear"))),
    "sequential": Shape(
        sequential,
        ((), ("0.0", "0.1", "0.2", "0.3", "1.1", "1.2")),
    ),
    "ranker layer": Shape(
        lambda: WukongLayer(SMALL_RANKER), (("fmb.0", "fmb.2", "norm"), ("fmb_norm", "fmb")), (16, 32)
    ),
    "ranker head": Shape(lambda: wukong_head(SMALL_RANKER), (("mlp.1", "mlp.5", "silu"), ("norm", "out")), (512,)),
}


def inputs(shape: str, rows: int = 5) -> Tensor:
    return torch.randn(rows, *SHAPES[shape].sizes, generator=torch.Generator().manual_seed(rows))


def made(shape: str) -> nn.Module:
    """A model of a shape, always with the same weights."""
    torch.manual_seed(0)
    return SHAPES[shape].make()


@functools.cache
def bound_as(shape: str, inline: tuple[str, ...]) -> tuple[dispatch.Binding, ForwardIR]:
    """The binding of a model of a shape, by its text as a generated package has it, with the forward in it."""
    return binding_of(made(shape), inline, {rows: ModelInputs((inputs(shape, rows),)) for rows in (5, 8)})


def binding_of(
    model: nn.Module, inline: tuple[str, ...], batches: dict[int, ModelInputs]
) -> tuple[dispatch.Binding, ForwardIR]:
    """The binding of a model's own traced forward to it."""
    forward = trace_forward(model, "", capture_examples(model, [""], batches)[""], inline=inline)
    assert isinstance(forward, ForwardIR), forward
    (planned,) = bind((), {"": forward}, model)
    scope = {"torch": torch, "dispatch": SimpleNamespace(InputError=InputError)}
    exec(source(forward), scope)  # noqa: S102 - text that LoKA made
    generated = type("Generated", (dispatch.Bound,), {"forward": scope["forward"], "__module__": __name__})
    text = "\n".join(binding_text(SimpleNamespace(binding=planned, module=NAMED, infer=True, gemms=(), kernels=())))
    names = {"dispatch": dispatch, "modules": SimpleNamespace(Generated=generated)}
    return eval(f"dispatch.Binding(\n{text}\n)", names), forward  # noqa: S307 - text that LoKA made


NAMED = SimpleNamespace(name="Generated")


def outcome(model: nn.Module, x: Tensor, training: bool) -> Tensor | str:
    """What a model computes, with its random numbers seeded; the kind of its error where it raises one."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        for module in model.modules():
            module.training = training
        torch.manual_seed(1)
        with torch.no_grad():
            return model(x.clone())
    except Exception as error:  # noqa: BLE001 - a change may break a model in any way
        return type(error).__name__
    finally:
        for module, flag in flags:
            module.training = flag


def agree(one: nn.Module, other: nn.Module, x: Tensor) -> bool:
    """Whether two models compute the same, in training and evaluation, or both fail."""
    for training in (True, False):
        a, b = (outcome(model, x, training) for model in (one, other))
        if isinstance(a, str) or isinstance(b, str):
            if not (isinstance(a, str) and isinstance(b, str)):
                return False
        elif a.shape != b.shape or not torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)):
            return False
    return True
