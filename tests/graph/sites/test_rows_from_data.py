"""Rows that come from data, as those of jagged inputs, and inputs that are drawn at random."""

from __future__ import annotations

import random

import pytest
import torch

from loka.graph.sites.discover import find_sites
from loka.graph.sites.site import RowCount
from loka.model.build_model import BuiltModel, build_model
from loka.model.example_inputs import seeded
from tests.support.models.product_models import Ragged


def batch_of(lengths: list[int]) -> BuiltModel:
    return BuiltModel(Ragged(), (torch.randn(len(lengths), 20, 16), torch.tensor(lengths)), {}, len(lengths))


def test_rows_that_are_no_line_in_the_batch_are_their_mean_with_their_range() -> None:
    found = find_sites(batch_of([5, 11, 2, 17, 9, 4]))  # 16 rows in 2 samples, 18 in 3, 48 in 6
    assert found["token"].rows == RowCount(0, round((16 + 18 + 48) / (2 + 3 + 6) * 6))
    assert found["out"].rows == RowCount(1)
    said = "token: its rows come from data: 36 to 48 at a batch size of 6, by the example inputs; M is their mean"
    assert said in found.notes
    flops = 2 * found["token"].rows.at(6) * 16 * 32
    assert found["token"].share == pytest.approx(flops / (flops + 2 * 6 * 16), rel=1e-3)


def test_rows_that_follow_the_batch_stay_a_line_though_they_are_read_from_data() -> None:
    found = find_sites(batch_of([7] * 5))
    assert found["token"].rows == RowCount(7)
    assert not any("come from data" in note for note in found.notes)


def test_three_samples_are_too_few_to_tell() -> None:
    found = find_sites(batch_of([7, 5, 9]))["token"]
    assert found.rows == RowCount(9, -6)  # the line through the 12 rows of two samples and the 21 of three


def test_inputs_that_are_drawn_are_the_same_each_time_and_the_random_state_is_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawn_ragged.py").write_text(
        "import random, torch\nfrom tests.support.models.product_models import Ragged\n"
        "def inputs(batch):\n"
        "    lengths = torch.tensor([random.randint(1, 19) for _ in range(batch)])\n"
        "    return torch.randn(batch, 20, 16), lengths\n"
    )
    before = random.getstate(), torch.get_rng_state()
    spec = ("drawn_ragged:Ragged", "drawn_ragged:inputs")
    first = find_sites(build_model(*spec, 64)).sites
    random.seed(7)
    torch.manual_seed(7)
    assert find_sites(build_model(*spec, 64)).sites == first
    assert torch.equal(build_model(*spec, 4).args[0], build_model(*spec, 4).args[0])
    random.setstate(before[0])
    with seeded():
        inside = random.random()
    with seeded():
        assert random.random() == inside
    assert random.getstate() == before[0]
