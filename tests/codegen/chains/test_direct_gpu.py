"""Direct launches on a Hopper GPU: the bits of compiled steps, odd tensors, and GEMMs that are taken away."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from loka import dispatch
from loka.codegen import render_package
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.gpu import ON_HOPPER

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("fresh_compiler")]

WIDTH = 512


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleType, chains.Tower]:
    torch.manual_seed(0)
    tower = chains.Tower(WIDTH, WIDTH)
    plan = chains.chain_plan(tower, chains.ROWWISE_CHAIN, lambda batch: torch.randn(batch, WIDTH))
    folder: Path = tmp_path_factory.mktemp("gen_direct")
    return plans.import_package(render_package(plan), folder, "gen_direct"), tower


@pytest.fixture
def bound(made: tuple[ModuleType, chains.Tower]) -> Any:
    package, tower = made
    model = chains.Holder(copy.deepcopy(tower).cuda().bfloat16())
    with package.apply(model) as patch:
        yield model, patch


def assert_same_bits(model: nn.Module, compiled: Any, patch: dispatch.Patch, rows: int, width: int) -> None:
    """A step of the compiled model runs every planned GEMM and has the output and gradients of an eager step."""
    x, dy = chains.gpu_operands(rows, width)
    expected = chains.gradients(model, x, dy)
    patch.reset()
    found = chains.gradients(compiled, x, dy)
    patch.verify()
    for key, value in expected.items():
        assert torch.equal(found[key], value), (rows, key)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_steps_give_the_bits_of_eager_steps(bound, dynamic: bool) -> None:
    """Batches that divide by 16 and one that does not; then an input with another alignment."""
    model, patch = bound
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for rows in (256, 512, 259):
        assert_same_bits(model, compiled, patch, rows, WIDTH)


def test_a_batch_of_another_size_is_not_compiled_again(bound) -> None:
    model, _ = bound
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    x, dy = chains.gpu_operands(256, WIDTH)
    chains.gradients(compiled, x, dy)
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (512, 1024, 48):
            chains.gradients(compiled, *chains.gpu_operands(rows, WIDTH))


def test_graph_trees_replay_the_bits_of_eager_steps(bound) -> None:
    model, patch = bound
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    patch.reset()
    for seed in range(5):
        torch.manual_seed(seed)
        x, dy = chains.gpu_operands(256, WIDTH)
        expected = chains.gradients(model, x, dy)
        torch.compiler.cudagraph_mark_step_begin()
        found = {key: value.clone() for key, value in chains.gradients(compiled, x, dy).items()}
        for key, value in expected.items():
            assert torch.equal(found[key], value), (seed, key)
    patch.verify()


def test_functions_compiled_by_themselves_give_the_bits_of_eager_steps(bound, made, monkeypatch) -> None:
    model, patch = bound
    for name, function in vars(made[0].kernels).items():
        if inspect.isfunction(function):
            monkeypatch.setattr(made[0].kernels, name, function)  # put back for the other tests
    operands = {rows: chains.gpu_operands(rows, WIDTH) for rows in (256, 512, 259)}
    expected = {rows: chains.gradients(model, *operands[rows]) for rows in operands}
    patch.compile()
    patch.reset()
    for rows, (x, dy) in operands.items():
        for key, value in chains.gradients(model, x, dy).items():
            assert torch.equal(value, expected[rows][key]), (rows, key)
    patch.verify()


def test_odd_widths_compiled_have_the_bits_of_eager_steps(tmp_path: Path) -> None:
    tower = chains.Tower(61, 61)
    plan = chains.chain_plan(tower, chains.ROWWISE_CHAIN, lambda batch: torch.randn(batch, 61))
    package = plans.import_package(render_package(plan), tmp_path, "gen_direct_odd")
    model = chains.Holder(tower.cuda().bfloat16())
    compiled = torch.compile(model, fullgraph=True)
    with package.apply(model) as patch:
        for rows in (256, 259):
            assert_same_bits(model, compiled, patch, rows, 61)


class Chosen(nn.Module):
    """The rows whose first element is above a threshold."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, above: float) -> Tensor:
        out: Tensor = self.body(x[(x[:, 0] > above).nonzero().squeeze(1)])
        return out


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_rows_that_data_choose_may_be_none(bound) -> None:
    model, _ = bound
    chosen = Chosen(model)
    compiled = torch.compile(chosen, fullgraph=True)
    x, _ = chains.gpu_operands(256, WIDTH)
    for above in (0.0, 1.0, 1e9):
        found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, usual = compiled(found, above), chosen(expected, above)
        y.sum().backward()
        usual.sum().backward()
        assert torch.equal(y, usual)
        assert torch.equal(found.grad, expected.grad)


def test_a_launch_fits_the_alignment_and_the_dtype_of_its_tensors(bound) -> None:
    """One after the other on the same kernels: what was compiled for aligned rows must not run on others."""
    model, _ = bound
    x, _ = chains.gpu_operands(64, WIDTH)
    shifted = torch.empty(64 * WIDTH + 1, device="cuda", dtype=x.dtype)[1:].view(64, WIDTH).copy_(x)
    assert shifted.data_ptr() % 16 != 0
    one_row_apart = torch.cat([x, x[:, :8]], 1)[:, :WIDTH]
    odd_stride = torch.cat([x, x[:, :1]], 1)[:, :WIDTH]
    with torch.no_grad():
        expected = model(x)
        for given in (x, shifted, one_row_apart, odd_stride, x):
            assert torch.equal(model(given), expected)
    single = chains.Holder(copy.deepcopy(model.body)).float()
    with torch.no_grad():
        wide = single(x.float())
        assert wide.dtype == torch.float32
        assert chains.error(wide, expected) < 0.05
        assert torch.equal(model(x), expected)


class Branches(nn.Module):
    """`taken` says whether the tower runs, `used` whether the loss sees its result."""

    def __init__(self, body: nn.Module, taken: bool, used: bool) -> None:
        super().__init__()
        self.body, self.taken, self.used = body, taken, used

    def forward(self, x: Tensor) -> Tensor:
        if not self.taken:
            return x * 2
        y: Tensor = self.body(x)
        return y if self.used else x * 2


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("taken", "used", "frozen"), [(False, True, ()), (True, False, ()), (True, True, ("first",))])
def test_a_gemm_that_is_taken_away_is_missed(made, compiled: bool, taken: bool, used: bool, frozen) -> None:
    package, tower = made
    body = copy.deepcopy(tower).cuda().bfloat16()
    model = chains.Holder(body)
    with package.apply(model) as patch:
        linears = [module for module in body.modules() if isinstance(module, nn.Linear)]
        linears[0].weight.requires_grad_(not frozen)
        outer = Branches(model, taken, used)
        x, dy = chains.gpu_operands(64, WIDTH)
        step = torch.compile(outer, fullgraph=True) if compiled else outer
        x.requires_grad_()
        y = step(x)
        y.backward(dy)
        with pytest.raises(dispatch.VerifyError, match="wgrad"):
            patch.verify()
