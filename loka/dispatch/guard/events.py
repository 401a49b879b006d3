"""What a guard found, and what it did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class GuardAction(StrEnum):
    """What became of a module."""

    FELL_BACK = "fell back"
    RETURNED = "returned"
    NOT_FINITE = "not finite"  # not by FP8: nothing is changed


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """One finding of a check."""

    step: int  # calls of `Guard.step` before the one that found it
    action: GuardAction
    module: str  # qualified name, "" is the model itself; of any layer, "the batch" or "the loss" if not finite
    sites: tuple[str, ...]  # the patch's sites in it
    figure: str  # what was compared: "output", "gradient of fmb.0.weight", ...
    value: float  # relative error; inf: not finite; nan: no figure
    limit: float
    reason: str

    def __str__(self) -> str:
        where = f"'{self.module}'" if self.module else "the model itself"
        sites = f" ({', '.join(self.sites)})" if self.sites and self.sites != (self.module,) else ""
        return f"guard: step {self.step}: {where}{sites} {self.action}: {self.reason}"


@dataclass(frozen=True, slots=True)
class GuardReport:
    """The figures of one check, over all ranks."""

    step: int
    loss: float  # by the model's own GEMMs
    loss_fp8: float
    errors: Mapping[str, Mapping[str, float]]  # by module, then by what was compared: relative errors
