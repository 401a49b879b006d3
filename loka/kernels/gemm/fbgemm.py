"""FBGEMM GenAI's CUTLASS GEMM with rowwise scales (`cutlass_rowwise`): the extra `fbgemm`."""

from __future__ import annotations

from loka.kernels.gemm.cutlass_rowwise import CAPABILITY, CutlassRowwise, define_operator
from loka.kernels.gemm.library import Library

LIBRARY = Library(
    name="FBGEMM GenAI",
    distributions=("fbgemm-gpu-genai", "fbgemm-gpu-genai-nightly"),
    oldest=(1, 6),
    install="pip install 'loka[fbgemm]'",
    module="fbgemm_gpu.experimental.gen_ai",
    operator="fbgemm::f8f8bf16_rowwise",
    capability=CAPABILITY,
)
ROWWISE = CutlassRowwise("fbgemm.rowwise", "loka::fbgemm_rowwise_mm", LIBRARY)

define_operator(ROWWISE)
