"""What a Probe learns is what went into the GEMMs: against operands captured by hand, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import loka
from loka.probe.profile import profile_file
from loka.zoo import click_loss, ranker_batches, small_ranker
from tests.support.models import probe_models as models

ALL = 1_000_000  # rows to sample: all of them


def forms_by_hand(model, x):
    """The forward of Forms written out; for each site its calls as (x (M, K), output, how its gradient is (M, N))."""
    calls = {}

    def note(name, x, y, view=lambda grad: grad):
        y.retain_grad()
        calls.setdefault(name, []).append((x.detach().reshape(-1, x.shape[-1]), y, view))
        return y

    def linear(name, x):
        return note(name, x, getattr(model, name)(x))

    x = F.relu(linear("first", x))
    x = linear("twice", torch.tanh(linear("twice", x)))
    x = linear("tied_again", torch.tanh(linear("tied", x)))
    x = note("right", x, x @ model.right)
    left = note("left", x.mT, model.left @ x, lambda grad: grad.mT)
    summed = torch.einsum("bnd,nk->bkd", x, model.summed)
    note("summed", x.mT, summed, lambda grad: grad.mT)
    x = left + summed.sum(1, keepdim=True)
    x = note("transposed", x, F.linear(x, model.transposed.t()))
    x = x.mean(1)
    x = note("added", x, torch.addmm(model.bias, x, model.added))
    return linear("out", torch.tanh(x)), calls


def same_moments(stats, matrices, rounding=0.0):
    """One pass in float64 over all calls' rows; `rounding` is that of the operands themselves."""
    rows = torch.cat(matrices).double()
    assert (stats.rows, stats.sampled, stats.calls) == (rows.shape[0], rows.shape[0], len(matrices))
    moments = stats.moments
    assert moments.count == rows.shape[0]
    centred = rows - rows.mean(0)
    torch.testing.assert_close(moments.mean, rows.mean(0), rtol=1e-4, atol=1e-5 * float(rows.abs().max()))
    scale = float(centred.square().sum(0).max())
    if moments.comoment.shape[0] == moments.comoment.shape[1]:
        torch.testing.assert_close(moments.comoment, centred.T @ centred, rtol=1e-3, atol=1e-4 * scale)
    torch.testing.assert_close(stats.column_amax, rows.abs().amax(0), rtol=rounding, atol=0)


@pytest.mark.slow
def test_every_form_of_a_product_and_its_gradient(policy):
    model, x = models.build_forms(), models.make_batches(1, 8, 3, 12)[0]
    out, calls = forms_by_hand(model, x)
    out.square().mean().backward()
    probed = models.build_forms()
    with loka.Probe(probed, policy("forms"), every=1, rows=ALL) as probe:
        models.train(probed, [x], probe, lr=0.0)
        stats = {site.name: site for site in probe.stats()}
    assert set(calls) == set(stats)
    named = dict(probed.named_parameters(remove_duplicate=False))
    for name, seen in calls.items():
        site = stats[name]
        assert (site.k, site.n) == (seen[0][0].shape[1], seen[0][2](seen[0][1]).shape[-1])
        gradients = [view(y.grad).reshape(-1, site.n) for _, y, view in seen]
        same_moments(site.input, [x for x, _, _ in seen])
        same_moments(site.grad_output, gradients)
        pairs = torch.cat([torch.cat((x, g), 1) for (x, _, _), g in zip(seen, gradients, strict=True)]).double()
        assert site.joint.moments.count == pairs.shape[0]
        centred = pairs - pairs.mean(0)
        tolerance = 1e-3 * float(centred.norm(dim=0).max() * centred.norm(dim=0).min())
        torch.testing.assert_close(site.joint.moments.comoment, centred.T @ centred, rtol=1e-3, atol=tolerance)
        parameter = named.get(f"{name}.weight", named.get(name))
        weight = parameter.T if name in ("right", "summed", "transposed", "added") else parameter
        torch.testing.assert_close(site.weight.row_amax, weight.detach().abs().amax(1).to(site.weight.row_amax.dtype))


def matrices_by_hand(model, x):
    """For each site of Matrices its input, its output, which keeps its gradient, and its weight as (N, K)."""
    weights = {
        "square.0": model.square[0].t(),
        "square.1": model.square[1],
        "wide.0.1.0": model.wide[0][1, 0].t(),
        "wide.0.0.1": model.wide[0][0, 1],
        "wide.0.1.1": model.wide[0][1, 1].t(),
        "dots.0": model.dots[0].t(),
        "dots.1": model.dots[1],
        "fields": model.fields.permute(1, 2, 0).flatten(0, 1),
        "joined": model.joined.flatten(1),
    }
    calls = {}
    for name, weight in weights.items():
        x = x.unflatten(1, (4, 3)).transpose(1, 2).flatten(1) if name == "joined" else x
        y = F.linear(x, weight)
        y.retain_grad()
        calls[name] = (x.detach(), y, weight.detach())
        x = y if name in ("wide.0.1.1", "dots.1") else torch.tanh(y)
    return y, calls


def test_matrices_of_parameters_have_their_own_operands(policy):
    model, x = models.build_matrices(), models.make_batches(1, 8, 12)[0]
    out, calls = matrices_by_hand(model, x)
    out.square().mean().backward()
    probed = models.build_matrices()
    with loka.Probe(probed, policy("matrices"), every=1, rows=ALL) as probe:
        models.train(probed, [x], probe, lr=0.0)
        stats = {site.name: site for site in probe.stats()}
    assert list(stats) == list(calls)
    for name, (x, y, weight) in calls.items():
        same_moments(stats[name].input, [x], 1e-5)
        same_moments(stats[name].grad_output, [y.grad], 1e-5)
        amax = weight.abs().amax(1)
        torch.testing.assert_close(stats[name].weight.row_amax, amax.to(stats[name].weight.row_amax.dtype))


def test_rows_are_sampled_the_same_for_input_and_gradient_and_maxima_are_of_all_rows(policy):
    torch.manual_seed(0)
    model = models.build_plain()
    x = models.make_batches(1, 4096, 12)[0]
    x[17, 3] = 1000.0
    with loka.Probe(model, policy("plain"), every=1, rows=64) as probe:
        models.train(model, [x], probe, lr=0.0)
        first = next(site for site in probe.stats() if site.name == "first")
    assert (first.input.rows, first.input.sampled, first.joint.moments.count) == (4096, 64, 64)
    assert float(first.input.column_amax.max()) == 1000.0
    shape = first.joint.moments.mean.numel()
    assert shape == 12 + 16
    torch.testing.assert_close(first.joint.moments.mean[:12], first.input.moments.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.joint.moments.mean[12:], first.grad_output.moments.mean, rtol=1e-4, atol=1e-9)


@pytest.mark.slow
def test_the_ranker_against_hooks():
    torch.manual_seed(0)
    model = small_ranker()
    inputs, target = next(iter(ranker_batches(64, 0)))
    caught, gradients = {}, {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def hook(module, args, out, name=name):
                caught[name] = args[0].detach().reshape(-1, args[0].shape[-1])
                out.register_hook(lambda grad: gradients.__setitem__(name, grad.reshape(-1, grad.shape[-1])))

            hooks.append(module.register_forward_hook(hook))
    for index, layer in enumerate(model.layers):

        def before(module, args, index=index):
            caught[f"layers.{index}.rank"] = args[0].detach().transpose(1, 2).flatten(0, 1)
            caught[f"layers.{index}.compress"] = args[0].detach().transpose(1, 2).flatten(0, 1)

        hooks.append(layer.register_forward_pre_hook(before))
    with loka.Probe(model, "policies/small_ranker.yaml", every=1, rows=ALL) as probe:
        click_loss(model(*inputs), target).backward()
        probe.step()
        stats = probe.stats()
    assert {site.name for site in stats} == set(caught)
    for site in stats:
        same_moments(site.input, [caught[site.name]])
        if site.name in gradients:
            same_moments(site.grad_output, [gradients[site.name]])
    assert len(gradients) == len(caught) - 2 * len(model.layers)


def test_one_parameter_at_one_line_of_two_modules(policy):
    model = models.build_shared()
    x = models.make_batches(1, 8, 12)[0]
    with loka.Probe(model, policy("shared"), every=1, rows=ALL) as probe:
        models.train(model, [x], probe, lr=0.0)
        stats = probe.stats()
    hidden = torch.tanh(x @ model.one.weight).detach()
    assert len(stats) == 2
    same_moments(stats[0].input, [x])
    same_moments(stats[1].input, [hidden])


def test_zero_and_one_row_batches_and_batches_of_zeros(policy):
    model = models.build_plain()
    batches = [torch.zeros(0, 12), torch.ones(1, 12), torch.zeros(4, 12)]
    with loka.Probe(model, policy("plain"), every=1) as probe:
        models.train(model, batches[1:], probe, lr=0.0)
        with torch.no_grad():
            model(batches[0])
        probe.step()
        first = next(site for site in probe.stats() if site.name == "first")
    assert (first.input.calls, first.input.rows, first.input.nonfinite_calls) == (3, 5, 0)
    assert first.input.moments.comoment.isfinite().all()


def test_a_weight_on_the_left_of_a_matrix(policy):
    """Its rows are columns of what the call was given: taken whole and sampled."""
    torch.manual_seed(0)
    model = models.build_left()
    x = torch.randn(7, 40)
    for rows in (ALL, 16):
        with loka.Probe(model, policy("left"), every=1, rows=rows) as probe:
            models.train(model, [x], probe, lr=0.0)
            (site,) = probe.stats()
        assert (site.k, site.n, site.input.rows, site.input.sampled) == (7, 5, 40, min(rows, 40))
        torch.testing.assert_close(site.input.column_amax, x.abs().amax(1).double(), rtol=0, atol=0)
        if rows == ALL:
            same_moments(site.input, [x.T])


@pytest.fixture
def other_defaults():
    """bfloat16 and the meta device, where numbers would be lost."""
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_the_dtype_and_device_of_new_tensors_change_nothing(policy, request, tmp_path):
    batches = models.make_batches(3, 24, 12)

    def probed(name):
        model = models.build_plain()
        return model, loka.Probe(model, policy("plain"), every=1, path=tmp_path / name)

    def seen(model, probe):
        with probe:
            for x in batches:
                model(x).float().square().mean().backward()
                probe.step()
            return probe.recorded()

    expected = seen(*probed("plain.safetensors"))
    subject = probed("other.safetensors")
    request.getfixturevalue("other_defaults")
    found = seen(*subject)
    for one, other in zip(expected.stats, found.stats, strict=True):
        for name in ("input", "grad_output"):
            mine, theirs = getattr(one, name), getattr(other, name)
            assert torch.equal(mine.values, theirs.values)
            assert torch.equal(mine.moments.mean, theirs.moments.mean)
        assert torch.equal(one.weight.values, other.weight.values)
    torch.set_default_device(None)  # what was saved in the background, too
    saved, other = (profile_file.load_profile(tmp_path / f"{name}.safetensors") for name in ("plain", "other"))
    assert saved.sites == other.sites
