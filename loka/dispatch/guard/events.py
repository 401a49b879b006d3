"""What a guard found, and what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Action = Literal["fell back", "returned", "not finite"]


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """One finding of a check. `str` of it is the line that is logged.

    Attributes:
        step: Calls of `Guard.step` before the one that found it.
        action: "fell back" or "returned", of a bound module; "not finite", of any layer: FP8 is not at fault, and
            nothing is changed.
        module: Qualified name, "" for the model itself; "the batch" or "the loss" where no layer made the value.
        sites: The patch's sites in the module.
        figure: What was compared: "output", "gradient of its input", "gradient of fmb.0.weight", ...
        value: Relative error; inf: not finite; nan: none.
        limit: Of the relative error; nan: none.
        reason: A sentence.
    """

    step: int
    action: Action
    module: str
    sites: tuple[str, ...]
    figure: str
    value: float
    limit: float
    reason: str

    def __str__(self) -> str:
        where = f"'{self.module}'" if self.module else "the model itself"
        sites = f" ({', '.join(self.sites)})" if self.sites and self.sites != (self.module,) else ""
        return f"guard: step {self.step}: {where}{sites} {self.action}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GuardReport:
    """The figures of one check, the largest over all ranks.

    Attributes:
        step: Calls of `Guard.step` before this one.
        loss: By the model's own GEMMs.
        loss_fp8: As the model trains at the moment.
        errors: For each bound module and each of its figures the norm of what FP8 changes over that of the model's own
            tensor; inf where FP8 alone is not finite.
    """

    step: int
    loss: float
    loss_fp8: float
    errors: Mapping[str, Mapping[str, float]]
