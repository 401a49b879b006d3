"""Runtime of generated code: bind it to a live model, verify that it ran, and remove it again."""

from __future__ import annotations

from loka.dispatch.bind.adapt_model import adapt
from loka.dispatch.bind.apply import apply
from loka.dispatch.bind.bound import Binding, Bound, CallCounters
from loka.dispatch.bind.stamps import check_stamps
from loka.dispatch.dispatch_errors import (
    BindError,
    DtypeError,
    FrozenWeightError,
    LokaWarning,
    NewModelWarning,
    NonFiniteError,
    VerifyError,
)
from loka.dispatch.interactions import concat_norm, dot_interaction, fm_interaction
from loka.dispatch.patch import Patch, patch_of
from loka.dispatch.runtime import Weight, linear, output_dtype
from loka.dispatch.static_scales import Overflow, StaticScale
from loka.graph.fingerprint import Fingerprint, PlannedCall
from loka.kernels.gemm.m_buckets import mm_by_k_bucket, mm_by_m_bucket
from loka.kernels.gemm.scaled_mm import scaled_mm
from loka.mods.adapt import ConvertError, convert
from loka.mods.adaptation import Adaptation

__all__ = [
    "Adaptation",
    "BindError",
    "Binding",
    "Bound",
    "CallCounters",
    "ConvertError",
    "DtypeError",
    "Fingerprint",
    "FrozenWeightError",
    "LokaWarning",
    "NewModelWarning",
    "NonFiniteError",
    "Overflow",
    "Patch",
    "PlannedCall",
    "StaticScale",
    "VerifyError",
    "Weight",
    "adapt",
    "apply",
    "check_stamps",
    "concat_norm",
    "convert",
    "dot_interaction",
    "fm_interaction",
    "linear",
    "mm_by_k_bucket",
    "mm_by_m_bucket",
    "output_dtype",
    "patch_of",
    "scaled_mm",
]
