"""Devices that nothing was measured on, by the vendors' figures: other Hopper GPUs, Blackwell, and AMD's CDNA 3 and 4.

The figures were not read off the data sheets that entries name, but taken from what is published of them: peaks and
bandwidths of H20, B200 and GB200 agree with two sources, the 148 and 152 multiprocessors of the latter two with what
several programs saw on them. Compare an entry with its sheet before a bound is relied on.

Peaks are without sparsity. What `scaled_mm` takes is by torch's own checks (aten/src/ATen/native/cuda/ScaledBlas.cpp).
Launches and the host's costs are those of Hopper, on which they were measured; a recording checks every kernel's
results before it times them, and its times are all that a plan then goes by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from loka.devices.hopper import H100, H200
from loka.devices.spec import ScaledMMLimits

_MIB, _TERA = 2**20, 1e12


def _peaks(e4m3: float, half: float, float32: float) -> Mapping[str, float]:
    """Peaks in TFLOP/s: of FP8 with either accumulation, of both 16-bit types, and of float32 (TF32 where it is)."""
    flops = {"e4m3": e4m3, "e4m3 fast": e4m3, "bfloat16": half, "float16": half, "float32": float32}
    return {dtype: each * _TERA for dtype, each in flops.items()}


H100_PCIE = replace(
    H100,
    name="h100-pcie",
    title="H100 PCIe",
    pattern="H100 PCIe",
    multiprocessors=114,
    measured_on="",
    data_sheet="NVIDIA H100 Tensor Core GPU data sheet, PCIe",
    bandwidth=2.0 * _TERA,
    interaction_bandwidth=2.0 * _TERA,
    flops=_peaks(1513, 756, 378),
)
H20 = replace(
    H100,
    name="h20",
    title="H20",
    pattern="H20(?!-3e)",  # that has other memory
    multiprocessors=78,
    l2_bytes=60 * _MIB,
    measured_on="",
    data_sheet="NVIDIA H20 GPU data sheet",
    bandwidth=4.0 * _TERA,
    interaction_bandwidth=4.0 * _TERA,
    flops=_peaks(296, 148, 74),
)

_TENSORWISE_AND_ROWWISE = ScaledMMLimits(
    pairs=frozenset({("tensorwise", "tensorwise"), ("rowwise", "rowwise")}),
    precise_e4m3=frozenset(),
    rounded=frozenset({"rowwise"}),
)
_AND_MXFP8 = replace(
    _TENSORWISE_AND_ROWWISE,
    pairs=_TENSORWISE_AND_ROWWISE.pairs | {("blockwise_1x32", "blockwise_1x32")},
    precise_e4m3=frozenset({"blockwise_1x32"}),
    alignment={"blockwise_1x32": 32},
)
B200 = replace(
    H200,
    name="b200",
    title="B200",
    pattern="B200",
    architecture="Blackwell",
    capability=(10, 0),
    triton=("cuda", 100, 32),
    multiprocessors=148,
    l2_bytes=126 * _MIB,
    measured_on="",
    data_sheet="NVIDIA DGX B200 data sheet, an eighth of it",
    bandwidth=8.0 * _TERA,
    interaction_bandwidth=8.0 * _TERA,
    flops=_peaks(4500, 2250, 1100),
    scaled_mm=_AND_MXFP8,
)
GB200 = replace(
    B200,
    name="gb200",
    title="GB200",
    pattern="GB200",
    multiprocessors=152,
    data_sheet="NVIDIA GB200 NVL72 data sheet, a seventy-second of it",
    flops=_peaks(5000, 2500, 1250),
)
MI300X = replace(
    H200,
    name="mi300x",
    title="MI300X",
    pattern="MI300X",
    architecture="CDNA 3",
    capability=(9, 4),
    triton=("hip", "gfx942", 64),
    multiprocessors=304,
    shared_bytes=64 * 1024,
    l2_bytes=256 * _MIB,  # the Infinity Cache: each of eight L2 caches has 4 MiB
    measured_on="",
    data_sheet="AMD Instinct MI300X accelerator data sheet",
    bandwidth=5.3 * _TERA,
    interaction_bandwidth=5.3 * _TERA,
    flops=_peaks(2614.9, 1307.4, 653.7),
    scaled_mm=replace(_TENSORWISE_AND_ROWWISE, e4m3="e4m3fnuz"),
)
MI350X = replace(
    MI300X,
    name="mi350x",
    title="MI350X",
    pattern="MI350X",
    architecture="CDNA 4",
    capability=(9, 5),
    triton=("hip", "gfx950", 64),
    multiprocessors=256,
    shared_bytes=160 * 1024,
    data_sheet="AMD Instinct MI350X GPU data sheet",
    bandwidth=8.0 * _TERA,
    interaction_bandwidth=8.0 * _TERA,
    flops=_peaks(4600, 2300, 144.2),
    scaled_mm=replace(
        _AND_MXFP8,
        row_alignment={"blockwise_1x32": 32},
        rounded=frozenset({"rowwise", "blockwise_1x32"}),
        swizzled=False,  # by torch built for ROCm below 7.14; a later one takes another layout, and refuses this one
    ),
)
