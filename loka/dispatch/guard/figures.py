"""Figures of a check: how far a tensor computed in FP8 is from the model's own, gathered on the device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
