"""Operators of ranker.yaml: kernels in Triton on a GPU, torch on the CPU.

Written by `loka generate`, which overwrites it: edit the policy and generate again.

An operator is what its kernel computes, and how `triton_kernels` is launched for it. The classes check its arguments,
allocate its results, and have the same in torch (`loka.kernels.fused`). A comment names arguments and results.
"""

from __future__ import annotations

from loka.devices.spec import ReduceLaunch, SquareLaunch, WeightsLaunch
from loka.kernels.fused import operators
from loka.kernels.fused.interaction.concat_norm import ConcatNormBackward, ConcatNormConfiguration, ConcatNormForward
from loka.kernels.fused.interaction.fm import FmBackward, FmConfiguration, FmForward, FmSizes
from loka.kernels.fused.interaction.interaction_operators import ConcatNormOperator, FmOperator
from loka.kernels.fused.matrix_operators import QuantizeWeightsOperator, ReduceOperator, RequantizeTransposeOperator
from loka.kernels.fused.norm.norm_operator import NormOperator
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norm_values import Rows

STAMP = "f060d11152abcbc565314b2b5c4dcf8721e3e74c1f0d00a6ef03fd467a4d3f0d"

kernel = operators.of_package(__package__, "e70b9401")

# Gradient of addition -> e4m3 with one power-of-two scale a row.
# grad -> values, scale, scale_max, dadd
add_backward_e4m3 = kernel(
    NormOperator(
        NormBackward(width=1024, add=True, quantize=True), {1024: Rows(rows=1, warps=2, least=4, programs=8, stages=3)}
    ),
)

# Addition -> LayerNorm (eps 1e-05) -> SiLU.
# x, add, weight, bias, dtype -> out, mean, rstd
add_layer_norm_silu = kernel(
    NormOperator(
        NormForward(width=256, norm="layer_norm", weight=True, bias=True, activation="silu", add=True, save=True),
        {256: Rows(rows=4, warps=1, least=4, programs=16), 2048: Rows(rows=1, warps=4, least=1, programs=8, stages=3)},
    ),
)

# Gradient of addition, LayerNorm, SiLU.
# grad, x, add, weight, bias, mean, rstd -> dx, dweight, dbias, dadd
add_layer_norm_silu_backward = kernel(
    NormOperator(
        NormBackward(width=256, norm="layer_norm", weight=True, bias=True, activation="silu", add=True),
        {256: Rows(rows=4, warps=2, least=16, programs=8), 2048: Rows(rows=4, warps=8, least=16, programs=1, stages=3)},
    ),
)

# Gradient of addition, LayerNorm, SiLU -> e4m3 with one power-of-two scale a row.
# grad, x, add, weight, bias, mean, rstd -> values, scale, scale_max, dweight, dbias, dadd
add_layer_norm_silu_backward_e4m3 = kernel(
    NormOperator(
        NormBackward(width=2048, norm="layer_norm", weight=True, bias=True, activation="silu", add=True, quantize=True),
        {2048: Rows(rows=1, warps=4, least=4, programs=4, stages=3)},
    ),
)

# Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row.
# x, add, weight, bias -> values, scale, scale_max, mean, rstd
add_layer_norm_silu_e4m3 = kernel(
    NormOperator(
        NormForward(
            width=2048, norm="layer_norm", weight=True, bias=True, activation="silu", add=True, quantize=True, save=True
        ),
        {2048: Rows(rows=1, warps=4, least=1, programs=8, stages=3)},
    ),
)

# Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row.
# x, add, weight, bias -> values, scale, scale_max
add_layer_norm_silu_e4m3_inference = kernel(
    NormOperator(
        NormForward(width=2048, norm="layer_norm", weight=True, bias=True, activation="silu", add=True, quantize=True),
        {2048: Rows(rows=1, warps=4, least=1, programs=8, stages=3)},
    ),
)

# Addition -> LayerNorm (eps 1e-05) -> SiLU.
# x, add, weight, bias, dtype -> out
add_layer_norm_silu_inference = kernel(
    NormOperator(
        NormForward(width=256, norm="layer_norm", weight=True, bias=True, activation="silu", add=True),
        {256: Rows(rows=4, warps=1, least=4, programs=16), 2048: Rows(rows=1, warps=4, least=1, programs=8, stages=3)},
    ),
)

# 2 parts concatenated, a residual added -> LayerNorm (eps 1e-05).
# part_0, part_1, residual, weight, bias, dtype -> out, mean, rstd
concat_norm_2_residual_layer_norm_128 = kernel(
    ConcatNormOperator(
        ConcatNormForward(width=128, parts=2, residual=True, norm="layer_norm", weight=True, bias=True, eps=1e-05),
        ConcatNormConfiguration(rows=32, warps=8, programs=4),
    ),
)

# Gradient of 2 parts concatenated, a residual added -> LayerNorm.
# grad, part_0, part_1, residual, weight, mean, rstd -> dx, dweight, dbias
concat_norm_2_residual_layer_norm_backward_128 = kernel(
    ConcatNormOperator(
        ConcatNormBackward(width=128, parts=2, residual=True, norm="layer_norm", weight=True, bias=True, eps=1e-05),
        ConcatNormConfiguration(rows=16, warps=2, programs=16),
    ),
)

# Pairwise products at rank 16 and 8 weighted sums.
# x, rank, compress -> products, compressed
fm_interaction_16x128_to_16_8 = kernel(
    FmOperator(
        FmForward(sizes=FmSizes(embeddings=16, dim=128, rank=16, made=8)),
        FmConfiguration(chunk=128, stages=3, stages_wide=3, warps=2, programs=4),
    ),
)

# Gradients of pairwise products at rank 16 and 8 weighted sums.
# dproducts, dcompressed, x, rank, compress, passed -> dx, drank, dcompress
fm_interaction_backward_16x128_to_16_8_passed = kernel(
    FmOperator(
        FmBackward(sizes=FmSizes(embeddings=16, dim=128, rank=16, made=8), passed=True),
        FmConfiguration(chunk=64, stages=3, stages_wide=3, warps=2, programs=4),
    ),
)

# LayerNorm (eps 1e-05).
# x, weight, bias, dtype -> out, mean, rstd
layer_norm = kernel(
    NormOperator(
        NormForward(width=256, norm="layer_norm", weight=True, bias=True, save=True),
        {256: Rows(rows=4, warps=1, least=4, programs=16)},
    ),
)

# Gradient of LayerNorm.
# grad, x, weight, mean, rstd -> dx, dweight, dbias
layer_norm_backward = kernel(
    NormOperator(
        NormBackward(width=256, norm="layer_norm", weight=True, bias=True),
        {256: Rows(rows=4, warps=2, least=16, programs=8)},
    ),
)

# LayerNorm (eps 1e-05).
# x, weight, bias, dtype -> out
layer_norm_inference = kernel(
    NormOperator(
        NormForward(width=256, norm="layer_norm", weight=True, bias=True),
        {256: Rows(rows=4, warps=1, least=4, programs=16)},
    ),
)

# To e4m3 with one power-of-two scale a row.
# x -> values, scale, scale_max
quantize_e4m3 = kernel(
    NormOperator(NormForward(width=2048, quantize=True), {2048: Rows(rows=1, warps=2, least=1, programs=32)})
)

# Weights to e4m3 with one power-of-two scale a row.
# Tensor[] weights -> Tensor[]
quantize_weights = kernel(
    QuantizeWeightsOperator(
        {2048: 2048}, 3, WeightsLaunch(warp_elements=1024, least_columns=16, most_warps=16, warps=32)
    ),
)

# Column sums of matrices.
# Tensor[] partials, ScalarType dtype -> Tensor[]
reduce = kernel(ReduceOperator(6, ReduceLaunch(columns=16, rows=128, warps=8)))

# Transposed copies of e4m3 matrices, one scale each.
# Tensor[] operands -> Tensor[]
requantize_transpose = kernel(RequantizeTransposeOperator(3, SquareLaunch(tile=128, warps=4, chunk=1024)))
