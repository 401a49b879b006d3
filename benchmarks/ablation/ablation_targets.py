"""Speed targets of the mods, judged by an ablation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.ablation.rows_columns import NONE, AblationRow, Column
from loka.mods.registry import paper_mods

FACTORY = "loka.zoo:wukong_small"  # the targets are for this model on an H100

Time = Callable[[str, Column, str], float | None]  # (row, column, mode) -> median microseconds


@dataclass(frozen=True, slots=True)
class SpeedTarget:
    """A least ratio of two times: `over` divided by `column`, in `mode`.

    `over` is a column of the same row, or of the row without mods (`of_no_mods`).
    """

    title: str
    mode: str
    column: Column
    over: Column
    of_no_mods: bool
    least: float
    exact: bool = False  # for the exact mods alone rather than the paper's three


TARGETS = (
    SpeedTarget("one training step in BF16, our kernels, over torch.compile's BF16 without mods", "train", Column.OURS,
           Column.COMPILED, True, 1.45),
    SpeedTarget("one training step in FP8 over torch.compile's BF16 without mods", "train", Column.FP8,
           Column.COMPILED, True, 1.75),
    SpeedTarget("one training step in FP8 over ours in BF16 with the same mods", "train", Column.FP8,
           Column.OURS, False, 1.20),
    SpeedTarget("one inference in FP8 over torch.compile's BF16 with the same mods", "infer", Column.FP8,
           Column.COMPILED, False, 1.45),
    SpeedTarget("one training step in BF16, exact mods alone, over torch.compile's BF16 without mods", "train",
           Column.OURS, Column.COMPILED, True, 1.20, exact=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JudgedTarget:
    """A target and its measured ratio in one row of the ablation."""

    target: SpeedTarget
    row: str
    ratio: float | None  # None if one of the two times is missing

    @property
    def verdict(self) -> str:
        """reached, missed, or not measured."""
        if self.ratio is None:
            return "not measured"
        return "reached" if self.ratio >= self.target.least else "missed"


def judged(rows: Sequence[AblationRow], exact: frozenset[str], time: Time) -> tuple[JudgedTarget, ...]:
    """The targets judged in each row they apply to: the paper's mods, with or without exact mods.

    Targets with `exact` apply to the row of all exact mods. `exact`: the exact mods of the policy.
    """
    found, paper = [], frozenset(paper_mods())
    for target in TARGETS:
        for row in rows:
            mods = frozenset(row.mods)
            fits = bool(mods) and mods == exact if target.exact else paper <= mods <= paper | exact
            if fits:
                one = time(row.name, target.column, target.mode)
                other = time(NONE if target.of_no_mods else row.name, target.over, target.mode)
                found.append(JudgedTarget(target, row.name, other / one if one and other else None))
    return tuple(found)
