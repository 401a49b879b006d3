"""Measured properties and launch parameters of the H100 and the H200."""

from __future__ import annotations

from dataclasses import replace

from loka.devices.spec import (
    ConcatNormLaunch,
    DeviceSpec,
    DotLaunch,
    Execution,
    FmInteractionLaunch,
    FmLaunch,
    FusedCastLaunch,
    HostCosts,
    LaunchTables,
    ReduceLaunch,
    RowLaunch,
    RowLaunches,
    ScaledMMLimits,
    SquareLaunch,
    WeightsLaunch,
    WideLaunch,
)

_SCALED_MM = ScaledMMLimits(
    pairs=frozenset(
        {
            ("tensorwise", "tensorwise"),
            ("rowwise", "rowwise"),
            ("blockwise_1x128", "blockwise_1x128"),
            ("blockwise_1x128", "blockwise_128x128"),
            ("blockwise_128x128", "blockwise_1x128"),
        }
    ),
    precise_e4m3=frozenset({"blockwise_1x128", "blockwise_128x128"}),
    row_alignment={"blockwise_1x128": 4},  # scales are read in vectors of 16 bytes
)

_FORWARD = {
    512: RowLaunch(rows=1, warps=1, programs=32),
    1024: RowLaunch(rows=1, warps=1, programs=16),
    2048: RowLaunch(rows=1, warps=4, programs=8, held=False),
    4096: RowLaunch(rows=1, warps=4, programs=4, held=False),
    8192: RowLaunch(rows=1, warps=8, programs=2, held=False),
}
_BACKWARD = {
    512: RowLaunch(rows=4, warps=2, programs=4, stages=3),
    1024: RowLaunch(rows=4, warps=4, programs=2, stages=3),
    2048: RowLaunch(rows=4, warps=8, programs=1, stages=3),
    4096: RowLaunch(rows=2, warps=8, programs=1, stages=3),
    8192: RowLaunch(rows=1, warps=8, programs=2, held=False),
}
_ROWS = RowLaunches(
    forward=_FORWARD,
    forward_simple={
        **_FORWARD,
        1024: RowLaunch(rows=1, warps=2, programs=32),
        2048: RowLaunch(rows=1, warps=2, programs=32),
        4096: RowLaunch(rows=1, warps=4, programs=16),
    },
    forward_tensorwise={},
    backward=_BACKWARD,
    backward_quantized={
        **_BACKWARD,
        512: RowLaunch(rows=1, warps=1, programs=8, stages=3),
        1024: RowLaunch(rows=1, warps=2, programs=8, stages=3),
        2048: RowLaunch(rows=1, warps=4, programs=4, stages=3),
        4096: RowLaunch(rows=1, warps=4, programs=2, stages=3),
    },
    backward_simple={
        512: RowLaunch(rows=1, warps=1, programs=32),
        1024: RowLaunch(rows=1, warps=2, programs=32),
        2048: RowLaunch(rows=1, warps=4, programs=16),
        4096: RowLaunch(rows=1, warps=8, programs=8),
        8192: RowLaunch(rows=1, warps=8, programs=2, held=False),
    },
    forward_columns={
        512: RowLaunch(rows=2, warps=1, programs=16, stages=3),
        1024: RowLaunch(rows=2, warps=2, programs=8, stages=3),
        2048: RowLaunch(rows=2, warps=4, programs=4, stages=3),
        4096: RowLaunch(rows=1, warps=8, programs=2, stages=3),
    },
    backward_columns={
        512: RowLaunch(rows=2, warps=1, programs=16, stages=3),
        1024: RowLaunch(rows=1, warps=4, programs=4, stages=3),
        2048: RowLaunch(rows=2, warps=4, programs=4, stages=3),
        4096: RowLaunch(rows=1, warps=4, programs=4, stages=3),
    },
    widest=RowLaunch(rows=1, warps=16, programs=1, held=False),
    streaming=4096,
    streaming_forward=RowLaunch(rows=1, warps=8, programs=4, held=False),
    streaming_backward=RowLaunch(rows=1, warps=8, programs=3, held=False),
    loaded_backward=RowLaunch(rows=1, warps=8, programs=2),
    short=256,
    short_elements=1024,
    short_forward=RowLaunch(rows=1, warps=1, programs=16),
    short_backward=RowLaunch(rows=1, warps=2, programs=8),
    most_warps=16,
    least_summed=4,
)
_LAUNCHES = LaunchTables(
    rows=_ROWS,
    wide=WideLaunch(
        chunk=4096,
        forward=RowLaunch(rows=1, warps=16, programs=2, stages=3),
        stages_read=3,
        tile=(4, 1024),
        backward=RowLaunch(rows=2, warps=32, programs=3, stages=3),
        warp_elements=1024,
        least_warps=4,
    ),
    # Not measured yet: the registers of the quantizers above, 32 elements a thread.
    weights=WeightsLaunch(warp_elements=1024, least_columns=16, most_warps=16, warps=32),
    transpose=SquareLaunch(tile=128, warps=4, chunk=1024),
    cast_transpose=SquareLaunch(tile=128, warps=8, chunk=1024),  # not measured yet, chosen by register use
    fused_cast_transpose=FusedCastLaunch(columns=128, elements=8192, warps=8),
    reduce=ReduceLaunch(columns=16, rows=128, warps=8),  # 8 reads in flight per thread
    products_columns=1024,
    maxima_chunk=1024,
    fm_interaction=FmInteractionLaunch(
        fetched=8192,
        stages=3,
        sizes=(
            FmLaunch(embeddings=32, forward=(2, 4), backward=(2, 4), chunk=64, chunk_passed=64),
            FmLaunch(embeddings=64, forward=(4, 3), backward=(4, 2), chunk=128, chunk_passed=64),
            FmLaunch(embeddings=256, forward=(4, 2), backward=(8, 1), chunk=64, chunk_passed=64),
        ),
    ),
    concat_norm=ConcatNormLaunch(
        wide=2048,
        wide_warp_elements=512,
        wide_elements=16384,
        most_warps=16,
        elements=4096,
        launch=(8, 4),
        summed_elements=2048,
        summed=(2, 16),
    ),
    dot=DotLaunch(warps=((16384, 8), (4096, 4), (2048, 2), (0, 1)), programs=8, stages=3),
)

# Rates: a copy of 1 GiB; products of 8192 x 8192 x 8192, in TF32 of 8192 x 2048 x 2048 (docs/bench.md); kernels of FM
# interactions and concat norms (docs/results/LOG.md, "where Wukong small's step went": the backward of a concat norm
# moves 1.07 GB in 379 us, its forward 0.80 GB in 283 us).
# From the host's time for forward and backward of six blocks of LayerNorm -> Linear -> SiLU -> Linear: 3.2 ms eager and
# 3.5 compiled, for 76 launches as plans count them; with generated kernels and FP8 GEMMs 8.5 and 5.0, for 101 and five
# of the model's own (docs/results/LOG.md, "launches that the compiler sees, third part"). The host's speed changes by
# up to 1.5.
_HOST = HostCosts(
    measured_on="the host of an NVIDIA H200",
    torch={Execution.EAGER: 42.0, Execution.COMPILED: 46.0},
    generated={Execution.EAGER: 82.0, Execution.COMPILED: 47.0},
)

H100 = DeviceSpec(
    name="h100",
    title="H100",
    pattern="H100(?! PCIe| NVL)",  # those have other memory
    architecture="Hopper",
    capability=(9, 0),
    triton=("cuda", 90, 32),
    multiprocessors=132,
    shared_bytes=227 * 1024,
    l2_bytes=50 * 2**20,
    measured_on="NVIDIA H100 80GB HBM3",
    data_sheet="",
    bandwidth=2.43e12,
    interaction_bandwidth=2.9e12,
    flops={"e4m3": 1277e12, "e4m3 fast": 1352e12, "bfloat16": 732e12, "float16": 732e12, "float32": 344e12},
    scaled_mm=_SCALED_MM,
    launches=_LAUNCHES,
    host=_HOST,
)

# The same multiprocessors with faster memory: a forward has to fetch the next rows while it computes
# (docs/results/LOG.md, "what rows wait for"); other launches are those of the H100.
_H200_ROWS = replace(
    _ROWS,
    forward={
        **_FORWARD,
        512: RowLaunch(rows=1, warps=1, programs=32, stages=3),
        1024: RowLaunch(rows=1, warps=1, programs=16, stages=3),
        2048: RowLaunch(rows=1, warps=4, programs=8, stages=3),
        4096: RowLaunch(rows=1, warps=4, programs=8, stages=3),
    },
    forward_tensorwise={
        512: RowLaunch(rows=8, warps=8, programs=4),
        1024: RowLaunch(rows=4, warps=8, programs=8),
        2048: RowLaunch(rows=2, warps=8, programs=8),
        4096: RowLaunch(rows=1, warps=8, programs=8),
    },
)

# The backward of the concat norm above takes 295 us, its forward 213 us (docs/results/LOG.md, "the H200 measured").
H200 = replace(
    H100,
    name="h200",
    title="H200",
    pattern="H200",
    measured_on="NVIDIA H200",
    bandwidth=4.25e12,
    interaction_bandwidth=3.8e12,
    launches=replace(_LAUNCHES, rows=_H200_ROWS),
    flops={"e4m3": 1259e12, "e4m3 fast": 1296e12, "bfloat16": 679e12, "float16": 650e12, "float32": 313e12},
)
