"""What the trackers give is saved, read back and united as it is: narrow and wide sites, and poisoned ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from loka.numerics.enums import Operand
from loka.probe.profile import profile_file, summarise
from loka.probe.profile.profile import RecordedStats
from loka.probe.stats.site_stats import SiteStats
from loka.probe.stats.weight_tracker import WeightTracker, weight_stats
from tests.support.learned_stats import site_of
from tests.support.plan.made_profiles import make_profile


def learn(k: int, n: int, poisoned: bool, rows: int = 64) -> SiteStats:
    """A site seen once. Poisoned: a NaN in the input, gradients of zero, an infinity in the weight."""
    torch.manual_seed(k + n)
    x, dy, weight = torch.randn(rows, k), torch.randn(rows, n) * 1e-5, torch.randn(n, k)
    if poisoned:
        x[0, 0], weight[0, 0] = math.nan, math.inf
        dy.zero_()
    weights = WeightTracker(n, k, "cpu")
    weights.update(weight, 5)
    return site_of([x], [dy], weight_stats(weights.snapshot()), "a")


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize(("k", "n"), [(1, 1), (13, 40), (700, 24), (24, 700)])
def test_saved_read_and_united(tmp_path: Path, k: int, n: int, poisoned: bool) -> None:
    stats = learn(k, n, poisoned)
    site = summarise.summarise(stats, (), 64)
    recorded = RecordedStats(make_profile((site,)), (stats,))
    profile_file.save(tmp_path / "p", recorded)
    loaded = profile_file.load(tmp_path / "p")
    assert isinstance(loaded, RecordedStats)
    assert loaded.profile == recorded.profile
    both = summarise.unite(recorded, loaded)
    profile_file.save(tmp_path / "both", both)
    twice = profile_file.load_profile(tmp_path / "both").sites[0]
    for once, found in zip(site.operands, twice.operands, strict=True):
        factor = 1 if once.operand is Operand.WEIGHT else 2
        assert found.magnitudes == tuple(factor * count for count in once.magnitudes)
        assert found.sampled == factor * once.sampled
        assert found.rms == pytest.approx(once.rms)
    assert [operand.nonfinite > 0 for operand in site.operands] == [poisoned, poisoned, False]
