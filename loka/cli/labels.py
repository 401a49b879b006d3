"""Labels of the two models that `loka train` and `loka compare` compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loka.errors import InputError

if TYPE_CHECKING:
    from loka.plan.plan import Plan

AGAINST = ("model", "original")


@dataclass(frozen=True, slots=True)
class ComparisonLabels:
    """Labels of both runs: in columns, in progress, and in sentences."""

    first: str  # in a column
    second: str
    running: str  # of the second, while it trains: "in FP8"
    of: str  # of the first, in a sentence: "the model as it is"

    @property
    def by_run(self) -> dict[str, str]:
        """The training loop's name of a run -> label."""
        return {"as it is": self.first, "patched": self.running}


AS_IS = ComparisonLabels("as it is", "FP8", "in FP8", "the model as it is")
ADAPTED = ComparisonLabels("with mods", "with mods, FP8", "with mods, in FP8", "the model with its mods")
ORIGINAL = ComparisonLabels("original", "with mods", "with mods", "the original")


def comparison_labels(plan: Plan, against: str = AGAINST[0]) -> ComparisonLabels:
    """The labels of a plan's comparison: FP8 against the same model, or the adapted model against the original.

    Raises InputError for another `against`, and for "original" if no mod of the plan changes modules.
    """
    if against not in AGAINST:
        raise InputError(f"--against is {against!r}, but must be one of {', '.join(AGAINST)}")
    if against == AGAINST[0]:
        return ADAPTED if plan.adaptations else AS_IS
    if not plan.adaptations:
        raise InputError(
            f"--against original: no mod of {plan.name} changes modules of the model, so that it is the original; "
            "leave the option out"
        )
    return ORIGINAL
