"""The study of predicted and trained changes of NE: its recipes, what it resumes, and what its report says."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks.ne_calibration import predicted, trained
from benchmarks.ne_calibration.__main__ import main
from benchmarks.ne_calibration.recipes import few_bits, ranged, recipes
from benchmarks.ne_calibration.report import judged, markdown, spearman
from benchmarks.ne_calibration.trained import MODELS, NATIVE, RowFile, StudyModel
from loka.numerics.enums import Gemm
from loka.numerics.quantize import fake_quantize
from loka.numerics.recipe import OperandRecipe


def test_there_are_thirty_recipes_and_every_gemm_is_rounded_by_some():
    made = recipes()
    assert len({recipe.name for recipe in made}) == len(made) == 30
    assert {gemm for recipe in made for gemm in recipe.roundings} == set(Gemm)


def test_three_mantissa_bits_are_e4m3_and_fewer_are_coarser():
    torch.manual_seed(0)
    x = torch.randn(16, 200)
    x[3] = 0.0
    rows = OperandRecipe(power_of_two=True)
    assert torch.equal(few_bits(x, 3), fake_quantize(x, rows))
    errors = [float((few_bits(x, bits) - x).square().mean()) for bits in (3, 2, 1, 0)]
    assert errors == sorted(errors)
    assert set(few_bits(x, 0).abs().log2()[x != 0].frac().unique().tolist()) == {0.0}


def test_a_range_saturates_below_one_and_loses_small_values_above():
    x = torch.tensor([[1.0, -4.0, 0.01, 8.0]])
    assert ranged(x, 0.25).abs().max() == 2.0
    assert ranged(x, 2.0**14)[0, 2] == 0.0
    torch.testing.assert_close(ranged(x, 1.0), x, rtol=0.07, atol=0.0)


def rows(model: str, changes: dict[str, list[float]], predictions: dict[str, float]) -> list[dict]:
    made = [
        {"kind": "trained", "model": model, "seed": seed, "recipe": recipe, "ne": 0.8 * (1 + change / 100)}
        for recipe, each in changes.items()
        for seed, change in enumerate(each)
    ]
    made += [{"kind": "trained", "model": model, "seed": seed, "recipe": NATIVE, "ne": 0.8} for seed in range(2)]
    return made + [
        {"kind": "predicted", "model": model, "seed": 0, "recipe": recipe, "mean": mean, "low": 0.0, "high": 1.5 * mean}
        for recipe, mean in predictions.items()
    ]


def test_the_report_ranks_and_names_what_harms_and_is_called_safe():
    changes = {"quiet": [0.02, -0.02], "some": [0.3, 0.34], "more": [1.0, 1.1], "much": [5.0, 5.5]}
    made = rows("m", changes, {"quiet": 0.01, "some": 0.05, "more": 3, "much": 2})
    found = {each.recipe: each for each in judged(made)}
    assert found["quiet"].error == pytest.approx(0.02)  # sqrt(0.0008) / sqrt(2)
    assert not found["quiet"].significant
    assert found["some"].harmful
    assert found["some"].called_safe
    assert not found["much"].called_safe
    text = markdown("made up", made)
    assert "over the 3 of 4 recipes beyond two standard errors: 0.500." in text
    assert "Harmful (beyond 0.1 %): 3; of these called safe: m, some." in text


def test_ranks_of_ties_are_their_mean():
    assert spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert math.isnan(spearman([1.0], [1.0]))


@pytest.mark.slow
def test_a_study_goes_on_where_it_was(tmp_path: Path, monkeypatch, capsys):
    tiny = StudyModel("tiny", MODELS["dlrm_dcnv2"].policy, steps=3, batch_size=64)
    monkeypatch.setattr(trained, "MODELS", {"tiny": tiny})
    monkeypatch.setattr("benchmarks.ne_calibration.__main__.MODELS", {"tiny": tiny})
    monkeypatch.setattr(predicted, "BATCHES", 2)
    monkeypatch.setattr("loka.bench.quality.evaluation.ROWS", 64)
    monkeypatch.setattr("loka.zoo.TEST_SAMPLES", 512)
    file = tmp_path / "rows.jsonl"
    wanted = ("--seeds", "1", "--recipe", "fprop: 0 mantissa bits")
    assert main([str(file), *wanted]) == 0
    first = RowFile(file).rows
    assert {(row["kind"], row["recipe"]) for row in first} == {
        ("predicted", "fprop: 0 mantissa bits"),
        ("trained", "fprop: 0 mantissa bits"),
        ("trained", NATIVE),
    }
    assert main([str(file), *wanted, "--recipe", "wgrad: clipped at 0.05 amax"]) == 0
    again = RowFile(file).rows
    assert again[:3] == first
    assert len(again) == 5
    assert "| wgrad: clipped at 0.05 amax | 1 |" in capsys.readouterr().out
