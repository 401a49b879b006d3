"""A Probe in all kinds of training: it changes nothing, costs nothing between samples, and leaves nothing behind."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

import loka
from loka.errors import InputError, LokaError
from loka.probe.capture.watch import Watch
from loka.probe.probe import ProbeWarning
from loka.probe.profile import profile_file
from loka.probe.stats.site_trackers import Trackers
from tests.support.models import probe_models as models


def same_stats(one, other, rtol=0.0, atol=0.0):
    """Counts, moments and maxima of each site agree."""
    assert [site.name for site in one] == [site.name for site in other]
    for a, b in zip(one, other, strict=True):
        for part in ("input", "grad_output"):
            left, right = getattr(a, part), getattr(b, part)
            assert (left.calls, left.rows, left.moments.count) == (right.calls, right.rows, right.moments.count)
            torch.testing.assert_close(left.moments.comoment, right.moments.comoment, rtol=rtol, atol=atol)
            torch.testing.assert_close(left.column_amax, right.column_amax, rtol=rtol, atol=atol)
        assert a.joint.moments.count == b.joint.moments.count
        torch.testing.assert_close(a.joint.moments.comoment, b.joint.moments.comoment, rtol=rtol, atol=atol)


def learned(model, path, batches, **options):
    """The statistics of every step of a training run."""
    with loka.Probe(model, path, every=1, **options) as probe:
        models.train(model, batches, probe)
        return probe.stats()


@pytest.mark.slow
def test_training_is_the_same_bit_for_bit_and_nothing_is_left(policy):
    path, batches = policy("forms"), models.make_batches(6, 600, 3, 12)
    plain, probed = models.build_forms(), models.build_forms()
    attributes = {name: set(vars(module)) for name, module in probed.named_modules()}
    torch.manual_seed(5)
    expected = models.train(plain, batches)
    after = torch.get_rng_state()
    with loka.Probe(probed, path, every=2, rows=16) as probe:
        torch.manual_seed(5)
        losses = models.train(probed, batches, probe)
        assert torch.equal(torch.get_rng_state(), after)
        assert (probe.samples, probe.unseen_steps) == (3, 0)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(probed.parameters(), plain.parameters(), strict=True))
    assert {name: set(vars(module)) for name, module in probed.named_modules()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in probed.modules())
    assert torch._C._len_torch_function_stack() == 0


def test_nothing_is_called_in_unsampled_steps(policy, monkeypatch):
    calls = []
    for owner, name in ((Watch, "__torch_function__"), (Trackers, "take_input"), (Trackers, "take_gradient")):
        original = getattr(owner, name)

        def counted(self, *args, _original=original, _name=name, **kwargs):
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, counted)
    model, batches = models.build_plain(), models.make_batches(4, 8, 12)
    turns, seen = [], []
    monkeypatch.setattr(loka.Probe, "_turn", lambda self, original=loka.Probe._turn: (turns.append(1), original(self)))
    with loka.Probe(model, policy("plain"), every=3) as probe:
        for batch in batches:
            calls.clear()
            sampling = probe.sampling
            models.train(model, [batch])
            seen.append((sampling, bool(calls), calls.count("take_input"), calls.count("take_gradient")))
            probe.step()
    idle = (False, False, 0, 0)
    assert seen == [idle, idle, (True, True, 4, 4), idle]
    assert len(turns) == 3  # on entering, into the sampled step, out of it


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_each_call_once(policy, reentrant):
    path, batches = policy("plain"), models.make_batches(2, 8, 12)
    plain, wrapped = models.build_plain(), models.build_plain()
    wrapped.reentrant = reentrant
    same_stats(learned(wrapped, path, batches), learned(plain, path, batches), rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_are_seen_and_not_compiled_again(policy, fresh_dynamo, backend):
    path, batches = policy("plain"), models.make_batches(7, 8, 12)
    plain, compiled = models.build_plain(), models.build_plain()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    optimized = torch.compile(compiled, backend=count)
    expected = learned(plain, path, batches[2::3])
    models.train(optimized, batches[:1], lr=0.0)
    built = len(graphs)
    assert built > 0
    with loka.Probe(optimized, path, every=3) as probe:
        models.train(optimized, batches[:1], probe, lr=0.0)
        models.train(optimized, batches[1:2], probe, lr=0.0)
        models.train(optimized, batches[2:3], probe)
        for batch in batches[3:5]:
            models.train(optimized, [batch], probe, lr=0.0)
        models.train(optimized, batches[5:6], probe)
        models.train(optimized, batches[6:7], probe, lr=0.0)
        stats = probe.stats()
    assert len(graphs) == built
    same_stats(stats, expected, rtol=1e-5, atol=1e-7)


def test_autocast_takes_operands_as_the_function_gets_them(policy):
    model, x = models.build_plain(), models.make_batches(1, 32, 12)[0]
    with loka.Probe(model, policy("plain"), every=1) as probe:
        models.train(model, [x], probe, lambda: torch.autocast("cpu", torch.bfloat16))
        stats = {site.name: site for site in probe.stats()}
    torch.testing.assert_close(stats["first"].input.column_amax, x.abs().amax(0).double(), rtol=0, atol=0)
    centred = (x - x.mean(0)).double()
    torch.testing.assert_close(stats["first"].input.moments.comoment, centred.T @ centred, rtol=1e-4, atol=1e-3)
    maxima = stats["first"].grad_output.column_amax.float()
    assert torch.equal(maxima, maxima.bfloat16().float())


def test_evaluation_in_a_sampled_step_does_not_count(policy):
    model, batches = models.build_plain(), models.make_batches(1, 8, 12)
    with loka.Probe(model, policy("plain"), every=1) as probe:
        models.train(model, batches)
        model.eval()
        with torch.no_grad():
            model(batches[0])
        probe.step()
        assert [site.input.calls for site in probe.stats()] == [1, 1, 1, 1]


def test_modes_of_the_user_stay_in_place(policy):
    model, batches = models.build_plain(), models.make_batches(2, 8, 12)
    with loka.Probe(model, policy("plain"), every=1) as probe, torch.device("cpu"):
        below = torch._C._len_torch_function_stack()
        models.train(model, batches, probe)
        assert torch._C._len_torch_function_stack() == below
        assert probe.samples == 2
    assert torch._C._len_torch_function_stack() == 0


def test_an_exception_in_the_loop_leaves_everything_as_it_was(policy, fresh_dynamo):
    model, batches = models.build_shared(), models.make_batches(1, 8, 12)

    def fail(probe):
        with probe:
            models.train(model, batches)
            raise ValueError("of the user")

    probe = loka.Probe(model, policy("shared"), every=1)
    with pytest.raises(ValueError, match="of the user"):
        fail(probe)
    assert torch._C._len_torch_function_stack() == 0
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not probe.sampling


def test_a_model_that_is_not_run_is_told_once(policy, tmp_path):
    model = models.build_plain()
    probe = loka.Probe(model, policy("plain"), every=1).__enter__()
    probe.step()
    probe.step()
    stats = probe.stats()
    assert probe.unseen_steps == 2
    with pytest.warns(ProbeWarning, match="in 2 of 2 sampled steps no site"):
        probe.__exit__(None, None, None)
    assert all(site.input is site.grad_output is site.joint is site.weight is None for site in stats)


@pytest.mark.parametrize(
    "run",
    [
        lambda model, x: torch.func.vmap(model)(x).sum(),
        lambda model, x: model(torch.nested.nested_tensor([x[:1], x])),
        lambda model, x: model.hidden[0](torch.ones(8, 16).to_sparse()),
    ],
)
def test_operands_that_are_no_dense_tensors_are_not_recorded_and_stop_nothing(policy, run):
    model = models.build_plain()
    path = policy("plain")

    def sampled():
        with loka.Probe(model, path, every=1) as probe:
            run(model, torch.randn(8, 12))
            probe.step()
        return probe

    with pytest.warns(ProbeWarning, match="in 1 of 1 sampled steps no site"):
        probe = sampled()
    assert probe.recorded().profile.samples == 0


def test_saving_goes_on_in_the_background_and_can_be_read(policy, tmp_path):
    path, model = tmp_path / "there" / "plain.safetensors", models.build_plain()
    with loka.Probe(model, policy("plain"), every=2, path=path, save_every=3) as probe:
        models.train(model, models.make_batches(4, 8, 12), probe)
        for thread in threading.enumerate():
            if thread.name == "loka-probe-save":
                thread.join()
        early = profile_file.load(path)
        models.train(model, models.make_batches(3, 8, 12), probe)
        expected = probe.recorded()
    last = profile_file.load(path)
    assert (early.profile.steps, early.profile.samples, early.profile.every) == (2, 1, 2)
    assert (last.profile.steps, last.profile.samples, last.profile.batch_size) == (6, 3, 32)
    assert [site.weight.step for site in early.stats] == [3] * 4
    same_stats(last.stats, expected.stats)
    assert [site.rows for site in last.profile.sites] == [8] * 4


@pytest.mark.slow
def test_an_error_while_saving_is_raised_and_an_interrupted_run_keeps_the_last_file(policy, tmp_path):
    (tmp_path / "file").write_text("no folder")
    model, batches = models.build_plain(), models.make_batches(1, 8, 12)
    with pytest.raises(LokaError), loka.Probe(model, policy("plain"), every=1, path=tmp_path / "file" / "p") as probe:
        models.train(model, batches, probe)
    path = tmp_path / "kept"

    def interrupted(error):
        with loka.Probe(model, policy("plain"), every=1, path=path, save_every=1) as probe:
            models.train(model, batches, probe)
            raise error

    with pytest.raises(ValueError, match="stop"):
        interrupted(ValueError("stop"))
    assert profile_file.load(path).profile.steps == 1
    path.unlink()
    with pytest.raises(KeyboardInterrupt):
        interrupted(KeyboardInterrupt())
    assert profile_file.load(path).profile.samples == 1


def test_misuse_is_told(policy):
    model, path = models.build_plain(), policy("plain")
    for options in ({"every": 0}, {"rows": 0}, {"save_every": -1}, {"every": 1.5}, {"rows": True}):
        with pytest.raises(InputError, match="at least 1"):
            loka.Probe(model, path, **options)
    probe = loka.Probe(model, path, every=1)
    with pytest.raises(InputError, match="inside `with"):
        probe.step()
    with probe:
        with pytest.raises(InputError, match="is entered already"):
            probe.__enter__()
        with pytest.raises(InputError, match="nowhere to save"):
            probe.save()
        with pytest.raises(InputError, match="another Probe"):
            loka.Probe(model, path, every=1).__enter__()
    with pytest.raises(InputError, match="was entered already"):
        probe.__enter__()


def test_models_that_do_not_fit_or_cannot_be_watched_are_refused(policy):
    path, other = policy("plain"), models.build_plain()
    other.hidden[2] = nn.Linear(16, 24)
    with pytest.raises(InputError, match=r"'hidden.2'.*\(24, 16\).*\(16, 16\)"):
        loka.Probe(other, path)
    del other.out
    other.hidden[2] = nn.Linear(16, 16)
    with pytest.raises(InputError, match=r"'out'.*no Parameter 'out.weight'"):
        loka.Probe(other, path)
    with pytest.raises(InputError, match="DataParallel"):
        loka.Probe(nn.DataParallel(models.build_plain()), path)
    with pytest.raises(InputError, match=r"torch\.jit\.script"):
        loka.Probe(torch.jit.trace(models.build_plain(), torch.randn(2, 12)), path)


def test_a_model_moved_by_copy_is_another_model(policy):
    model = models.build_plain()
    with pytest.warns(ProbeWarning), loka.Probe(model, policy("plain"), every=1) as probe:
        models.train(copy.deepcopy(model), models.make_batches(1, 8, 12), probe)
    assert probe.samples == 0
