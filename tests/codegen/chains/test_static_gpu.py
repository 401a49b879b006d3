"""Chains under static scales on a Hopper GPU: numerics, and counts that agree in eager, compiled and captured steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka.codegen import render_package
from loka.dispatch import Overflow, Patch
from loka.mods.norms import BlockNorm
from loka.numerics.enums import Format
from loka.numerics.quantize import static_scale
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.gpu import ON_HOPPER

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("fresh_compiler")]

WIDTHS, ROWS = (512, 2048), (4093, 8192)
WIDE, NARROW = (64.0, 512.0), (2.0, 4.0)  # maxima of inputs and output gradients: what holds all, and what does not
Made = Callable[[str, int, tuple[float, float]], tuple[ModuleType, nn.Module]]


def block_norms(width: int) -> nn.Module:
    up, down = (nn.Linear(width, width, bias=False) for _ in range(2))
    return nn.Sequential(up, BlockNorm(256), nn.Hardswish(), down)


BODIES = {"tower": lambda width: chains.Tower(width, width), "block_norm": block_norms}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A package and the module that it is for, by form, width and maxima; each is generated once."""
    known: dict[tuple[str, int, tuple[float, float]], tuple[ModuleType, nn.Module]] = {}

    def make(form: str, width: int, maxima: tuple[float, float]) -> tuple[ModuleType, nn.Module]:
        key = form, width, maxima
        if key not in known:
            torch.manual_seed(0)
            body = BODIES[form](width)
            plan = chains.chain_plan(body, chains.known_chain(*maxima), lambda batch: torch.randn(batch, width))
            name = f"gen_known_{form}_{width}_{len(known)}"
            folder: Path = tmp_path_factory.mktemp(name)
            known[key] = plans.import_package(render_package(plan), folder, name), body
        package, body = known[key]
        return package, copy.deepcopy(body).cuda().bfloat16()

    return make


def of_given(patch: Patch, form: str) -> list[Overflow]:
    """What the operands had that are there as they are: they do not depend on how a product rounds."""
    given = {("body.3", "grad_output"), ("body.0", "input")} if form == "block_norm" else set()
    return [each for each in patch.overflows() if (each.site, each.operand) in given]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", BODIES)
def test_against_float64(made: Made, form: str, width: int, rows: int) -> None:
    package, body = made(form, width, WIDE)
    x, dy = chains.gpu_operands(rows, width)
    exact = chains.gradients(chains.Holder(copy.deepcopy(body).double()), x.double(), dy.double())
    model = chains.Holder(body)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
        assert patch.overflows() == ()
    errors = {key: chains.error(value, exact[key]) for key, value in found.items()}
    assert max(errors.values()) < 0.15, errors


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", BODIES)
def test_the_gpu_agrees_with_the_reference_on_the_cpu(made: Made, form: str, width: int) -> None:
    package, body = made(form, width, NARROW)
    x, dy = chains.gpu_operands(33, width)
    here, there = chains.Holder(body), chains.Holder(copy.deepcopy(body).cpu())
    with package.apply(here) as ours, package.apply(there) as theirs:
        found = chains.gradients(here, x, dy)
        expected = chains.gradients(there, x.cpu(), dy.cpu())
        assert of_given(ours, form) == of_given(theirs, form)
        counts, wanted = ours.overflows(), theirs.overflows()
    errors = {key: chains.error(value.cpu(), expected[key]) for key, value in found.items()}
    assert max(errors.values()) < 0.05, errors
    assert wanted
    elements = {(each.site, each.operand): each.elements for each in counts}
    for each in wanted:  # products in bfloat16 move some values over the limit
        assert abs(elements.get((each.site, each.operand), 0) - each.elements) <= 3 + 0.1 * each.elements, each


@pytest.mark.parametrize("width", WIDTHS)
def test_overflow_is_counted_exactly(made: Made, width: int) -> None:
    package, body = made("block_norm", width, NARROW)
    model = chains.Holder(body)
    with package.apply(model) as patch:
        for rows in (1, 17, *ROWS):
            patch.reset()
            x, dy = chains.gpu_operands(rows, width)
            chains.gradients(model, x, dy)
            found = {each.operand: each for each in of_given(patch, "block_norm")}
            for operand, matrix, amax in zip(("input", "grad_output"), (x, dy), NARROW, strict=True):
                above = int((matrix.float().abs() > 448 * static_scale(amax, Format.E4M3, True)).sum())
                assert (found[operand].elements if operand in found else 0) == above
                if above:
                    assert found[operand].largest == matrix.abs().max()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", BODIES)
def test_compiled_fullgraph_with_changing_batches(made: Made, form: str, width: int) -> None:
    package, body = made(form, width, NARROW)
    model = chains.Holder(body)
    with package.apply(model) as patch:
        compiled = torch.compile(model, fullgraph=True)
        for rows in (*ROWS, 17):
            x, dy = chains.gpu_operands(rows, width)
            patch.reset()
            expected, eager = chains.gradients(model, x, dy), patch.overflows()
            patch.reset()
            found = chains.gradients(compiled, x, dy)
            assert patch.overflows() == eager
            for key, value in expected.items():
                assert chains.error(found[key], value) < 0.02, key


def test_a_replayed_graph_counts_in_each_replay(made: Made) -> None:
    package, body = made("block_norm", 512, NARROW)
    model = chains.Holder(body)
    x, dy = chains.gpu_operands(4096, 512)
    x.requires_grad_()
    leaves = [x, *model.parameters()]

    def step() -> tuple[Tensor, ...]:
        y = model(x)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    with package.apply(model) as patch:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = step()
        patch.reset()
        eager = step()
        once = patch.overflows()
        assert once
        patch.reset()
        for replays in (1, 2, 3):
            graph.replay()
            found = patch.overflows()
            assert [each.elements for each in found] == [replays * each.elements for each in once]
            assert [each.largest for each in found] == [each.largest for each in once]
        for ours, theirs in zip(held, eager, strict=True):
            assert chains.error(ours, theirs) < 5e-3


def test_a_step_never_waits_for_the_device(made: Made) -> None:
    package, body = made("tower", 512, NARROW)
    model = chains.Holder(body)
    x, dy = chains.gpu_operands(4096, 512)
    with package.apply(model) as patch:
        chains.gradients(model, x, dy)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).backward(dy)
            patch.reset()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", BODIES)
def test_frozen_weights(made: Made, form: str, width: int) -> None:
    package, body = made(form, width, NARROW)
    model = chains.Holder(body)
    for rows in (1, 17, *ROWS):
        x, dy = chains.gpu_operands(rows, width)
        with package.apply(model) as patch:
            expected = chains.gradients(model, x, dy)["y"]
            trained = [each for each in patch.overflows() if each.operand == "input"]
        with package.apply(model, mode="infer") as patch, torch.inference_mode():
            assert torch.equal(model(x), expected)
            assert list(patch.overflows()) == trained


def test_rows_of_zeros_infinities_and_nans(made: Made) -> None:
    package, body = made("tower", 512, WIDE)
    model = chains.Holder(body)
    x, dy = chains.gpu_operands(64, 512)
    with package.apply(model) as patch:
        clean = chains.gradients(model, x, dy)["y"]
        x[3], x[5, 7], x[9, 1] = 0.0, float("inf"), float("nan")
        found = chains.gradients(model, x, dy)["y"]
        assert not [each for each in patch.overflows() if each.operand == "input"]
    bad = [5, 9]
    kept = [row for row in range(64) if row not in (3, *bad)]
    assert torch.equal(found[kept], clean[kept])
    assert found[3].isfinite().all()
    assert found[bad].isnan().all()
