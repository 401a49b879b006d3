"""Interactions' kernels on a Hopper GPU: float64, odd batches, views, graphs and the compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loka.kernels.fused.matrix_kernels import Reduce
from tests.support.gpu import ON_HOPPER
from tests.support.kernels.interaction_cases import (
    CONCAT_NORMS,
    DOTS,
    LARGEST,
    SIZES,
    concat_norm_inputs,
    concat_norm_specs,
    dot_inputs,
    dot_specs,
    exact_concat_norm,
    exact_dot,
    exact_fm,
    fm_inputs,
    fm_specs,
    passes,
    summed,
)
from tests.support.kernels.rendered_cases import write_package

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("poisoned_memory")]
SAMPLES = (1, 17, 1031)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    specs = [spec for sizes in (*SIZES, *LARGEST) for spec in fm_specs(sizes)]
    specs += [spec for case in CONCAT_NORMS for spec in concat_norm_specs(case)]
    specs += [spec for sizes in DOTS for spec in dot_specs(sizes)]
    return write_package(tmp_path_factory.mktemp("interactions_gpu") / "interactions_gpu_package", [*specs, Reduce(2)])


def check(got: dict[str, Tensor], exact: dict[str, Tensor], limit: float) -> None:
    for name, result in got.items():
        error = (summed(name, result.double(), exact[name]) - exact[name]).norm() / exact[name].norm()
        assert error < limit, (name, float(error))


@pytest.mark.parametrize("sizes", [*SIZES, *LARGEST], ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fm_interactions_against_float64(package, sizes, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    for samples in SAMPLES:
        inputs = fm_inputs(sizes, samples, dtype, "cuda")
        wide = torch.cat([inputs["passed"], inputs["dcompressed"]], 1)
        inputs["passed"], inputs["dcompressed"] = wide[:, : sizes.embeddings], wide[:, sizes.embeddings :]
        exact = exact_fm(sizes, inputs)
        limit = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
        for spec in fm_specs(sizes):
            check(package.run(spec, *(inputs[p] for p in spec.parameters)), exact, limit)


@pytest.mark.parametrize(
    "sizes", [sizes for sizes in (*SIZES, *LARGEST) if passes(sizes)], ids=lambda sizes: sizes.name
)
def test_a_float32_gradient_passes(package, sizes):
    """As under autocast, where norms compute in float32."""
    inputs = fm_inputs(sizes, 1031, torch.bfloat16, "cuda")
    exact = exact_fm(sizes, inputs)
    inputs["passed"] = inputs["passed"].float()
    backward = fm_specs(sizes)[1]
    got = package.run(backward, *(inputs[p] for p in backward.parameters))
    assert got["dx"].dtype == torch.float32
    check(got, exact, 6e-3)


@pytest.mark.parametrize("case", CONCAT_NORMS, ids=lambda case: concat_norm_specs(case)[0].function)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_concat_norms_against_float64(package, case, dtype):
    for samples in SAMPLES:
        inputs = concat_norm_inputs(case, samples, dtype, "cuda")
        exact = exact_concat_norm(case, inputs)
        forward, backward = concat_norm_specs(case)
        got = package.run(forward, *(inputs[p] for p in forward.parameters), dtype)
        known = {**inputs, **got}
        got |= package.run(backward, *(known[p] for p in backward.parameters))
        check(got, exact, 3e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("sizes", DOTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dot_interactions_against_float64(package, sizes, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    for samples in (0, *SAMPLES):
        inputs = dot_inputs(sizes, samples, dtype, "cuda")
        limit = {torch.bfloat16: 3e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
        for spec in dot_specs(sizes):
            got = package.run(spec, *(inputs[p] for p in spec.parameters))
            assert all(result.shape[0] == samples for result in got.values())
            if samples:
                check(got, exact_dot(inputs), limit)


def test_a_dot_interaction_of_views_and_of_non_finite_samples(package):
    forward, backward = dot_specs(DOTS[0])
    inputs = dot_inputs(DOTS[0], 9, torch.bfloat16, "cuda")
    wide = {name: torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]] for name, tensor in inputs.items()}
    for spec in (forward, backward):
        views, whole = (package.run(spec, *(given[p] for p in spec.parameters)) for given in (wide, inputs))
        assert all(torch.equal(views[name], whole[name]) for name in whole)
    inputs["x"][4, 3, 5] = torch.inf
    for spec in (forward, backward):
        for result in package.run(spec, *(inputs[p] for p in spec.parameters)).values():
            assert [not bool(result[i].isfinite().all()) for i in range(9)] == [i == 4 for i in range(9)]


def test_a_dot_interaction_beyond_two_to_the_31_elements(package):
    forward, backward = dot_specs((27, 128))
    x = torch.zeros(2**31 // (27 * 128) + 100, 27, 128, device="cuda", dtype=torch.bfloat16)
    x[-1] = torch.randn(27, 128)
    products = package.run(forward, x)["products"]
    assert torch.equal(products[-1:], package.run(forward, x[-1:])["products"])
    dx = package.run(backward, products, x)["dx"]
    assert torch.equal(dx[-1:], package.run(backward, products[-1:], x[-1:])["dx"])


def test_non_finite_samples_stay_their_own(package):
    forward, backward = fm_specs(SIZES[3])
    inputs = fm_inputs(SIZES[3], 9, torch.bfloat16, "cuda")
    inputs["x"][4, 3, 5] = torch.inf
    got = package.run(forward, *(inputs[p] for p in forward.parameters))
    bad = [not bool(got["products"][i].isfinite().all()) for i in range(9)]
    assert bad == [i == 4 for i in range(9)]
    dx = package.run(backward, *(inputs[p] for p in backward.parameters))["dx"]
    assert [not bool(dx[i].isfinite().all()) for i in range(9)] == bad


def test_graph_and_compiler_give_what_a_call_gives(package):
    forward, _ = fm_specs(SIZES[3])
    concat_forward, _ = concat_norm_specs(CONCAT_NORMS[1])
    fm = fm_inputs(SIZES[3], 64, torch.bfloat16, "cuda")
    concatenated = concat_norm_inputs(CONCAT_NORMS[1], 64, torch.bfloat16, "cuda")
    dot_backward, dots = dot_specs(DOTS[0])[1], dot_inputs(DOTS[0], 64, torch.bfloat16, "cuda")
    third = [dots[p] for p in dot_backward.parameters]
    first = [fm[p] for p in forward.parameters]
    second = [concatenated[p] for p in concat_forward.parameters]

    def step() -> tuple[Tensor, ...]:
        products = package.run(forward, *first)["products"]
        joined = package.run(concat_forward, *second, torch.bfloat16)["out"]
        return products, joined, package.run(dot_backward, *third)["dx"]

    expected = step()
    compiled = torch.compile(step, fullgraph=True)()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for a, b, c in zip(expected, compiled, captured, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
