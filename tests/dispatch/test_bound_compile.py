"""Bound models under torch.compile: one graph, few recompilations, counts that are right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

pytestmark = pytest.mark.slow


def test_fullgraph_with_changing_batch_compiles_twice(compilations):
    model, eager = models.mlp(), models.mlp()
    patch = sample.apply(model)
    sample.apply(eager)
    compiled = torch.compile(model, fullgraph=True, backend=compilations)
    for rows in (8, 5, 16, 33, 3):
        patch.reset()
        for parameter in (*model.parameters(), *eager.parameters()):
            parameter.grad = None
        torch.testing.assert_close(models.step(compiled, rows), models.step(eager, rows))
        for one, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        patch.verify()
    assert compilations.frame_count == 2  # one for 8 rows, one for any number


def test_layers_and_copies_compiled_one_by_one_share_no_limit(compilations):
    """Each has a code object of its own: with one for all, the second would be a recompilation of the first."""
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    sample.apply(layers, (sample.linears("0", "1"),))
    model = nn.Sequential(*layers, copy.deepcopy(layers[0]), copy.deepcopy(layers[0]))
    for layer in model:
        layer.compile(fullgraph=True, backend=compilations)
    with torch._dynamo.config.patch(error_on_recompile=True):
        models.step(model)
        models.step(model)
    dispatch.patch_of(model).verify()
    assert compilations.frame_count == 4


@pytest.mark.parametrize("rows", [0, 1])
def test_batch_of_none_and_of_one(rows, compilations):
    model = models.mlp()
    patch = sample.apply(model)
    models.step(torch.compile(model, fullgraph=True, backend=compilations), rows)
    if rows:  # no FP8 GEMM runs without
        patch.verify()


def test_inductor_runs_every_gemm():
    model = nn.Sequential(nn.Linear(32, 32))
    patch = sample.apply(model, (sample.linears("0"),))
    eager = models.step(model, 8)
    patch.reset()
    torch.testing.assert_close(models.step(torch.compile(model, fullgraph=True), 8), eager, rtol=1e-3, atol=1e-3)
    patch.verify()


def test_autocast_is_seen_by_the_compiled_model(compilations):
    model = models.mlp()
    sample.apply(model)
    compiled = torch.compile(model, fullgraph=True, backend=compilations)
    x = torch.randn(64, 32)
    expected = compiled(x)
    assert expected.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(x)
        eager = model(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, eager, rtol=2e-2, atol=2e-2)  # a value at a tie may move to the next FP8 number
    noise = (y - expected).square().sum() / expected.square().sum()
    assert 0 < noise.sqrt() < 0.1  # bfloat16 between the layers does make a difference
    y.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


def test_checkpoint_inside_compile_and_around_it(compilations):
    model = models.mlp()
    patch = sample.apply(model)
    expected = models.step(model)

    def around(run):
        return lambda x: checkpoint(run, x, use_reentrant=False)

    def compiled(run):
        return torch.compile(run, fullgraph=True, backend=compilations)

    for run in (compiled(around(model)), around(compiled(model))):
        patch.reset()
        torch.testing.assert_close(models.step(run), expected)
        patch.verify()


def test_export_keeps_the_generated_forward():
    model, x = models.mlp(), torch.randn(4, 32)
    patch = sample.apply(model)
    expected = model(x)
    patch.reset()
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), expected)
    patch.verify(backward=False)
