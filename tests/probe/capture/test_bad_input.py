"""Bad input, from the training loop to the findings: each is told, and everything else that is learned stays finite."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace

import pytest
import torch

import loka
from loka.errors import InputError
from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Gemm
from loka.plan.examine import examine
from loka.probe.learn import finish
from tests.support.models import probe_models as models

pytestmark = pytest.mark.slow

ALL = 1_000_000  # rows to sample: all of them


def examined_of(path):
    """The policy's sites with every GEMM in e4m3 rowwise."""
    path.write_text(path.read_text() + "defaults: {compute: fp8}\n")
    return examine(load_policy(str(path)))


def learned(path, batches, model=None, skip_bad=True):
    """The finished record of a training run. As with a gradient scaler, no step on gradients that are not finite."""
    examined = examined_of(path)
    model = models.build_plain() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with loka.Probe(model, path, every=1, rows=ALL) as probe:
        for x in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            finite = all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
            if finite or not skip_bad:
                optimizer.step()
            probe.step()
    return finish(probe.recorded(), examined.sites, examined.settings, batch_size=8, limit=4)


def numbers(value, name):
    """(where, number) for each number in a dataclass, tuple or tensor."""
    if is_dataclass(value):
        for field in fields(value):
            yield from numbers(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, tuple):
        for each in value:
            yield from numbers(each, name)
    elif isinstance(value, torch.Tensor):
        yield name, 0.0 if bool(value.double().isfinite().all()) else math.nan
    elif isinstance(value, float):
        yield name, value


def broken(record):
    """Where a statistic or the summary is not finite. An SQNR may be infinite, where there is no error; never NaN."""
    found = [name for site in record.stats for name, number in numbers(site, site.name) if not math.isfinite(number)]
    for site in record.profile.sites:
        for name, number in numbers(site, site.name):
            if math.isnan(number) or (math.isinf(number) and ".sqnr_db" not in name):
                found.append(f"profile {name}")
    return found


def told(record):
    return {(each.kind, each.site) for each in record.profile.findings}


def gemms_judged(record, name):
    return {each.gemm for each in record.profile.site(name).estimates}


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_bad_batch_is_told_and_everything_else_is_as_without_it(policy, bad):
    batches = models.make_batches(6, 32, 12)
    clean = learned(policy("plain"), [batch for step, batch in enumerate(batches) if step != 2])
    batches[2][:] = bad
    record = learned(policy("plain"), batches)
    assert broken(record) == []
    assert {("nonfinite", site.name) for site in record.stats} <= told(record)
    for mine, other in zip(record.stats, clean.stats, strict=True):
        assert mine.grad_output.nonfinite > 0
        torch.testing.assert_close(mine.input.moments.mean, other.input.moments.mean)
        torch.testing.assert_close(mine.grad_output.moments.comoment, other.grad_output.moments.comoment)
    for mine, other in zip(record.profile.sites, clean.profile.sites, strict=True):
        assert mine.estimates == other.estimates


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_element_is_told_and_leaves_the_other_rows(policy, bad):
    batches = models.make_batches(6, 32, 12)
    batches[2][3, 5] = bad
    record = learned(policy("plain"), batches)
    assert broken(record) == []
    assert ("nonfinite", "first") in told(record)
    first = record.stats[0]
    assert (first.input.nonfinite, first.input.nonfinite_calls, first.input.moments.count) == (1, 1, 6 * 32 - 1)
    assert gemms_judged(record, "first") >= {Gemm.FPROP, Gemm.WGRAD}


def test_a_run_that_diverged_is_told_and_what_was_learned_before_stays_finite(policy):
    batches = models.make_batches(6, 32, 12)
    batches[3][0, 0] = math.nan
    record = learned(policy("plain"), batches, skip_bad=False)
    assert broken(record) == []
    assert {("nonfinite", site.name) for site in record.stats} <= told(record)
    for site in record.stats:  # a weight that is lost leaves the weight gradient, which does not take it
        assert site.weight.nonfinite == site.k * site.n
        assert gemms_judged(record, site.name) == {Gemm.WGRAD}


def test_only_bad_batches_leave_nothing_to_judge(policy):
    record = learned(policy("plain"), [torch.full((8, 12), math.inf)] * 3)
    assert broken(record) == []
    assert {("nonfinite", site.name) for site in record.stats} <= told(record)
    assert all(not site.estimates for site in record.profile.sites)


def test_one_batch_of_zeros_changes_nothing_and_nothing_but_zeros_is_told(policy):
    batches = models.make_batches(5, 32, 12)
    record = learned(policy("plain"), [*batches, torch.zeros(32, 12)])
    assert broken(record) == []
    assert "always_zero" not in {kind for kind, _ in told(record)}
    record = learned(policy("plain"), [torch.zeros(32, 12)] * 4)
    assert broken(record) == []
    assert ("always_zero", "first") in told(record)
    assert gemms_judged(record, "first") >= {Gemm.FPROP, Gemm.WGRAD}


def test_a_record_of_another_shape_is_refused(policy):
    record = learned(policy("plain"), models.make_batches(2, 32, 12))
    path = policy("plain")
    examined = examined_of(path)
    changed = [replace(site, n=site.n + 8) if site.name == "out" else site for site in examined.sites]
    with pytest.raises(InputError, match=r"'out' has K = 16, N = 1 in the profile and K = 16, N = 9 in the model"):
        finish(record, changed, examined.settings, batch_size=8, limit=2)
