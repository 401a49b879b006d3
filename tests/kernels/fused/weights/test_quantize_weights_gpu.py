"""Several weights quantized by one launch on a Hopper GPU: the bits of single quantizers and of the reference."""

from __future__ import annotations

import pytest
import torch

from loka.kernels.fused.quantize_weights import QuantizeWeights
from tests.support.gpu import ON_HOPPER
from tests.support.kernels.fp8_codes import same_nan
from tests.support.kernels.rendered_cases import Package, write_package
from tests.support.kernels.weight_cases import WEIGHTS, WIDE, odd_weights, weights_of

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]

LARGE = weights_of(256, 1024, 4096)
SINGLE = list(dict.fromkeys(each for spec in (*WEIGHTS, *WIDE, LARGE) for each in spec.quantizers))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("weights") / "weights_on_gpu"
    return write_package(folder, [*WEIGHTS, *WIDE, LARGE, *SINGLE])


def check(package: Package, spec: QuantizeWeights, weights: list[torch.Tensor]) -> None:
    got = list(package.run(spec, *weights).values())
    reference = list(package.run(spec, *(weight.cpu() for weight in weights)).values())
    for index, (each, weight) in enumerate(zip(spec.quantizers, weights, strict=True)):
        values, scale, largest = got[3 * index : 3 * index + 3]
        single = package.run(each, weight)
        assert torch.equal(values.view(torch.uint8), single["values"].view(torch.uint8))
        assert torch.equal(scale, single["scale"])
        assert largest.max() == single["scale_max"].max()
        assert torch.equal(same_nan(values.cpu()), same_nan(reference[3 * index]))
        assert torch.equal(scale.cpu(), reference[3 * index + 1])


@pytest.mark.parametrize("spec", [*WEIGHTS, *WIDE], ids=lambda spec: spec.function)
def test_odd_weights(package: Package, spec: QuantizeWeights) -> None:
    check(package, spec, odd_weights(spec, "cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_large_weights(package: Package, dtype: torch.dtype) -> None:
    sizes = [(4096, 256), (4099, 1024), (4096, 4096)]
    check(package, LARGE, [torch.randn(*size, device="cuda", dtype=dtype) for size in sizes])


def test_rows_that_are_not_contiguous_are_copied(package: Package) -> None:
    weights = [torch.randn(each.width, 33, device="cuda").bfloat16().t() for each in LARGE.quantizers]
    assert not weights[0].is_contiguous()
    check(package, LARGE, weights)


def test_a_graph_replays_on_new_weights(package: Package) -> None:
    weights = [torch.randn(96, each.width, device="cuda") for each in LARGE.quantizers]
    run = getattr(package.fused, LARGE.function)
    run(weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(weights)
    for weight in weights:
        weight.mul_(-3.0)
    graph.replay()
    for ours, eager in zip(replayed, run(weights), strict=True):
        assert torch.equal(ours.view(torch.uint8), eager.view(torch.uint8))


def test_one_graph_under_the_compiler(package: Package) -> None:
    run = getattr(package.fused, LARGE.function)
    weights = [torch.randn(96, each.width, device="cuda").bfloat16() for each in LARGE.quantizers]
    compiled = torch.compile(lambda *given: run(list(given)), fullgraph=True)
    for ours, eager in zip(compiled(*weights), run(weights), strict=True):
        assert torch.equal(ours.view(torch.uint8), eager.view(torch.uint8))
