"""What generated code imports: binding it to a live model, checking that it ran, and taking it off again."""

from __future__ import annotations

from loka.dispatch.adapted import adapt
from loka.dispatch.bind import apply
from loka.dispatch.binding import Binding
from loka.dispatch.bound import Bound, Tickets
from loka.dispatch.errors import (
    BindError,
    FrozenWeightError,
    LokaWarning,
    NewModelWarning,
    NonFiniteError,
    VerifyError,
)
from loka.dispatch.known import KnownScale, Overflow
from loka.dispatch.patch import Patch, patch_of
from loka.dispatch.precision import joined_dtype, output_dtype, summed_dtype
from loka.dispatch.saved import saved_tensors
from loka.dispatch.shapes import rows
from loka.dispatch.stamps import check_stamps
from loka.kernels.by_rows import mm_by_columns, mm_by_rows
from loka.kernels.scaled_mm import scaled_mm
from loka.mods.adapt import ConvertError, convert
from loka.mods.adaptation import Adaptation
from loka.sites.counted import counted
from loka.sites.reads import Reads

__all__ = [
    "Adaptation",
    "BindError",
    "Binding",
    "Bound",
    "ConvertError",
    "FrozenWeightError",
    "KnownScale",
    "LokaWarning",
    "NewModelWarning",
    "NonFiniteError",
    "Overflow",
    "Patch",
    "Reads",
    "Tickets",
    "VerifyError",
    "adapt",
    "apply",
    "check_stamps",
    "convert",
    "counted",
    "joined_dtype",
    "mm_by_columns",
    "mm_by_rows",
    "output_dtype",
    "patch_of",
    "rows",
    "saved_tensors",
    "scaled_mm",
    "summed_dtype",
]
