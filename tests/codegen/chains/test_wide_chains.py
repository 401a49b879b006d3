"""Chains whose rows no program holds whole, as the input's and as a product's: on the CPU, and on a Hopper GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.codegen import chain_plans as chains
from tests.support.codegen.wide_chains import Made, wide_chains, wide_operands


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A package and the layers that it is for, by recipe."""
    return wide_chains(tmp_path_factory.mktemp)


@pytest.mark.slow
def test_one_chain_with_kernels_in_chunks(made: Made) -> None:
    folder = Path(made("fp8")[0].__file__ or "").parent
    fused, kernels = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("fused.py", "triton_kernels.py"))
    for function in (
        "layer_norm_e4m3_16640", "layer_norm_backward_16640", "add_layer_norm_silu_e4m3_16640",
        "add_layer_norm_silu_backward_e4m3_16640", "quantize_e4m3_16640",
    ):  # fmt: skip
        assert f"\n{function} = kernel(" in fused
    assert "def wide_forward(" in kernels
    assert "def wide_backward(" in kernels


@pytest.mark.slow
def test_against_simulated_quantization(made: Made) -> None:
    package, body = made("fp8")
    x, dy = wide_operands(9, "cpu")
    # Sums of 16640 products round differently, and one of the 432 values between that falls another way shows.
    found = chains.trained(package, body, x, dy)
    chains.assert_within(found, chains.exact_step(chains.simulated(body), x, dy), 0.03)
