"""What torch.compile sees of a bound model on a GPU: Triton launches and aten GEMMs, whatever the batch (CPU)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import triton_kernel_wrap

from loka.codegen import render_package
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen import compiler_view as view

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WIDTH = 64
GEMMS = 9  # of the tower's three linears: fprop, dgrad and wgrad


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    tower = chains.Tower(WIDTH, WIDTH)
    plan = chains.chain_plan(tower, chains.ROWWISE_CHAIN, lambda batch: torch.randn(batch, WIDTH))
    folder: Path = tmp_path_factory.mktemp("gen_seen")
    return plans.import_package(render_package(plan), folder, "gen_seen"), tower


@pytest.fixture
def bound(made) -> Iterator[nn.Module]:
    package, tower = made
    model = chains.Holder(copy.deepcopy(tower).bfloat16())
    with package.apply(model):
        yield model


def batch(rows: int) -> Tensor:
    return torch.randn(rows, WIDTH).bfloat16()


def test_no_operator_of_ours_hides_a_launch(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    view.pretend_hopper(monkeypatch)
    compile_kernel, compiled = triton_kernel_wrap.generate_ttir, []

    def counted(kernel: Any, arguments: dict[str, Any], *rest: Any) -> Any:
        flags = tuple(argument for argument in arguments.values() if not isinstance(argument, Tensor))
        compiled.append((kernel.fn.__name__, str(flags)))
        return compile_kernel(kernel, arguments, *rest)

    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", counted)
    graphs = view.traced(bound, batch(256))
    assert len(graphs) == 2
    assert view.operators(graphs, "loka") == view.operators(graphs, "loka_generated") == []
    assert len(view.operators(graphs, "aten._scaled_mm")) == GEMMS
    assert len(view.operators(graphs, "loka_counters")) == GEMMS
    launched = view.launches(graphs)
    assert {"quantize_weights", "norm_forward", "norm_backward", "requantize_transpose"} <= {
        name for name, _ in launched
    }
    # Inductor copies what a kernel writes if it is not known to be written alone: results only, never an operand.
    operands = {"x_ptr", "grad_ptr", "weight_ptr", "bias_ptr", "add_ptr"}
    for name, written in launched:
        assert written, name
        assert not written & operands, (name, written)
    # torch compiles a kernel to find what it writes: launches of one on equal types must not do it again.
    names = [name for name, _ in launched]
    assert names.count("requantize_transpose") == 3
    assert names.count("norm_forward") >= 3
    assert len(compiled) == len(set(compiled)), compiled


def test_on_the_cpu_operators_stay_opaque(bound) -> None:
    graphs = view.traced(bound, batch(256))
    assert len(view.operators(graphs, "loka.scaled_mm")) == GEMMS
    assert view.operators(graphs, "loka_generated")
    assert view.launches(graphs) == []


def test_where_memory_is_filled_operators_stay_opaque(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor fills it by a kernel that Triton 3.6 cannot compile for FP8."""
    view.pretend_hopper(monkeypatch)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        graphs = view.traced(bound, batch(256))
    finally:
        torch.use_deterministic_algorithms(False)
    assert view.launches(graphs) == []
    assert len(view.operators(graphs, "loka.scaled_mm")) == GEMMS


def test_another_batch_is_not_compiled_again(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd traces forward and backward at once: guards of either would compile both again."""
    view.pretend_hopper(monkeypatch)
    graphs = view.traced(bound, batch(256), batch(512), batch(48), batch(259), dynamic=True, backward=False)
    assert len(graphs) == 2
    assert len(view.operators(graphs, "aten._scaled_mm")) == GEMMS


class Joined(nn.Module):
    """The result next to other columns: its gradient is part of a wider matrix."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.body(x), x], 1)


def test_a_gradient_within_a_wider_one_is_not_copied(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    view.pretend_hopper(monkeypatch)
    _, backward = view.traced(Joined(bound), batch(256))
    first = next(node for node in view.calls([backward]) if "triton_kernel_wrapper" in str(node.target))
    assert str(first.kwargs["kwargs"]["grad_ptr"].target) == "aten.slice.Tensor"


class Chosen(nn.Module):
    """The rows whose first element is positive."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x[(x[:, 0] > 0).nonzero().squeeze(1)])


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_come_from_data_compile_in_one_graph(bound, monkeypatch: pytest.MonkeyPatch) -> None:
    view.pretend_hopper(monkeypatch)
    graphs = view.traced(Chosen(bound), batch(256))
    assert len(graphs) == 2
    assert len(view.operators(graphs, "loka.scaled_mm")) == GEMMS  # opaque, since there may be no row


@pytest.mark.parametrize("hopper", [False, True])
def test_a_kernel_for_equal_rows_refuses_others_when_traced(
    made, monkeypatch: pytest.MonkeyPatch, hopper: bool
) -> None:
    """Compiled, it would read behind the end of the smaller matrix."""
    if hopper:
        view.pretend_hopper(monkeypatch)
    package, _ = made
    join = next(getattr(package.fused, name) for name in vars(package.fused) if name == "add_residual")

    def joined(x: Tensor, add: Tensor, residual: Tensor) -> Tensor:
        return join(x, add, residual)

    compiled = torch.compile(joined, fullgraph=True, dynamic=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"a kernel for matrices of s?[0-9]+ rows got one of shape"):
        compiled(batch(48), torch.zeros(WIDTH), batch(32))


def test_under_autocast_gradients_of_float32_weights_are_visible_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of transposed copies under one scale each: torch has no rowwise GEMM that writes float32."""
    view.pretend_hopper(monkeypatch)
    tower = chains.Tower(WIDTH, WIDTH)
    plan = chains.chain_plan(tower, chains.CHAIN, lambda batch: torch.randn(batch, WIDTH))
    package = plans.import_package(render_package(plan), tmp_path, "gen_seen_autocast")
    model = chains.Holder(tower)
    with package.apply(model), torch.autocast("cpu", torch.bfloat16):
        graphs = view.traced(model, torch.randn(256, WIDTH))
    gemms = [node for node in view.calls(graphs) if str(node.target) == "aten._scaled_mm.default"]
    assert len(gemms) == GEMMS
    assert [node.meta["val"].dtype for node in gemms].count(torch.float32) == GEMMS // 3


def test_gemms_of_odd_widths_are_visible_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded in the graph, where the compiler launches the copies itself."""
    view.pretend_hopper(monkeypatch)
    plan = chains.chain_plan(chains.Tower(61, 61), chains.ROWWISE_CHAIN, lambda batch: torch.randn(batch, 61))
    package = plans.import_package(render_package(plan), tmp_path, "gen_seen_odd")
    model = chains.Holder(chains.Tower(61, 61).bfloat16())
    with package.apply(model):
        graphs = view.traced(model, torch.randn(256, 61).bfloat16())
    assert not view.operators(graphs, "loka")
    gemms = [node for node in view.calls(graphs) if str(node.target) == "aten._scaled_mm.default"]
    assert len(gemms) == GEMMS
    assert all(size % 16 == 0 for node in gemms for size in node.args[1].meta["val"].shape)
