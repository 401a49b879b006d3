"""Parts of a site's time, each the work of one kernel that is measured separately.

A site is M x K times K x N with the operations around it. In a CUDA graph its kernels run one after another, so that
its time is the sum of its parts': the GEMMs, the kernels that make their operands, and those of norms and activations.
Interactions, which are between sites, have their own parts: a forward and a backward each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class PartKind(StrEnum):
    """Work of one kernel on a matrix of (rows, columns)."""

    GEMM = "gemm"  # (rows, contraction) by (columns, contraction) transposed
    QUANTIZE = "quantize"  # from the model's dtype to FP8 and scales
    REQUANTIZE_TRANSPOSE = "turn"  # from FP8 to FP8 of (columns, rows) with one scale
    FORWARD = "forward"  # norm and activation
    BACKWARD = "backward"  # their gradients, with the sums for their parameters
    COPY = "copy"  # transposed in the model's dtype, or converted
    # Interactions, forward and gradients, with the names in recordings; rows are samples, columns an embedding's
    # dimension.
    FM_INTERACTION = "mix"
    FM_INTERACTION_BACKWARD = "mix-backward"
    CONCAT_NORM = "join"
    CONCAT_NORM_BACKWARD = "join-backward"
    DOT = "dot"
    DOT_BACKWARD = "dot-backward"


INTERACTIONS = (
    PartKind.FM_INTERACTION,
    PartKind.FM_INTERACTION_BACKWARD,
    PartKind.CONCAT_NORM,
    PartKind.CONCAT_NORM_BACKWARD,
    PartKind.DOT,
    PartKind.DOT_BACKWARD,
)
RENDERED, COMPILED = "rendered", "compiled"  # kernels of interactions: LoKA's own, torch.compile's


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One kernel's work, as the key of measurements."""

    work: PartKind
    kernel: str  # a GEMM's name in the catalogue ("torch.scaled_mm", "as-is"); otherwise RENDERED or COMPILED
    rows: int
    columns: int
    contraction: int = 0  # of a GEMM, else 0
    dtype: str = "bfloat16"  # of the model's activations and of a GEMM's result
    recipe: str = ""  # a GEMM: "e4m3 rowwise, e4m3 rowwise, precise"; others, the result: "e4m3 rowwise", "bfloat16"
    around: str = ""  # FORWARD and BACKWARD: "layer_norm silu"; an interaction: its form (`interaction_forms`)


class TimeSource(StrEnum):
    """Source of a time, from the surest to the least sure."""

    MEASURED = "measured"  # at exactly this part
    INTERPOLATED = "interpolated"  # between measured neighbours of the same kernel and recipe
    ESTIMATED = "estimated"  # from another kernel, norm, recipe or form, by bytes and FLOPs
    EXTRAPOLATED = "extrapolated"  # of the same kernel and recipe, beyond the measured sizes or far from them


def less_sure(first: TimeSource, second: TimeSource) -> TimeSource:
    """The source of a sum: that of its least certain part."""
    return max(first, second, key=tuple(TimeSource).index)


@dataclass(frozen=True, slots=True)
class PartTime:
    """A part's time in microseconds. `spread`, a share of it, is the likely deviation of another measurement."""

    us: float
    spread: float
    source: TimeSource


class PartCosts(Protocol):
    """Times of parts on the target, and the errors of GEMMs."""

    def time(self, part: Part) -> PartTime | None:
        """A part's time; None where nothing of its kernel and recipe was ever measured."""
        ...

    def error(self, part: Part) -> tuple[float, float] | None:
        """MERE and SQNR (dB) of a GEMM's kernel and recipe; None where unknown."""
        return None

    def wrong_reason(self, part: Part) -> str:
        """Why a kernel's results were wrong, or ""."""
        return ""
