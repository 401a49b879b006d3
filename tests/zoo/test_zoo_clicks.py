"""The embedded click data: deterministic by position, disjoint splits, and the distributions that it promises."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch

from loka import zoo
from loka.bench.quality.evaluation import auc, normalised_entropy
from loka.errors import InputError
from loka.zoo.clicks import BLOCK, DENSE, ROWS, ClickStream, Teacher


def joined(stream: ClickStream) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batches = list(stream)
    dense, ids = (torch.cat([inputs[i] for inputs, _ in batches]) for i in range(2))
    return dense, ids, torch.cat([target for _, target in batches])


@pytest.mark.parametrize("batch_size", [1000, 4096, 5000, 20_000])
def test_rows_do_not_depend_on_the_batch_size(batch_size: int) -> None:
    samples = 2 * BLOCK + 808
    expected = joined(ClickStream("train", samples, samples, seed=1))
    found = joined(ClickStream("train", samples, batch_size, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert len(expected[2]) == samples


def test_the_last_batch_is_smaller_and_the_length_is_known() -> None:
    stream = ClickStream("train", 1000, 300, seed=0)
    sizes = [len(target) for _, target in stream]
    assert sizes == [300, 300, 300, 100]
    assert len(stream) == 4


def test_a_stream_can_be_read_again() -> None:
    stream = ClickStream("test", 500, 200, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(joined(stream), joined(stream), strict=True))


def test_types_and_ranges() -> None:
    dense, ids, click = joined(ClickStream("train", 3 * BLOCK, BLOCK, seed=0))
    assert (dense.dtype, ids.dtype, click.dtype) == (torch.float32, torch.int64, torch.float32)
    assert (dense.shape[1], ids.shape[1]) == (DENSE, len(ROWS))
    assert bool(dense.isfinite().all())
    assert int(ids.min()) == 0
    assert bool((ids.max(0).values < torch.tensor(ROWS)).all())
    assert set(click.unique().tolist()) == {0.0, 1.0}


def test_splits_and_seeds_share_no_row() -> None:
    streams = [ClickStream(split, BLOCK, BLOCK, seed) for split in ("train", "test") for seed in (0, 1)]
    seen = [set(map(tuple, joined(stream)[0].tolist())) for stream in streams]
    assert all(len(rows) == BLOCK for rows in seen)
    assert len(set.union(*seen)) == len(streams) * BLOCK


def test_the_teacher_reaches_the_promised_auc_and_base_rate() -> None:
    teacher = Teacher()
    blocks = [teacher.rows("test", 0, i) for i in range(10)]
    probability = torch.from_numpy(np.concatenate([block.probability for block in blocks]))
    click = torch.from_numpy(np.concatenate([block.click for block in blocks]))
    assert float(click.mean()) == pytest.approx(0.3, abs=0.02)
    assert auc(probability, click) == pytest.approx(0.8, abs=0.02)
    assert normalised_entropy(torch.logit(probability), click) < 0.85


def test_ids_follow_zipfs_law() -> None:
    _, ids, _ = joined(ClickStream("train", 20 * BLOCK, BLOCK, seed=0))
    for column, rows in enumerate(ROWS):
        if rows < 100:
            continue
        count = torch.bincount(ids[:, column], minlength=rows).double()
        rank = torch.arange(1, 51).double()
        x, y = rank.log(), count[:50].log()
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        assert -1.4 < slope < -0.75


def test_dense_features_have_heavy_tails() -> None:
    dense, _, _ = joined(ClickStream("train", 20 * BLOCK, BLOCK, seed=0))
    centred = dense.double() - dense.double().mean(0)
    kurtosis = (centred**4).mean(0) / (centred**2).mean(0) ** 2
    assert bool((kurtosis > 3.5).all())  # 3 for a normal distribution
    assert float(kurtosis.max()) > 30


@pytest.mark.slow
def test_a_small_model_learns_from_it() -> None:
    from loka.bench.quality.training import build, train
    from loka.bench.quality.training_job import TrainingJob

    job = TrainingJob(
        zoo.dlrm, zoo.dlrm_batches, lambda size, seed: list(islice(zoo.dlrm_test_batches(size, seed), 3)),
        zoo.click_loss, batch_size=512, steps=100, ema=0.95,
    )  # fmt: skip
    result = train(build(job, 0), job, seed=0)
    assert result.ne < 0.97
    assert result.auc > 0.65


def test_example_inputs_are_real_rows_of_any_batch_size() -> None:
    for batch in (0, 1, 17):
        dense, ids = zoo.ranker_inputs(batch)
        assert (dense.shape, ids.shape) == ((batch, DENSE), (batch, len(ROWS)))


@pytest.mark.parametrize(("batch_size", "seed"), [(0, 0), (-1, 0), (16, -1)])
def test_numbers_out_of_range_are_refused(batch_size: int, seed: int) -> None:
    with pytest.raises(InputError, match="at least"):
        zoo.ranker_batches(batch_size, seed)
