"""MSLK's CUTLASS GEMM with rowwise scales (`cutlass_rowwise`); MSLK is the successor of FBGEMM GenAI."""

from __future__ import annotations

from loka.kernels.gemm.cutlass_rowwise import CAPABILITY, CutlassRowwise, define_operator
from loka.kernels.gemm.library import Library

LIBRARY = Library(
    name="MSLK",
    distributions=("mslk", "mslk-cuda", "mslk-cuda-nightly"),
    oldest=(1, 1),
    install="pip install mslk-cuda",
    module="mslk.gemm",
    operator="mslk::f8f8bf16_rowwise",
    capability=CAPABILITY,
)
ROWWISE = CutlassRowwise("mslk.rowwise", "loka::mslk_rowwise_mm", LIBRARY)

define_operator(ROWWISE)
