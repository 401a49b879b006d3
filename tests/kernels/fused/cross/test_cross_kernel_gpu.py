"""The kernel of a cross layer's gradients on a Hopper GPU: against float64, odd batches, graphs and the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.gpu import ON_HOPPER
from tests.support.kernels.cross_cases import LARGE, SPECS, check, inputs_of
from tests.support.kernels.rendered_cases import write_package

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return write_package(tmp_path_factory.mktemp("cross_gpu") / "cross_gpu_package", [*SPECS, LARGE])


@pytest.mark.parametrize("spec", [*SPECS, LARGE], ids=lambda spec: spec.function)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_against_float64(package, spec, dtype):
    for rows in (1, 17, 8192):
        inputs = inputs_of(spec, rows, dtype, "cuda")
        got = package.run(spec, *(inputs[name] for name in spec.parameters))
        check(spec, got, inputs, 3e-3 if dtype == torch.bfloat16 else 1e-5)


def test_two_runs_graph_and_compiler_give_the_same_bits(package):
    inputs = inputs_of(LARGE, 1031, torch.bfloat16, "cuda")
    arguments = [inputs[name] for name in LARGE.parameters]

    def run() -> tuple[Tensor, ...]:
        return tuple(package.run(LARGE, *arguments).values())

    expected, again = run(), run()
    compiled = torch.compile(run, fullgraph=True)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    for results in zip(expected, again, compiled, captured, strict=True):
        assert all(torch.equal(result, results[0]) for result in results[1:])
