"""A Probe on a GPU: no step waits for the device, CUDA graphs go on, and it learns what it learns on the CPU."""

from __future__ import annotations

import importlib

import pytest
import torch

import loka
from loka.errors import LokaError
from loka.probe.profile import profile_file
from loka.zoo import click_loss, ranker_batches, small_ranker
from tests.support.gpu import ON_GPU
from tests.support.models import probe_models as models
from tests.support.models import sharded_models

pytestmark = ON_GPU


@pytest.fixture
def no_waiting():
    """Any wait of the host for the device raises, between calls of `start` and `stop`."""
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default")
    torch.cuda.set_sync_debug_mode("default")


def on_gpu(batches):
    return [batch.cuda() for batch in batches]


@pytest.mark.parametrize("compiled", [False, True])
def test_no_step_waits_for_the_device_and_neither_does_saving(policy, tmp_path, no_waiting, compiled, fresh_dynamo):
    path, model = tmp_path / "forms.safetensors", models.build_forms().cuda()
    called = torch.compile(model) if compiled else model
    batches = on_gpu(models.make_batches(6, 2048, 3, 12))
    models.train(called, batches[:1])
    with loka.Probe(called, policy("forms"), every=2, rows=256, path=path, save_every=4) as probe:
        models.train(called, batches[:2], probe)  # kernels are loaded
        no_waiting(True)
        models.train(called, batches[2:], probe)
        no_waiting(False)
        assert (probe.samples, probe.unseen_steps) == (3, 0)
    assert profile_file.load(path).profile.samples == 3


def test_the_ranker_without_waiting(no_waiting):
    model = small_ranker().cuda()
    batches = [
        (tuple(part.cuda() for part in inputs), target.cuda())
        for (inputs, target), _ in zip(ranker_batches(512, 0), range(3), strict=False)
    ]
    with loka.Probe(model, "policies/small_ranker.yaml", every=1) as probe:
        for number, (inputs, target) in enumerate(batches):
            no_waiting(number > 0)
            click_loss(model(*inputs), target).backward()
            model.zero_grad()
            probe.step()
        no_waiting(False)
        assert all(site.input.calls == site.grad_output.calls == 3 for site in probe.stats())


def test_a_bound_model_is_seen_in_eager(tmp_path, monkeypatch):
    """Its operators call kernels directly there, past what a Probe sees of them."""
    text = sharded_models.POLICY.format(name="probed_bound", factory="tower", rules="").replace("reference", "h100")
    (tmp_path / "probed_bound.yaml").write_text(text)
    loka.generate(tmp_path / "probed_bound.yaml", tmp_path / "probed_bound")
    monkeypatch.syspath_prepend(tmp_path)
    model = sharded_models.tower().cuda().bfloat16()
    importlib.import_module("probed_bound").apply(model)
    with loka.Probe(model, tmp_path / "probed_bound.yaml", every=1) as probe:
        model(torch.randn(16, sharded_models.WIDTH, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
        probe.step()
        seen = {site.name: (site.input, site.grad_output) for site in probe.stats()}
    assert len(seen) == 5
    assert all(operand is not None and operand.calls == 1 for operands in seen.values() for operand in operands), seen


def test_it_learns_what_it_learns_on_the_cpu(policy):
    batches, found = models.make_batches(2, 16, 3, 12), []
    for device in ("cpu", "cuda"):
        model = models.build_forms().to(device)
        with loka.Probe(model, policy("forms"), every=1) as probe:
            models.train(model, [batch.to(device) for batch in batches], probe, lr=0.0)
            found.append(probe.stats())
    for one, other in zip(*found, strict=True):
        for part in ("input", "grad_output", "joint"):
            a, b = getattr(one, part).moments, getattr(other, part).moments
            assert a.count == b.count
            torch.testing.assert_close(a.mean, b.mean, rtol=1e-2, atol=1e-3 * float(a.mean.abs().max()))
            # TF32 may be on for the model
            torch.testing.assert_close(a.comoment, b.comoment, rtol=1e-2, atol=1e-2 * float(a.comoment.abs().max()))


def test_cuda_graphs_of_torch_compile_go_on(policy, fresh_dynamo):
    model = models.build_plain().cuda()
    called = torch.compile(model, mode="reduce-overhead")
    batch = on_gpu(models.make_batches(1, 256, 12))
    for _ in range(4):  # compiled, recorded, replayed
        torch.compiler.cudagraph_mark_step_begin()
        models.train(called, batch, lr=0.0)
    with loka.Probe(called, policy("plain"), every=3) as probe, torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(7):
            torch.compiler.cudagraph_mark_step_begin()
            models.train(called, batch, probe, lr=0.0)
        assert (probe.samples, probe.unseen_steps) == (2, 0)
        assert all(site.input.calls == site.grad_output.calls == 2 for site in probe.stats())


def test_a_graph_of_the_users_own_is_replayed_between_samples(policy):
    model = models.build_plain().cuda()
    batch = on_gpu(models.make_batches(1, 64, 12))[0]

    def eager_step():
        model(batch).square().mean().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            eager_step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager_step()
    with loka.Probe(model, policy("plain"), every=2) as probe:
        for _ in range(6):
            if probe.sampling:
                eager_step()
            else:
                graph.replay()
            probe.step()
        assert (probe.samples, probe.unseen_steps) == (3, 0)


def test_capturing_in_a_sampled_step_is_refused(policy):
    model = models.build_plain().cuda()
    batch = on_gpu(models.make_batches(1, 64, 12))[0]
    model(batch)
    torch.cuda.synchronize()
    with loka.Probe(model, policy("plain"), every=1):
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(LokaError, match="being captured"), torch.cuda.graph(graph):
            model(batch)


def test_a_model_that_moved_is_refused(policy):
    model = models.build_plain()
    batch = on_gpu(models.make_batches(1, 64, 12))[0]
    with loka.Probe(model, policy("plain"), every=1):
        model.cuda()
        with pytest.raises(LokaError, match="move the model first"):
            model(batch)
