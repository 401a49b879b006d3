"""Probe's predictions for the recipes of the study, on the natively trained model and held-out batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache

from benchmarks.ne_calibration.recipes import StudyRecipe
from benchmarks.ne_calibration.trained import RowFile, StudyModel, fp8_sites, prepared
from loka.bench.quality.evaluation import held_out_of
from loka.bench.quality.training import build, train
from loka.numerics.enums import Gemm
from loka.probe.gemm_errors import Rounding, SiteRoundings
from loka.probe.profile.profile import Interval, sum_of_changes
from loka.probe.sensitivity import BackwardSensitivity, ForwardSensitivity, evaluating, ne_change

BATCHES = 4  # as `loka probe`


def predict_rows(
    model: StudyModel, seed: int, recipes: Iterable[StudyRecipe], file: RowFile, tell: Callable[[str], None]
) -> None:
    """Train natively and predict the change of NE by each recipe that the file lacks."""
    key = {"kind": "predicted", "model": model.name, "seed": seed}
    missing = [recipe for recipe in recipes if not file.has(**key, recipe=recipe.name)]
    if not missing:
        return
    job, examined = prepared(model)
    made = build(job, seed)
    held_out = held_out_of(job, made, examined.sites, seed, BATCHES)
    first_loss = held_out.mean_loss()
    train(made, job, seed)
    with evaluating(made):
        measured, backward = ForwardSensitivity(held_out), BackwardSensitivity(held_out, first_loss)
        forward = cache(lambda site, rounding: ne_change(measured.changes(rounding, site)[0])[0])
        for recipe in missing:
            change = _predicted(forward, backward, fp8_sites(examined), recipe)
            file.add(key | {"recipe": recipe.name, "mean": change.mean, "low": change.low, "high": change.high})
            tell(f"{model.name}, seed {seed}, {recipe.name}: predicted {change.mean:+.4f} %")


def _predicted(
    forward: Callable[[str, Rounding], Interval],
    backward: BackwardSensitivity,
    sites: tuple[str, ...],
    recipe: StudyRecipe,
) -> Interval:
    """The sum over sites of the forward GEMMs, each rounded alone as a plan has it, and the backward ones together.

    The backward GEMMs of each site alone would take many times as long; small misalignments add up.
    """
    changes = [Interval(0.0, 0.0, 0.0)]
    if Gemm.FPROP in recipe.roundings:
        changes += [forward(site, recipe.roundings[Gemm.FPROP]) for site in sites]
    behind: SiteRoundings = {gemm: rounding for gemm, rounding in recipe.roundings.items() if gemm is not Gemm.FPROP}
    if behind:
        changes.append(backward.change(dict.fromkeys(sites, behind)))
    found = sum_of_changes(changes)
    return found if math.isfinite(found.mean) else Interval(1e9, 1e9, 1e9)  # JSON has no infinity
