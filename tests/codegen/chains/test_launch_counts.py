"""The kernels that a training step launches, counted on the CPU: a call of an operator there is a launch on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from loka.codegen import render_package
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen.launches import Launches
from tests.support.codegen.policy_packages import Make
from tests.support.models.block_tower import BLOCKS, POLICY, block_tower, tower_rows

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU


@pytest.mark.slow
def test_a_block_of_two_linears_quantizes_its_weights_by_one_launch(package: Make) -> None:
    """Six blocks, LayerNorm -> Linear -> SiLU -> Linear with a residual: 63 launches a step; by one a weight, 69."""
    generated = package("gen_launch_counts", POLICY)[2]
    model = block_tower()
    with generated.apply(model) as patch, Launches() as step:
        model(tower_rows(64)).square().mean().backward()
        patch.verify()
    assert step.gemms == 6 * BLOCKS
    weights = [name for name in step.kernels if name.startswith("quantize")]
    assert {name: step.kernels[name] for name in weights} == {"quantize_weights": BLOCKS}
    assert step.kernels.total() == 63


def forward_of(folder: Path, body: nn.Module, grad: bool = True) -> list[str]:
    """The kernels that the forward of a body's chain launches, in order."""
    files = render_package(chains.chain_plan(body))
    package = plans.import_package(files, folder, f"gen_launches_{folder.name}")
    model = chains.Holder(body)
    with package.apply(model), torch.set_grad_enabled(grad), Launches() as step:
        model(torch.randn(8, 48))
    return step.called


def test_a_chain_quantizes_its_weights_first(tmp_path: Path) -> None:
    called = forward_of(tmp_path, nn.Sequential(nn.Linear(48, 80), nn.ReLU(), nn.Linear(80, 32)))
    assert called == ["quantize_weights", "quantize_e4m3", "add_relu_e4m3"]


def test_a_chain_of_one_linear_keeps_its_quantizer(tmp_path: Path) -> None:
    assert forward_of(tmp_path, nn.Sequential(nn.Linear(48, 80), nn.ReLU())) == [
        "quantize_e4m3",
        "quantize_e4m3",
        "add_relu",
    ]


@pytest.mark.parametrize("grad", [True, False])
def test_without_gradients_statistics_are_not_stored(tmp_path: Path, grad: bool) -> None:
    called = forward_of(tmp_path, nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 80)), grad)
    assert called == ["layer_norm_e4m3" if grad else "layer_norm_e4m3_inference", "quantize_e4m3"]


def test_a_launch_takes_up_to_eight_weights(tmp_path: Path) -> None:
    called = forward_of(
        tmp_path, nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(48, 48), nn.ReLU())])
    )
    weights = [name for name in called if name.startswith("quantize_weights")]
    assert weights == ["quantize_weights"] * 2


def test_a_weight_that_no_program_holds_is_quantized_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As wide as rows that programs take in chunks; the others share a launch."""
    monkeypatch.setattr("loka.kernels.fused.quantize_weights.LARGEST_HELD", 64)
    layers = [nn.Linear(48, 80), nn.ReLU(), nn.Linear(80, 32), nn.ReLU(), nn.Linear(32, 16)]
    called = [name for name in forward_of(tmp_path, nn.Sequential(*layers)) if name.startswith("quantize")]
    assert called == ["quantize_weights", "quantize_e4m3", "quantize_e4m3"]
