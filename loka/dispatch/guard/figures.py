"""Figures of a check, gathered on the device, and what a guard finds by them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Figure:
    """Norms of one tensor in both runs. `norms`: of the difference and of the model's own, (2,) float64."""

    label: str
    norms: Tensor


@dataclass(frozen=True, slots=True)
class Norms:
    """L2 norms: of the difference that FP8 makes, and of the model's own; inf where a value is not finite."""

    apart: float
    own: float


def difference(label: str, found: Tensor, expected: Tensor) -> Figure:
    """The norms of `found - expected` and of `expected`; not finite where an element is not. Does not synchronise."""
    with torch.no_grad():
        apart = found.float() - expected.float()
        pair = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (apart, expected)]
        return Figure(label, torch.stack(pair))


def read(figures: Mapping[str, Sequence[Figure]]) -> dict[str, dict[str, Norms]]:
    """For each module and label the norms, those of several tensors together; waits for the device once."""
    flat = [figure.norms for each in figures.values() for figure in each]
    device = flat[0].device if flat else None
    norms = iter(torch.stack([pair.to(device) for pair in flat]).tolist() if flat else ())
    found = {}
    for name, each in figures.items():
        together: dict[str, list[tuple[float, float]]] = {}
        for figure in each:
            together.setdefault(figure.label, []).append(tuple(next(norms)))
        found[name] = {label: Norms(*map(_norm, zip(*pairs, strict=True))) for label, pairs in together.items()}
    return found


def _norm(values: Sequence[float]) -> float:
    return math.hypot(*values) if all(math.isfinite(value) for value in values) else math.inf


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
