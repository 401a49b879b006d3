"""What a site's time is made of: parts, each the work of one kernel, that are measured on their own.

A site is M x K times K x N with what stands around it. In a CUDA graph its kernels run one after another, so that its
time is the sum of its parts': the GEMMs, the kernels that make their operands, and those of norms and activations.
Interactions, which stand between sites, have parts of their own: a forward and a backward each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class PartKind(StrEnum):
    """What one kernel does with a matrix of (rows, columns)."""

    GEMM = "gemm"  # (rows, contraction) by (columns, contraction) transposed
    QUANTISE = "quantise"  # from the model's dtype to FP8 and scales
    REQUANTIZE_TRANSPOSE = "turn"  # from FP8 to FP8 of (columns, rows) under one scale
    FORWARD = "forward"  # norm and activation
    BACKWARD = "backward"  # their gradient, with the sums for their parameters
    COPY = "copy"  # transposed in the model's dtype, or converted
    # Interactions, forward and gradients, by the names that recordings hold; rows are samples (of a cross layer: rows),
    # columns an embedding's dimension (of a cross layer: its width).
    FM_INTERACTION = "mix"
    FM_INTERACTION_BACKWARD = "mix-backward"
    CONCAT_NORM = "join"
    CONCAT_NORM_BACKWARD = "join-backward"
    CROSS = "cross"
    CROSS_BACKWARD = "cross-backward"


INTERACTIONS = (
    PartKind.FM_INTERACTION,
    PartKind.FM_INTERACTION_BACKWARD,
    PartKind.CONCAT_NORM,
    PartKind.CONCAT_NORM_BACKWARD,
    PartKind.CROSS,
    PartKind.CROSS_BACKWARD,
)
RENDERED, COMPILED = "rendered", "compiled"  # kernels of interactions: our own, torch.compile's


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One kernel's work, as it is measured and looked up. All of it is in the key."""

    work: PartKind
    kernel: str  # a GEMM's by its name in the catalogue ("torch.scaled_mm", "as-is"); of others RENDERED or COMPILED
    rows: int
    columns: int
    contraction: int = 0  # of a GEMM, else 0
    dtype: str = "bfloat16"  # of the model's activations and of what a GEMM writes
    recipe: str = ""  # a GEMM: "e4m3 rowwise, e4m3 rowwise, precise"; else what is written: "e4m3 rowwise", "bfloat16"
    around: str = ""  # of FORWARD and BACKWARD: "layer_norm silu"; of an interaction its form (`interaction_forms`)


class TimeSource(StrEnum):
    """Where a time comes from."""

    MEASURED = "measured"  # at exactly this part
    INTERPOLATED = "interpolated"  # between measured neighbours of the same kernel and recipe
    ESTIMATED = "estimated"  # outside of what was measured: from bytes and FLOPs


@dataclass(frozen=True, slots=True)
class PartTime:
    """A part's time in microseconds. `spread`, a share of it, is how far another measurement may well be off."""

    us: float
    spread: float
    source: TimeSource


class PartCosts(Protocol):
    """Something that knows what parts cost on the target."""

    def time(self, part: Part) -> PartTime | None:
        """A part's time; None where nothing of its kernel and recipe was ever measured."""
        ...
