"""Models that a generated package has patched: operands come from its FP8 GEMMs, dequantized."""

from __future__ import annotations

import pytest
import torch

import loka
from generated import ranker as package
from loka.zoo import click_loss, ranker, ranker_batches

PATCHED = {
    site: gemms
    for binding in package.BINDINGS
    for sites in binding.sites
    for site, gemms in zip(sites, binding.gemms, strict=True)
}
SITES = tuple(site for site, gemms in PATCHED.items() if gemms)  # in FP8; kernels may have taken the others


def learned(patched, compiled=False, steps=2):
    torch.manual_seed(0)
    model = ranker()
    patch = package.apply(model) if patched else None
    called = torch.compile(model, backend="eager") if compiled else model
    with loka.Probe(model, "policies/ranker.yaml", every=1, rows=1_000_000) as probe:
        for (inputs, target), _ in zip(ranker_batches(64, 0), range(steps), strict=False):
            model.zero_grad()
            click_loss(called(*inputs), target).backward()
            probe.step()
        assert probe.unseen_steps == 0
        stats = {site.name: site for site in probe.stats()}
    if patch is not None:
        patch.verify()
    return stats


@pytest.fixture(scope="module")
def plain():
    return learned(patched=False)


@pytest.fixture(scope="module")
def patched():
    return learned(patched=True)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
def test_operands_of_patched_sites_are_those_of_the_model_rounded(plain, patched, compiled):
    found = learned(patched=True, compiled=True) if compiled else patched
    assert len(SITES) == 9  # of the ranker, in FP8
    assert set(found) == set(plain)
    for name in found:
        if name in PATCHED and name not in SITES:
            continue
        for part in ("input", "grad_output"):
            one, other = getattr(found[name], part), getattr(plain[name], part)
            assert (one.calls, one.rows, one.moments.count) == (other.calls, other.rows, other.moments.count), name
            scale = float(other.column_amax.max())
            torch.testing.assert_close(one.column_amax, other.column_amax, rtol=0.1, atol=0.1 * scale)
            spread = (one.moments.diagonal.sum() / other.moments.diagonal.sum()).item()
            assert abs(spread - 1) < 0.1, (name, part, spread)
        assert found[name].joint.moments.count == plain[name].joint.moments.count
        torch.testing.assert_close(found[name].weight.row_amax, plain[name].weight.row_amax)


@pytest.mark.slow
def test_what_is_learned_of_a_patched_site_went_through_e4m3(plain, patched):
    """Rowwise scales leave at most 2 * 127 magnitudes a row: far fewer distinct values than rows x columns."""
    seen = [float((patched[name].input.values > 0).sum()) for name in SITES]
    before = [float((plain[name].input.values > 0).sum()) for name in SITES]
    assert all(a <= 1.05 * b for a, b in zip(seen, before, strict=True))
    zeros = [patched[name].input.relative[0, 1] for name in SITES]
    assert all(int(count) == 0 for count in zeros)  # nothing below 2^-32 of the largest is left
