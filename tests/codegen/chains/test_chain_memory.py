"""A chain in eager holds no more in a training step than its layers one by one do, though it is one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from loka.codegen import render_package
from loka.mods.norms import BlockNorm
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen import live_memory
from tests.support.models import sum_models as sums

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

ROWS = 2048  # enough for matrices of so many rows to be what counts
Make = Callable[[nn.Module, dict[str, object]], ModuleType]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """The package of a body under a recipe."""
    count = iter(range(100))

    def one(body: nn.Module, recipe: dict[str, object]) -> ModuleType:
        name = f"gen_chain_memory_{tmp_path.name}_{next(count)}"
        return plans.import_package(render_package(chains.chain_plan(body, recipe)), tmp_path, name)

    return one


def blocks() -> nn.Module:
    """What kernels under static scales write as is and transposed."""
    layers = [nn.Linear(48, 512, bias=False), BlockNorm(256), nn.Hardswish(), nn.Linear(512, 256), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(256, 128))


def step(model: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(x), [x, *model.parameters()], dy)


def inputs(model: nn.Module) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 48, generator=generator).bfloat16().requires_grad_()
    with torch.no_grad():
        return x, torch.randn(model(x).shape, generator=generator).bfloat16()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "recipe", "most"),
    [
        (lambda: sums.Crosses(layers=6), chains.CHAIN, 1.0),
        (lambda: sums.Crosses(layers=3), chains.known_chain(), 1.0),
        (chains.Tower, chains.CHAIN, 0.8),
        (blocks, chains.known_chain(), 0.34),
        (chains.Tower, chains.AS_IS, 0.8),
    ],
    ids=["crosses", "known crosses", "tower", "known blocks", "plain tower"],
)
def test_a_step_holds_no_more_than_the_model_alone(
    make: Make, body: Callable[[], nn.Module], recipe: dict[str, object], most: float
) -> None:
    torch.manual_seed(0)
    bare = body()
    package = make(bare, recipe)
    model = chains.Holder(bare).bfloat16()
    x, dy = inputs(model)
    step(model, x, dy)
    alone = live_memory.peak_of(lambda: step(model, x, dy))
    with package.apply(model):
        found = live_memory.peak_of(lambda: step(model, x, dy))
    assert found <= most * alone


def test_a_graph_that_is_kept_is_there_for_a_second_backward(make: Make) -> None:
    torch.manual_seed(0)
    body = sums.Crosses()
    model = chains.Holder(body)
    with make(body, chains.CHAIN).apply(model):
        x = torch.randn(8, 48, requires_grad=True)
        leaves = [x, *model.parameters()]
        y = model(x)
        first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
        second = torch.autograd.grad(y.sum(), leaves)
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one, other)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(y.sum(), leaves)


def test_a_chain_that_is_computed_again_has_the_same_gradients(make: Make) -> None:
    torch.manual_seed(0)
    body = sums.Crosses()
    model = chains.Holder(body)
    with make(body, chains.CHAIN).apply(model):
        x = torch.randn(8, 48, requires_grad=True)
        leaves = [x, *model.parameters()]
        expected = torch.autograd.grad(model(x).sum(), leaves)
        again = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        for one, other in zip(expected, torch.autograd.grad(again.sum(), leaves), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", [chains.CHAIN, chains.AS_IS], ids=["fp8", "plain"])
def test_a_relu_at_the_end_leaves_its_result_alone_to_backward(make: Make, recipe: dict[str, object]) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(48, 96), nn.LayerNorm(96), nn.SiLU(), nn.Linear(96, 224), nn.ReLU())
    model = chains.Holder(body)
    x = torch.randn(8, 48, requires_grad=True)
    saved: list[Tensor] = []
    with make(body, recipe).apply(model):
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
            y = model(x)
        y.sum().backward()
    of_result = [each for each in saved if each.shape == y.shape]
    assert len(of_result) == 1
    assert torch.equal(of_result[0], y)
    assert torch.equal(model.body[3].bias.grad, (y > 0).sum(0).float())
