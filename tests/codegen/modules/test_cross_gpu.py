"""Generated cross layers on a Hopper GPU: against float64, compiled, captured into a CUDA graph, frozen."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka.codegen import render_package
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.gpu import ON_HOPPER
from tests.support.models import sum_models as sums

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("fresh_compiler")]

ROWS = (1, 17, 4093, 8192)


def bodies() -> dict[str, tuple[nn.Module, int]]:
    """Modules by name, with the width of their input. The wide end smoothly: ReLU turns a rounding into a step."""
    torch.manual_seed(0)
    return {
        "narrow": (sums.Crosses(512, 64, 3, 128, nn.SiLU), 512),
        "wide": (sums.Crosses(3456, 512, 3, 1024, nn.SiLU), 3456),
        "apart": (sums.Apart(), 48),
        "gated": (sums.Gated(), 48),
        "gated_blocks": (sums.GatedBlocks(), 48),
        "weighted": (sums.Weighted(), 48),
        "residuals": (sums.Residuals(), 48),
    }


BODIES = bodies()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModuleType]:
    made = {}
    for name, (body, width) in BODIES.items():
        plan = chains.chain_plan(body, inputs=lambda batch, width=width: torch.randn(batch, width))
        folder: Path = tmp_path_factory.mktemp(f"gpu_{name}")
        made[name] = plans.import_package(render_package(plan), folder, f"gen_cross_gpu_{name}")
    return made


def operands(body: nn.Module, rows: int, width: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, width, device="cuda", generator=generator).bfloat16()
    with torch.no_grad():
        shape = body(x).shape
    return x, torch.randn(shape, device="cuda", generator=generator).bfloat16()


@pytest.mark.parametrize("name", BODIES)
def test_against_float64(packages: dict[str, ModuleType], name: str) -> None:
    body, width = copy.deepcopy(BODIES[name][0]).cuda().bfloat16(), BODIES[name][1]
    for rows in ROWS:
        x, dy = operands(body, rows, width)
        exact = chains.gradients(chains.Holder(copy.deepcopy(body).double()), x.double(), dy.double())
        simulated = chains.gradients(chains.Holder(chains.simulated(body)), x.double(), dy.double())
        model = chains.Holder(copy.deepcopy(body))
        with packages[name].apply(model) as patch:
            found = chains.gradients(model, x, dy)
            patch.verify()
        errors = {key: chains.error(value, exact[key]) for key, value in found.items()}
        close = {key: chains.error(value, simulated[key]) for key, value in found.items()}
        # A gradient that lacks a term is off by about 1.
        assert max(errors.values()) < 0.5, (rows, errors)
        assert max(close.values()) < 0.25, (rows, close)


@pytest.mark.parametrize("name", ["narrow", "apart", "gated"])
def test_compiled_fullgraph_with_changing_batches(packages: dict[str, ModuleType], name: str) -> None:
    body, width = copy.deepcopy(BODIES[name][0]).cuda().bfloat16(), BODIES[name][1]
    model = chains.Holder(body)
    with packages[name].apply(model) as patch:
        compiled = torch.compile(model, fullgraph=True)
        for rows in (4093, 256, 17):
            x, dy = operands(model, rows, width)
            expected = chains.gradients(model, x, dy)
            patch.reset()
            found = chains.gradients(compiled, x, dy)
            patch.verify()
            for key, value in expected.items():
                assert chains.error(found[key], value) < 0.03, key


def test_captured_into_a_cuda_graph(packages: dict[str, ModuleType]) -> None:
    body, width = copy.deepcopy(BODIES["wide"][0]).cuda().bfloat16(), 3456
    model = chains.Holder(body)
    x, dy = operands(model, 2048, width)
    x.requires_grad_()
    leaves = [x, *model.parameters()]
    with packages["wide"].apply(model):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                torch.autograd.grad(model(x), leaves, dy)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
            grads = torch.autograd.grad(y, leaves, dy)
        new_x, _ = operands(model, 2048, width, seed=2)
        with torch.no_grad():
            x.copy_(new_x)
        for held in (y, *grads):
            held.detach().fill_(float("nan"))  # the graph must write all of it
        graph.replay()
        torch.cuda.synchronize()
        eager = model(x)
        for found, expected in zip((y, *grads), (eager, *torch.autograd.grad(eager, leaves, dy)), strict=True):
            assert chains.error(found, expected) < 5e-3


@pytest.mark.parametrize("name", BODIES)
def test_frozen_weights_and_the_cpu_agree(packages: dict[str, ModuleType], name: str) -> None:
    body, width = copy.deepcopy(BODIES[name][0]).cuda().bfloat16(), BODIES[name][1]
    model, there = chains.Holder(body), chains.Holder(copy.deepcopy(body).cpu())
    x, dy = operands(model, 33, width)
    with packages[name].apply(model), packages[name].apply(there):
        found = chains.gradients(model, x, dy)
        expected = chains.gradients(there, x.cpu(), dy.cpu())
    assert max(chains.error(value.cpu(), expected[key]) for key, value in found.items()) < 0.1
    with packages[name].apply(model, mode="infer"), torch.no_grad():
        assert torch.equal(model(x), found["y"])
