"""Comparisons over paired seeds and draws, and the file that keeps their pairs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from loka.bench.quality.compare_quality import Quality, QualityVerdict, compare
from loka.bench.quality.pair_file import PairFile, RunFacts
from loka.bench.quality.training import PairResult, TrainResult, build, train_pair
from loka.bench.quality.training_job import TrainingJob
from loka.errors import InputError

FACTS = RunFacts("plan", "cpu")
BASE = TrainResult(0.8, 0.75, 0.5, 1.0, 1, 1, 1.0, (0.5,))


def pairs(*percent: float, draws: int = 1) -> tuple[PairResult, ...]:
    """Pairs whose NE differs by so many percent."""
    return tuple(
        PairResult(i // draws, BASE, replace(BASE, ne=0.8 * (1 + p / 100)), "", i % draws)
        for i, p in enumerate(percent)
    )


def test_a_model_has_learned_where_its_own_ne_is_below_1() -> None:
    assert Quality(pairs(30.0, 30.0), planned=2).learned
    flat = replace(BASE, ne=1.0)
    assert not Quality(tuple(PairResult(seed, flat, BASE, "") for seed in range(2)), planned=2).learned


def test_mean_error_and_interval() -> None:
    quality = Quality(pairs(0.01, 0.03, 0.02, 0.05, -0.01), planned=5, budget_percent=0.05)
    assert quality.mean == pytest.approx(0.02)
    assert quality.standard_error == pytest.approx(0.01)
    low, high = quality.interval or (0, 0)
    assert (low, high) == (pytest.approx(0.02 - 0.02776, abs=1e-5), pytest.approx(0.02 + 0.02776, abs=1e-5))
    assert quality.upper_bound == pytest.approx(0.02 + 0.02132, abs=1e-5)
    assert quality.draw_spread is None


def test_draws_of_a_seed_count_once() -> None:
    quality = Quality(pairs(0.00, 0.02, 0.05, 0.07, draws=2), planned=2)
    assert quality.differences == (pytest.approx(0.01), pytest.approx(0.06))
    as_is, patched = quality.draw_spread or (1.0, 1.0)
    assert as_is == 0
    assert patched == pytest.approx(0.02 / 2**0.5)  # the standard deviation of two values 0.02 apart


def test_compare_ends_as_soon_as_a_look_decides() -> None:
    worse = pairs(*[0.3, 0.31, 0.29, 0.3] * 8)
    taken = list(compare(iter(worse), planned=32))
    assert len(taken) == 8
    assert taken[-1].verdict is QualityVerdict.LOST
    assert len(list(compare(iter(worse), planned=32, early=False))) == 32


def test_compare_looks_at_whole_seeds_alone() -> None:
    taken = list(compare(iter(pairs(0.0, 0.1, 0.2, 0.3, draws=2)), planned=2, draws=2))
    assert [len(quality.pairs) for quality in taken] == [2, 4]


def test_compare_of_trained_pairs_finds_a_ruined_model_out(job: TrainingJob) -> None:
    def ruin(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        next(reversed(list(model.parameters()))).requires_grad_(True)  # the last bias alone still trains
        return model

    def trained(patch):
        return (train_pair(job, patch, seed) for seed in range(4))

    *_, ruined = compare(trained(ruin), planned=4)
    assert ruined.verdict is QualityVerdict.LOST
    *_, equal = compare(trained(lambda model: model), planned=4)
    assert equal.verdict is QualityVerdict.PARITY
    assert equal.worst.mean == 0


def test_draws_start_a_millionth_apart_and_both_runs_from_the_same_weights(job: TrainingJob) -> None:
    exact = weights(build(job, 5))
    for draw in (0, 1, 2):
        seen: list[dict[str, torch.Tensor]] = []
        pair = train_pair(job, lambda model, seen=seen: seen.append(weights(model)), 5, draw=draw)
        assert pair.draw == draw
        assert pair.as_is.ne == pair.patched.ne
        changes = [
            float(((value - exact[name]).abs() / exact[name].abs().clamp_min(1e-3)).max())
            for name, value in seen[0].items()
        ]
        assert max(changes) == 0 if draw == 0 else 1e-7 < max(changes) < 1e-5


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def test_bfloat16_weights_are_jittered_by_their_last_place(job: TrainingJob) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    made = replace(job, factory=lambda: job.factory().to(torch.bfloat16), steps=1, batches=in_bfloat16(job.batches))
    made = replace(made, test_batches=in_bfloat16(job.test_batches))
    for draw in (0, 1):
        train_pair(made, lambda model: seen.append(weights(model)), 0, draw=draw)
    assert any(not torch.equal(seen[0][name], seen[1][name]) for name in seen[0])


def in_bfloat16(batches):
    def cast(batch_size, seed):
        return [((x.bfloat16(),), click.bfloat16()) for (x,), click in batches(batch_size, seed)]

    return cast


def test_a_file_gives_back_what_was_added_and_drops_a_line_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "pairs.jsonl"
    first, second = pairs(0.1, 0.2, draws=2)
    file = PairFile(path, "one", FACTS)
    file.add(first)
    file.add(second)
    odd = ["3", "[]", '{"seed": 1, "draw": 0, "as_is": "x"}', '{"seed": 9, "draw": 0, "as_is": {"ne": 0.']  # cut off
    path.write_text(path.read_text() + "\n".join(odd))
    again = PairFile(path, "one", FACTS)
    assert (len(again), again.get(0, 0), again.get(0, 1), again.get(9, 0)) == (2, first, second, None)
    for seed in (9, 10):  # written anew, then appended
        again.add(replace(pairs(0.3)[0], seed=seed))
    assert [json.loads(line).get("seed") for line in path.read_text().splitlines()] == [None, 0, 0, 9, 10]


def test_a_file_of_another_comparison_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    PairFile(path, "one", FACTS).add(pairs(0.1)[0])
    with pytest.raises(InputError, match="another comparison"):
        PairFile(path, "two", FACTS)
    assert len(PairFile(path, "one", FACTS)) == 1
    with pytest.raises(InputError, match=r"cannot be used for pairs \(Is a directory\)"):
        PairFile(tmp_path, "one", FACTS)
    with pytest.raises(InputError, match="cannot be written"):
        PairFile(path / "below", "one", FACTS).add(pairs(0.1)[0])
    for earlier in (1, 2):
        path.write_text(f'{{"loka_compare": {earlier}, "comparison": "one"}}\n')
        with pytest.raises(InputError, match=r"holds pairs of an earlier LoKA.*run loka compare again"):
            PairFile(path, "one", FACTS)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot be used for pairs"):
        PairFile(path, "one", FACTS)
