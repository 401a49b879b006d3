"""Random lives of a bound model: what a user does to one, in any order, against a model that is bound anew each time.

Another bit is an error, unless weights were written through `.data`, which `verify` has to tell.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.LokaWarning")
MODELS = {"blocks": (models.Blocks, (sample.blocks("layers.0", "layers.1"),)), "mlp": (models.mlp, None)}
FACTORS = (-1.5, 0.5, 2.0)


def step(model: nn.Module, x: Tensor, gradients: bool) -> tuple[Tensor | None, ...]:
    """The output and the gradients, those of Parameters by their order."""
    with torch.set_grad_enabled(gradients):
        x = x.clone().requires_grad_(gradients)
        out = model(x)
    if not gradients:
        return (out,)
    model.zero_grad()
    out.square().sum().backward()
    return out.detach(), x.grad, *(parameter.grad for parameter in model.parameters())


class Life:
    """A bound model, and the same model unbound, to which the same is done."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.factory, self.bindings = MODELS[self.random.choice(list(MODELS))]
        self.plain = self.factory()
        self.model = copy.deepcopy(self.plain)
        self.dtype = torch.float32
        self.apply()

    def apply(self) -> None:
        self.mode = self.random.choice(["train", "infer"])
        self.patch: dispatch.Patch | None = self.bind(self.model)
        self.stale = False  # weights were written through .data since they were quantized

    def bind(self, model: nn.Module) -> dispatch.Patch:
        return sample.apply(model, *([self.bindings] if self.bindings else []), mode=self.mode)

    def parameter(self) -> tuple[str, float]:
        names = [name for name, _ in self.plain.named_parameters()]
        return self.random.choice(names), self.random.choice(FACTORS)

    def both(self, change: Callable[[nn.Module], object]) -> None:
        change(self.model)
        change(self.plain)

    def in_place(self) -> None:
        name, factor = self.parameter()
        with torch.no_grad():
            self.both(lambda model: model.get_parameter(name).mul_(factor))

    def through_data(self) -> None:
        name, factor = self.parameter()
        self.both(lambda model: model.get_parameter(name).data.mul_(factor))
        self.stale |= self.mode == "infer"

    def other_data(self) -> None:
        name, factor = self.parameter()
        self.both(lambda model: setattr(model.get_parameter(name), "data", factor * model.get_parameter(name).data))

    def new_parameter(self) -> None:
        name, factor = self.parameter()
        owner, _, key = name.rpartition(".")
        value = factor * self.plain.get_parameter(name).detach()
        self.both(lambda model: setattr(model.get_submodule(owner), key, nn.Parameter(value.clone())))

    def load(self) -> None:
        inside = self.random.choice([name for name, each in self.plain.named_modules() if [*each.parameters()]])
        factor, assign = self.random.choice(FACTORS), self.random.random() < 0.5
        state = {key: factor * value for key, value in self.plain.get_submodule(inside).state_dict().items()}
        self.both(lambda model: model.get_submodule(inside).load_state_dict(copy.deepcopy(state), assign=assign))

    def cast(self) -> None:
        self.dtype = self.random.choice([torch.float32, torch.bfloat16])
        self.both(lambda model: model.to(self.dtype))
        self.stale = False

    def copied(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.patch = dispatch.patch_of(self.model) if self.patch else None
        self.stale = False

    def saved(self) -> None:
        buffer = io.BytesIO()
        torch.save(self.model, buffer)
        buffer.seek(0)
        self.model = torch.load(buffer, weights_only=False)
        self.patch = dispatch.patch_of(self.model) if self.patch else None
        self.stale = False

    def other_weights(self) -> None:
        factor, x = self.random.choice(FACTORS), torch.randn(5, 32, dtype=self.dtype)
        weights = {name: factor * value.detach() for name, value in self.plain.named_parameters()}
        other = copy.deepcopy(self.plain)
        other.load_state_dict(weights)
        if self.patch:
            self.bind(other)
        with torch.no_grad():
            assert torch.equal(torch.func.functional_call(self.model, weights, (x,)), other(x))
        self.stale = False

    def kept_and_restored(self) -> None:
        if self.patch:
            assert self.patch.keep("*") == self.patch.restore("*")
            self.stale = False

    def refreshed(self) -> None:
        if self.patch:
            self.patch.refresh()
            self.stale = False

    def removed_or_applied(self) -> None:
        if self.patch:
            self.patch.remove()
            self.patch, self.stale = None, False
        else:
            self.apply()

    def frozen(self) -> None:
        name, trained = self.parameter()[0], self.random.random() < 0.5
        self.both(lambda model: model.get_parameter(name).requires_grad_(trained))

    def check(self) -> None:
        x = torch.randn(self.random.choice([1, 2, 5, 17]), 32, dtype=self.dtype)
        anew = copy.deepcopy(self.plain)
        if self.patch:
            self.bind(anew)
        gradients = (not self.patch or self.mode == "train") and self.random.random() < 0.5
        pairs = zip(step(self.model, x, gradients), step(anew, x, gradients), strict=True)
        same = all(torch.equal(a, b) if a is not None and b is not None else a is b for a, b in pairs)
        if self.patch and not same:
            assert self.stale
            with pytest.raises(dispatch.VerifyError, match="the weight changed since"):
                self.patch.verify(backward=False)
        elif self.patch and not self.stale:
            self.patch.verify(backward=False)
        assert same or self.stale


CHANGES = [
    name for name in vars(Life) if name[0] != "_" and name not in ("apply", "bind", "both", "check", "parameter")
]


@pytest.mark.parametrize("seed", range(40))
def test_a_bound_model_is_what_a_model_bound_anew_is(seed: int) -> None:
    torch.manual_seed(seed)
    life, done = Life(seed), []
    for _ in range(life.random.randint(3, 9)):
        done.append(life.random.choice(CHANGES))
        getattr(life, done[-1])()
        try:
            life.check()
        except AssertionError as error:
            raise AssertionError(f"after {', '.join(done)} of a model in mode {life.mode!r}") from error
