"""Generated chains on a Hopper GPU: against float64, compiled as one graph, captured into a CUDA graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loka import dispatch
from loka.codegen import render_package
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen.chain_bodies import Gated
from tests.support.gpu import ON_HOPPER
from tests.support.models.sum_models import MergedGlu, SwiGlu

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("fresh_compiler")]

WIDTHS, ROWS = (512, 2048), (4093, 8192)
RECIPES = {"fp8": chains.CHAIN, "rowwise": chains.ROWWISE_CHAIN, "plain": chains.AS_IS}
Made = Callable[[str, int], tuple[ModuleType, chains.Tower]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A package and the tower that it is for, for a recipe and a width; each is generated once."""
    known: dict[tuple[str, int], tuple[ModuleType, chains.Tower]] = {}

    def make(recipe: str, width: int) -> tuple[ModuleType, chains.Tower]:
        if (recipe, width) not in known:
            torch.manual_seed(0)
            tower = chains.Tower(width, width)
            plan = chains.chain_plan(tower, RECIPES[recipe], lambda batch: torch.randn(batch, width))
            name = f"gen_gpu_{recipe}_{width}"
            folder: Path = tmp_path_factory.mktemp(name)
            known[recipe, width] = plans.import_package(render_package(plan), folder, name), tower
        package, tower = known[recipe, width]
        return package, copy.deepcopy(tower).cuda().bfloat16()

    return make


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_against_float64(made: Made, recipe: str, width: int, rows: int) -> None:
    package, tower = made(recipe, width)
    x, dy = chains.gpu_operands(rows, width)
    exact = chains.gradients(chains.Holder(copy.deepcopy(tower).double()), x.double(), dy.double())
    model = chains.Holder(tower)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    errors = {key: chains.error(value, exact[key]) for key, value in found.items()}
    assert max(errors.values()) < (0.02 if recipe == "plain" else 0.15), errors
    if recipe != "plain":
        simulated = chains.gradients(chains.Holder(chains.simulated(tower)), x.double(), dy.double())
        # Products in bfloat16 move some values over the middle between two of e4m3.
        close = {key: chains.error(value, simulated[key]) for key, value in found.items()}
        assert max(close.values()) < 0.06, close


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("recipe", ["fp8", "plain"])
def test_the_gpu_agrees_with_the_reference_on_the_cpu(made: Made, recipe: str, width: int) -> None:
    package, tower = made(recipe, width)
    x, dy = chains.gpu_operands(33, width)
    here, there = chains.Holder(tower), chains.Holder(copy.deepcopy(tower).cpu())
    with package.apply(here), package.apply(there):
        found = chains.gradients(here, x, dy)
        expected = chains.gradients(there, x.cpu(), dy.cpu())
    errors = {key: chains.error(value.cpu(), expected[key]) for key, value in found.items()}
    assert max(errors.values()) < 0.05, errors


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("recipe", ["fp8", "plain"])
def test_compiled_fullgraph_with_changing_batches(made: Made, recipe: str, width: int) -> None:
    package, tower = made(recipe, width)
    model = chains.Holder(tower)
    with package.apply(model) as patch:
        compiled = torch.compile(model, fullgraph=True)
        for rows in (*ROWS, 17):
            x, dy = chains.gpu_operands(rows, width)
            expected = chains.gradients(model, x, dy)
            patch.reset()
            found = chains.gradients(compiled, x, dy)
            patch.verify()
            for key, value in expected.items():
                assert chains.error(found[key], value) < 0.02, key


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_captured_into_a_cuda_graph(made: Made, width: int, rows: int) -> None:
    package, tower = made("fp8", width)
    model = chains.Holder(tower)
    x, dy = chains.gpu_operands(rows, width)
    x.requires_grad_()
    leaves = [x, *model.parameters()]
    with package.apply(model) as patch:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                torch.autograd.grad(model(x), leaves, dy)
        torch.cuda.current_stream().wait_stream(side)
        patch.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
            grads = torch.autograd.grad(y, leaves, dy)
        patch.verify()
        for seed in (2, 3):
            new_x, new_dy = chains.gpu_operands(rows, width, seed)
            with torch.no_grad():
                x.copy_(new_x)
                dy.copy_(new_dy)
            for held in (y, *grads):
                held.detach().fill_(float("nan"))  # the graph must write all of it
            graph.replay()
            torch.cuda.synchronize()
            eager = model(x)
            for found, expected in zip((y, *grads), (eager, *torch.autograd.grad(eager, leaves, dy)), strict=True):
                assert chains.error(found, expected) < 5e-3
        patch.reset()
        graph.replay()
        with pytest.raises(dispatch.VerifyError, match="replayed since reset"):
            patch.verify()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("recipe", ["fp8", "plain"])
def test_frozen_weights(made: Made, recipe: str, width: int) -> None:
    package, tower = made(recipe, width)
    model = chains.Holder(tower)
    for rows in (1, 17, *ROWS):
        x, dy = chains.gpu_operands(rows, width)
        with package.apply(model):
            expected = chains.gradients(model, x, dy)["y"]
        with package.apply(model, mode="infer") as patch, torch.no_grad():
            assert torch.equal(model(x), expected)
            patch.verify(backward=False)


def test_rows_of_zeros_infinities_and_nans(made: Made) -> None:
    package, tower = made("fp8", 512)
    model = chains.Holder(tower)
    x, dy = chains.gpu_operands(64, 512)
    with package.apply(model):
        clean = chains.gradients(model, x, dy)["y"]
        x[3] = 0.0
        x[5, 7] = float("inf")
        x[9, 1] = float("nan")
        found = chains.gradients(model, x, dy)["y"]
    bad = [5, 9]
    kept = [row for row in range(64) if row not in (3, *bad)]
    assert torch.equal(found[kept], clean[kept])  # a row's values are its own in forward
    assert found[3].isfinite().all()
    assert found[bad].isnan().all()


def test_autocast_gives_the_dtype_of_a_linear(made: Made) -> None:
    package, tower = made("fp8", 512)
    model = chains.Holder(tower.float())
    x = torch.randn(100, 512, device="cuda", requires_grad=True)
    with package.apply(model) as patch:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            inner = model.body.mlp[0](x)
            y = model(x)
        assert inner.dtype == torch.bfloat16
        y.float().square().mean().backward()
        patch.verify()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("recipe", ["fp8", "plain"])
@pytest.mark.parametrize(("width", "rows"), [(1024, 8192), (1100, 513)])
def test_a_norm_times_part_of_a_product(planned: plans.PlanPackage, recipe: str, width: int, rows: int) -> None:
    torch.manual_seed(0)
    body = Gated(nn.LayerNorm(width), width)
    package = planned(chains.chain_plan(body, RECIPES[recipe], lambda batch: torch.randn(batch, width)))
    model = chains.Holder(body).cuda().bfloat16()
    exact = chains.Holder(chains.simulated(body) if recipe == "fp8" else copy.deepcopy(body).double())
    x, dy = chains.gpu_operands(rows, width)
    expected = chains.gradients(exact, x.double(), dy[:, :32].contiguous().double())
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy[:, :32].contiguous())
        patch.verify()
    errors = {key: chains.error(value, expected[key]) for key, value in found.items()}
    assert max(errors.values()) < 0.1, errors


@pytest.mark.parametrize("recipe", ["fp8", "plain"])
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("width", "hidden", "rows"), [(512, 1344, 8192), (1344, 1360, 513)])
def test_a_swiglu_ffn(
    planned: plans.PlanPackage, recipe: str, merged: bool, width: int, hidden: int, rows: int
) -> None:
    torch.manual_seed(0)
    body = MergedGlu(F.silu, width=width, hidden=hidden) if merged else SwiGlu(width, hidden)
    package = planned(chains.chain_plan(body, RECIPES[recipe], lambda batch: torch.randn(batch, width)))
    model = chains.Holder(body).cuda().bfloat16()
    exact = chains.Holder(chains.simulated(body) if recipe == "fp8" else copy.deepcopy(body).double())
    x, dy = chains.gpu_operands(rows, width)
    expected = chains.gradients(exact, x.double(), dy.double())
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
        compiled = chains.gradients(torch.compile(model, fullgraph=True), x, dy)
    for each in (found, compiled):
        errors = {key: chains.error(value, expected[key]) for key, value in each.items()}
        assert max(errors.values()) < 0.1, errors
