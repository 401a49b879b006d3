"""The study as a table, the rank correlation, and the harmful recipes that a prediction would call safe."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.ne_calibration.trained import NATIVE, Row

HARMFUL = 0.1  # per cent of NE


@dataclass(frozen=True, slots=True)
class Judged:
    """A recipe on one model: the change of NE in per cent, trained and predicted, both means over seeds."""

    model: str
    recipe: str
    seeds: int
    trained: float  # inf where a training diverged
    error: float  # standard error of `trained`
    predicted: float
    high: float  # upper end of its interval

    @property
    def significant(self) -> bool:
        """True if the trained change exceeds two standard errors."""
        return abs(self.trained) > 2 * self.error

    @property
    def harmful(self) -> bool:
        """True if training loses more than HARMFUL, beyond its noise."""
        return self.trained - 2 * self.error > 0 and self.trained > HARMFUL

    @property
    def called_safe(self) -> bool:
        """True if the prediction's upper end is within HARMFUL."""
        return self.high <= HARMFUL


def judged(rows: Sequence[Row]) -> list[Judged]:
    """One entry for each model and recipe that was trained and predicted.

    The noise of a training is that of all recipes of its model that lose less than HARMFUL on average, about their
    means over seeds: one recipe has too few seeds of its own. With one seed a recipe, it is their spread about zero.
    """
    trained, predicted = trained_changes(rows), _predicted(rows)
    noise = {model: _noise(by_recipe) for model, by_recipe in trained.items()}
    found = []
    for model, by_recipe in trained.items():
        for recipe, changes in by_recipe.items():
            known = predicted.get((model, recipe))
            if known:
                error = noise[model] / math.sqrt(len(changes))
                mean, high = (fmean(row[end] for row in known) for end in ("mean", "high"))
                found.append(Judged(model, recipe, len(changes), fmean(changes), error, mean, high))
    return found


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation, with mean ranks for ties; NaN for fewer than two values or where all are equal."""
    first, second = _ranks(a), _ranks(b)
    if len(first) < 2:
        return math.nan
    x, y = ([each - fmean(ranks) for each in ranks] for ranks in (first, second))
    scale = math.sqrt(math.fsum(each**2 for each in x) * math.fsum(each**2 for each in y))
    return math.fsum(p * q for p, q in zip(x, y, strict=True)) / scale if scale else math.nan


def markdown(command: str, rows: Sequence[Row]) -> str:
    """The tables, by model, with the correlation and the recipes that are called safe and harm."""
    found = judged(rows)
    lines = [f"Made by `{command}`.", ""]
    for model in dict.fromkeys(each.model for each in found):
        mine = sorted((each for each in found if each.model == model), key=lambda each: each.trained)
        lines += [f"## {model}", "", *_table(mine), "", *_summary(mine), ""]
    lines += ["## All", "", *_summary(found)]
    return "\n".join(lines) + "\n"


def _table(found: Sequence[Judged]) -> list[str]:
    head = ["| recipe | seeds | trained, % | +- | predicted, % | upper end | |", "|---|---|---|---|---|---|---|"]
    rows = []
    for each in found:
        note = "harmful, called safe" if each.harmful and each.called_safe else "harmful" if each.harmful else ""
        figures = f"{each.trained:+.3f} | {each.error:.3f} | {each.predicted:+.4f} | {each.high:.4f}"
        rows.append(f"| {each.recipe} | {each.seeds} | {figures} | {note} |")
    return head + rows


def _summary(found: Sequence[Judged]) -> list[str]:
    beyond = [each for each in found if each.significant]
    rank = spearman([each.predicted for each in beyond], [each.trained for each in beyond])
    harmful = [each for each in found if each.harmful]
    wrong = [f"{each.model}, {each.recipe}" for each in harmful if each.called_safe]
    return [
        f"Rank correlation over the {len(beyond)} of {len(found)} recipes beyond two standard errors: {rank:.3f}.",
        f"Harmful (beyond {HARMFUL:g} %): {len(harmful)}; of these called safe: {'; '.join(wrong) or 'none'}.",
    ]


def trained_changes(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """The changes of NE in per cent by model and recipe, a number for each seed."""
    ne = {(row["model"], row["seed"], row["recipe"]): row["ne"] for row in rows if row["kind"] == "trained"}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (model, seed, recipe), value in ne.items():
        native = ne.get((model, seed, NATIVE))
        if recipe != NATIVE and native is not None:
            found[model][recipe].append(math.inf if value is None else 100 * (value - native) / native)
    return found


def _predicted(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "predicted":
            found[row["model"], row["recipe"]].append(row)
    return found


def _noise(changes: Mapping[str, Sequence[float]]) -> float:
    """The standard deviation of one training's change of NE."""
    quiet = [each for each in changes.values() if fmean(each) < HARMFUL]
    degrees = sum(len(each) - 1 for each in quiet)
    if degrees:
        return math.sqrt(math.fsum((x - fmean(each)) ** 2 for each in quiet for x in each) / degrees)
    return math.sqrt(math.fsum(each[0] ** 2 for each in quiet) / len(quiet)) if quiet else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]
