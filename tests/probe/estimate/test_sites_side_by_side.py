"""Sites are estimated side by side: the numbers are the same whatever the number of threads."""

from __future__ import annotations

import pytest
import torch

import loka
from loka.mods.policy_loader import load_policy
from loka.plan.examine import Examined, examine
from loka.probe.learn import finish
from loka.probe.profile.profile import Estimate, RecordedStats
from tests.support.models import wide_model

POLICY = """\
version: 1
name: wide
model: {factory: "tests.support.models.wide_model:build", inputs: "tests.support.models.wide_model:inputs",
  batch_size: 512}
defaults: {compute: fp8}
"""


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedStats, Examined]:
    """What one step taught of the wide model."""
    path = tmp_path_factory.mktemp("wide") / "wide.yaml"
    path.write_text(POLICY)
    examined = examine(load_policy(path))
    model = wide_model.build()
    torch.manual_seed(1)
    with loka.Probe(model, path, every=1) as probe:
        model(*wide_model.inputs(64)).square().mean().backward()
        probe.step()
    return probe.recorded(), examined


def test_estimates_do_not_depend_on_the_number_of_threads(learned: tuple[RecordedStats, Examined]) -> None:
    recorded, examined = learned

    def estimates() -> list[tuple[Estimate, ...]]:
        done = finish(recorded, examined.sites, examined.settings, batch_size=64, limit=2)
        return [site.estimates for site in done.profile.sites]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = estimates()
        torch.set_num_threads(4)
        assert estimates() == alone
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert all(alone)


def test_an_error_at_one_site_leaves_the_number_of_threads(
    learned: tuple[RecordedStats, Examined], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, examined = learned
    monkeypatch.setattr("loka.probe.learn.estimate_site", lambda *given: 1 / 0)
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError):
        finish(recorded, examined.sites, examined.settings, batch_size=64, limit=4)
    assert torch.get_num_threads() == before
