"""Student's t over paired seeds, and the verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from loka.bench.quality.compare_quality import Quality, QualityVerdict, compare, t_quantile, t_within
from loka.bench.quality.training import PairResult, TrainResult
from loka.bench.quality.training_job import TrainingJob


def pairs(*percent: float) -> tuple[PairResult, ...]:
    """Pairs whose NE differs by so many percent."""
    base = TrainResult(0.8, 0.75, 0.5, 1.0, 1, 1, 1.0, (0.5,))
    return tuple(PairResult(i, base, replace(base, ne=0.8 * (1 + p / 100))) for i, p in enumerate(percent))


# two-sided 95 % and 99 % points, as every table of Student's t has them
@pytest.mark.parametrize(
    ("confidence", "freedom", "expected"),
    [(0.95, 1, 12.706), (0.95, 2, 4.303), (0.95, 3, 3.182), (0.95, 4, 2.776), (0.95, 9, 2.262), (0.95, 30, 2.042),
     (0.99, 1, 63.657), (0.99, 4, 4.604), (0.99, 10, 3.169)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(confidence: float, freedom: int, expected: float) -> None:
    assert t_quantile(confidence, freedom) == pytest.approx(expected, abs=6e-4)


def test_many_degrees_of_freedom_approach_the_normal_distribution() -> None:
    assert t_within(1.959964, 5000) == pytest.approx(0.95, abs=1e-4)


def test_mean_error_and_interval() -> None:
    quality = Quality(pairs(0.01, 0.03, 0.02, 0.05, -0.01), budget_percent=0.05)
    assert quality.mean == pytest.approx(0.02)
    assert quality.standard_error == pytest.approx(0.01)
    low, high = quality.interval or (0, 0)
    assert (low, high) == (pytest.approx(0.02 - 0.02776, abs=1e-5), pytest.approx(0.02 + 0.02776, abs=1e-5))


@pytest.mark.parametrize(
    ("percent", "verdict"),
    [
        ((0.010, 0.011, 0.012), QualityVerdict.WITHIN_BUDGET),  # told apart from zero, yet within what was allowed
        ((-0.5, -0.51, -0.52), QualityVerdict.WITHIN_BUDGET),  # better
        ((0.30, 0.31, 0.29), QualityVerdict.TOLD_APART),
        ((0.04, 0.05, 0.06), QualityVerdict.TOLD_APART),  # worse, and not shown to be within the budget
        ((-0.2, 0.3, 0.1), QualityVerdict.UNDECIDED),
        ((0.0,), QualityVerdict.UNDECIDED),
    ],
)
def test_verdicts(percent: tuple[float, ...], verdict: QualityVerdict) -> None:
    assert Quality(pairs(*percent), budget_percent=0.05).verdict is verdict


def test_a_single_seed_has_no_interval() -> None:
    quality = Quality(pairs(0.1), 0.05)
    assert (quality.standard_error, quality.interval) == (None, None)


def test_compare_trains_a_pair_for_each_seed_and_tells_a_ruined_model_apart(job: TrainingJob) -> None:
    def ruin(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        next(reversed(list(model.parameters()))).requires_grad_(True)  # the last bias alone still trains
        return model

    seen: list[tuple[int, str]] = []
    checked: list[object] = []
    finished: list[PairResult] = []
    quality = compare(
        job, ruin, (0, 1, 2), progress=lambda seed, label, done, total: seen.append((seed, label)),
        check=checked.append, finished=finished.append,
    )  # fmt: skip
    assert [pair.seed for pair in quality.pairs] == [0, 1, 2]
    assert quality.verdict is QualityVerdict.TOLD_APART
    assert set(seen) == {(seed, label) for seed in (0, 1, 2) for label in ("as it is", "patched")}
    assert len(checked) == 3
    assert tuple(finished) == quality.pairs


def test_compare_of_equal_models_is_within_budget(job: TrainingJob) -> None:
    def exact(model: nn.Module) -> torch.nn.Module:
        return model

    assert compare(job, exact, (0, 1)).verdict is QualityVerdict.WITHIN_BUDGET


def test_no_seed_is_an_error(job: TrainingJob) -> None:
    with pytest.raises(ValueError, match="at least one seed"):
        compare(job, lambda model: None, ())
