"""Bound models on a GPU with FP8: one graph under torch.compile, CUDA graphs, NaNs of a backward in another thread."""

from __future__ import annotations

import pytest
import torch

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.gpu import ON_HOPPER
from tests.support.models import dispatch_models as models

pytestmark = ON_HOPPER


def step_on_gpu(model, rows=8):
    """One forward and backward; returns the input's gradient."""
    torch.manual_seed(0)
    x = torch.randn(rows, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    model(x).square().sum().backward()
    return x.grad


@pytest.fixture
def model():
    return models.mlp().cuda().bfloat16()


@pytest.mark.parametrize("rows", [1, 3, 8, 100])
def test_gpu_agrees_with_the_reference(model, rows):
    reference = models.mlp().bfloat16()
    patch = sample.apply(model)
    sample.apply(reference)
    step_on_gpu(model, rows)
    x = torch.manual_seed(0) and torch.randn(rows, 32, device="cuda", dtype=torch.bfloat16)
    reference(x.cpu()).square().sum().backward()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        noise = (one.grad.cpu().double() - other.grad.double()).square().sum()
        assert noise <= 1e-3 * other.grad.double().square().sum() + 1e-12, name
    patch.verify()


def test_fullgraph_compile_with_changing_batch(model):
    patch = sample.apply(model)
    compiled = torch.compile(model, fullgraph=True)
    for rows in (8, 5, 33):
        patch.reset()
        step_on_gpu(compiled, rows)
        patch.verify()


def test_captured_cuda_graph(model):
    patch = sample.apply(model)
    x = torch.randn(16, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up, as capture asks for
        for _ in range(3):
            model(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    expected = model[2].weight.grad.clone()
    patch.reset()
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    x.grad = None
    with torch.cuda.graph(graph):
        model(x).square().sum().backward()
    patch.verify()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(3 * model[2].weight.grad, expected, rtol=0.05, atol=0.05)
    patch.reset()
    graph.replay()
    with pytest.raises(dispatch.VerifyError, match="replayed since reset"):
        patch.verify()


def test_graph_captured_before_apply_fails(model):
    x = torch.randn(16, 32, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)
    patch = sample.apply(model)
    graph.replay()
    with pytest.raises(dispatch.VerifyError, match="captured into a CUDA graph before apply"):
        patch.verify(backward=False)


def test_cudagraph_trees_count_when_they_record(model):
    patch = sample.apply(model)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)  # gradients lie in the graph's memory, which the next step overwrites
        step_on_gpu(compiled)
    patch.verify()


def test_refresh_reaches_a_captured_frozen_model(model):
    patch = sample.apply(model, mode="infer")
    x = torch.randn(16, 32, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        model(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
        before = y.clone()
        model[4].weight.data.mul_(2)
        patch.refresh()
        graph.replay()
        torch.testing.assert_close(y - model[4].bias, 2 * (before - model[4].bias), rtol=0.02, atol=0.02)
        assert not torch.equal(y, before)
        patch.verify()


def test_nan_of_a_backward_is_named(model):
    patch = sample.apply(model)
    model[3].register_full_backward_hook(lambda module, dx, dy: (dx[0] * float("nan"),))
    with pytest.raises(dispatch.NonFiniteError) as error, patch.trace_nonfinite():
        step_on_gpu(model)
    assert (error.value.site, error.value.gemm) == ("2", "dgrad")


def test_nothing_is_said_on_the_planned_device(model, recwarn):
    name = torch.cuda.get_device_name()
    target = "h100" if "H100" in name else "h200" if "H200" in name else "reference"
    sample.apply(model, target=target)
    assert not [warning for warning in recwarn if issubclass(warning.category, dispatch.LokaWarning)]


def test_another_device_than_planned_is_said(model):
    with pytest.warns(dispatch.LokaWarning, match="the plan was decided for h20:"):
        sample.apply(model, target="h20")
