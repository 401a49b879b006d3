# ruff: noqa: N803
"""Triton kernels of ranker.yaml. The operators of `fused` launch them.

Written by `loka generate`, which overwrites it: edit the policy and generate again.
"""

from __future__ import annotations

import triton
import triton.language as tl

STAMP = "f060d11152abcbc565314b2b5c4dcf8721e3e74c1f0d00a6ef03fd467a4d3f0d"


@triton.jit
def sigmoid(z):
    # Instructions are what these kernels wait for: a division takes seven more than a root, and exp three more than
    # exp2.
    root = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))
    return root * root


@triton.jit
def silu(z):
    return z * sigmoid(z)


@triton.jit
def silu_gradient(grad, z):
    s = sigmoid(z)
    return grad * s * (1.0 + z * (1.0 - s))


@triton.jit
def activate(z, x, ACTIVATION: tl.constexpr):
    """The activation of z; a gate multiplies x by it."""
    if ACTIVATION == "silu":
        z = silu(z)
    return z


@triton.jit
def activation_gradient(grad, z, ACTIVATION: tl.constexpr):
    """The gradient with respect to z, from that with respect to the activation of z."""
    if ACTIVATION == "silu":
        grad = silu_gradient(grad, z)
    return grad


@triton.jit
def normalise(
    x, inside, row, valid, mean_ptr, rstd_ptr, WIDTH: tl.constexpr, whole: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """n of rows that a program holds, whose statistics are stored where there is a place for them."""
    n, rstd = x, 0.0
    if NORM == "layer_norm":
        mean = tl.sum(x, -1) / WIDTH
        n = zero_outside(x - by_row(mean, ROWS), inside, whole)
        if mean_ptr is not None:
            tl.store(mean_ptr + row, mean, mask=valid)
    if NORM == "layer_norm" or NORM == "rms_norm":
        rstd = tl.rsqrt(tl.sum(n * n, -1) / WIDTH + EPS)
        n = n * by_row(rstd, ROWS)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=valid)
    return n


@triton.jit
def norm_gradient(
    dn, n, rstd, mean_dn, mean_dn_n, WIDTH: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to x, from that with respect to n, dn, and the means of dn and of dn * n."""
    if NORM == "layer_norm":
        dn = (dn - by_row(mean_dn, ROWS) - n * by_row(mean_dn_n, ROWS)) * by_row(rstd, ROWS)
    return dn


@triton.jit
def output_of(n, x, weight, bias, inside, whole: tl.constexpr, ACTIVATION: tl.constexpr, SCALING: tl.constexpr):
    """The activation of n * weight + bias; zeros behind rows whose scale is to be found."""
    if weight is not None:
        n = n * weight
    if bias is not None:
        n = n + bias
    y = activate(n, x, ACTIVATION)
    if ACTIVATION == "sigmoid" and SCALING is not None:
        y = zero_outside(y, inside, whole)
    return y


@triton.jit
def gradient_of_output(
    grad, x, row, valid, weight, bias, mean_ptr, rstd_ptr, ROWS: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """The gradient with respect to n * weight + bias, from that of its activation; that of a gate's x; n and rstd."""
    n, rstd, gate_grad = x, 0.0, 0.0
    if mean_ptr is not None:
        n = n - by_row(load(mean_ptr + row, valid), ROWS)
    if rstd_ptr is not None:
        rstd = load(rstd_ptr + row, valid)
        n = n * by_row(rstd, ROWS)
    z = n
    if weight is not None:
        z = z * weight
    if bias is not None:
        z = z + bias
    return activation_gradient(grad, z, ACTIVATION), gate_grad, n, rstd


@triton.jit
def load_as_is(pointers, mask):
    """What stands there, zero where the mask is false."""
    if mask is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load(pointers, mask):
    """What stands there in float32, zero where the mask is false."""
    return load_as_is(pointers, mask).to(tl.float32)


@triton.jit
def inside_of(row, rows: tl.constexpr, high: tl.constexpr, column, columns: tl.constexpr, wide: tl.constexpr):
    """The mask of what a block, `high` and `wide`, has of a matrix (rows, columns); None if such blocks fill it."""
    mask = None if rows % high == 0 else (row < rows)[:, None]
    if columns % wide != 0:
        mask = (column < columns)[None, :] if mask is None else mask & (column < columns)[None, :]
    return mask


@triton.jit
def load_vector(pointer, columns, inside):
    """A vector over the columns, or None."""
    vector = None
    if pointer is not None:
        vector = load(pointer + columns, inside)
    return vector  # Triton 3.6 knows neither `return None` nor None as one of several values


@triton.jit
def load_sum(x_pointers, add, times_ptr, residual_ptr, offsets, mask):
    """[+ add] -> [* times] -> [+ residual] of x."""
    x = load(x_pointers, mask)
    if add is not None:
        x = x + add
    if times_ptr is not None:
        x = x * load(times_ptr + offsets, mask)
    if residual_ptr is not None:
        x = x + load(residual_ptr + offsets, mask)
    return x


@triton.jit
def dropped(x, pointers, mask, DROPOUT: tl.constexpr):
    """x where a dropout's mask is not zero, divided by the share of what stays."""
    return tl.where(load_as_is(pointers, mask) != 0, x * (1.0 / (1.0 - DROPOUT)), 0.0)


@triton.jit
def mask_of(valid, inside, whole: tl.constexpr):
    """The mask of rows that are valid and, unless all are, of columns inside; None if everything is."""
    if whole:
        mask = None if valid is None else valid[:, None]
    else:
        mask = inside if valid is None else valid[:, None] & inside
    return mask


@triton.jit
def by_row(value, ROWS: tl.constexpr):
    """A number of each row, as it is combined with the row's elements."""
    return value if ROWS == 1 else value[:, None]


@triton.jit
def zero_outside(x, inside, whole: tl.constexpr):
    """x, with zeros in the columns that are not inside unless all are."""
    return x if whole else tl.where(inside, x, 0.0)


@triton.jit
def store_sums(pointer, part, sums, inside, ROWS: tl.constexpr):
    """A program's partial sums of a vector's gradient, if there is one."""
    if pointer is not None:
        tl.store(pointer + part, sums if ROWS == 1 else tl.sum(sums, 0), mask=inside)


@triton.jit
def begin_output(
    scale_ptr, maxima_ptr, parts, SCALING: tl.constexpr, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """What `store_output` reads and adds to: the one scale of all rows, or what to multiply by instead of dividing by
    it; the largest scale or magnitude; how many elements overflowed."""
    factor, largest, overflow = 0.0, 0.0, 0
    return factor, largest, overflow


@triton.jit
def store_output(
    x, out_ptr, scale_ptr, offsets, row, valid, stored, factor, largest, overflow, SCALING: tl.constexpr,
    LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x as it is, or in FP8. Non-finite values are ignored when a scale is computed, and become NaN."""
    if SCALING is None:
        tl.store(out_ptr + offsets, x, mask=stored)
    if SCALING == "rowwise":
        nan = nan_unless_finite(x)
        amax = tl.maximum(tl.max(tl.abs(x) + nan, -1), 7.888609052210118e-31)  # 2**-100
        scale, factor = scale_of(amax, LIMIT, POWER_OF_TWO)
        store_under(x, nan, by_row(factor, ROWS), out_ptr + offsets, stored, LIMIT, POWER_OF_TWO)
        tl.store(scale_ptr + row, scale, mask=valid)
        largest = tl.maximum(largest, scale if ROWS == 1 else tl.max(tl.where(valid, scale, 0.0), 0))
    return largest, overflow


@triton.jit
def store_under(x, nan, factor, pointers, stored, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """x in FP8 under scales that come from its own maxima."""
    values = scaled(x, factor, POWER_OF_TWO)
    if not POWER_OF_TWO:
        values = tl.clamp(values, -LIMIT, LIMIT)  # above it is rounding alone
    tl.store(pointers, (values - nan).to(pointers.dtype.element_ty), mask=stored)


@triton.jit
def end_output(scale_max_ptr, amax_ptr, overflow_ptr, overflow_stats_ptr, largest, overflow):
    """What a program leaves about all of its rows."""
    if scale_max_ptr is not None:
        tl.store(scale_max_ptr + tl.program_id(0), largest)
    if amax_ptr is not None:
        tl.store(amax_ptr + tl.program_id(0), tl.max(largest, 0))
    if overflow_ptr is not None:
        tl.store(overflow_ptr + tl.program_id(0), tl.sum(overflow, 0))


@triton.jit
def scale_of(amax, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale of a largest magnitude, amax / LIMIT or the next power of two, and what `scaled` takes for it."""
    if POWER_OF_TWO:
        return power_of_two_scale(amax, LIMIT)
    else:
        scale = tl.div_rn(amax, LIMIT)
        return scale, scale


@triton.jit
def scaled(x, factor, POWER_OF_TWO: tl.constexpr):
    """x divided by a scale, of which `factor` is the reciprocal where it is a power of two."""
    if POWER_OF_TWO:
        return x * factor
    else:
        return tl.div_rn(x, tl.broadcast_to(factor, x.shape))


@triton.jit
def power_of_two_scale(amax, LIMIT: tl.constexpr):
    """The smallest power of two that is not below amax / LIMIT, and its reciprocal: 448 is 1.75 * 2**8, 57344 is 1.75 *
    2**15, and e4m3fnuz's 240 is 1.875 * 2**7."""
    exponent: tl.constexpr = 0x04000000 if LIMIT == 448.0 else 0x03800000 if LIMIT == 240.0 else 0x07800000
    rounded_up: tl.constexpr = 0x0FFFFF if LIMIT == 240.0 else 0x1FFFFF
    bits = ((amax.to(tl.int32, bitcast=True) + rounded_up) & 0x7F800000) - exponent
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def nan_unless_finite(x):
    """Zero where x is finite, elsewhere NaN. Maxima ignore NaN, so that adding this leaves out what is not finite.

    Not x - x: of a product that would become a fused multiply-add, which gives the product's rounding error.
    """
    return tl.abs(x) * 0.0


@triton.jit
def joined_rows(
    part_0_ptr, part_1_ptr, part_2_ptr, part_3_ptr, residual_ptr, row, columns, offsets, mask, n_0, n_1, n_2, n_3, n,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of the concatenation of parts (samples, n_i, WIDTH), plus the residual, in float32."""
    if part_1_ptr is None:
        s = load(part_0_ptr + offsets, mask)
    else:
        sample, place = (row // n).to(tl.int64), row % n
        s = rows_of_part(part_0_ptr, sample, place, columns, mask, n_0, WIDTH)
        s += rows_of_part(part_1_ptr, sample, place - n_0, columns, mask, n_1, WIDTH)
        if part_2_ptr is not None:
            s += rows_of_part(part_2_ptr, sample, place - n_0 - n_1, columns, mask, n_2, WIDTH)
        if part_3_ptr is not None:
            s += rows_of_part(part_3_ptr, sample, place - n_0 - n_1 - n_2, columns, mask, n_3, WIDTH)
    if residual_ptr is not None:
        s += load(residual_ptr + offsets, mask)
    return s


@triton.jit
def rows_of_part(part_ptr, sample, place, columns, mask, n, WIDTH: tl.constexpr):
    """The rows that are a part's, zero for those of others."""
    own = (place >= 0) & (place < n)
    pointers = part_ptr + (sample * n + place)[:, None] * WIDTH + columns
    return tl.load(pointers, mask=mask & own[:, None], other=0.0).to(tl.float32)


@triton.jit
def quantize_rows(
    program, programs, x_ptr, values_ptr, scale_ptr, scale_max_ptr, x_stride, m, k, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One program's rows of x (m, k), written to values (m, COLUMNS) in e4m3, with zeros behind them."""
    columns = tl.arange(0, PADDED)
    # Where zeros are written behind x, its width k is no constant: ptxas (of Triton 3.6) miswrites the upper of two
    # packed FP8 values where it knows of the zeros.
    inside = mask_of(None, columns[None, :] < (WIDTH if COLUMNS == WIDTH else k), WIDTH == PADDED)
    written = mask_of(None, columns[None, :] < COLUMNS, COLUMNS == PADDED)
    scale_max = 0.0
    for first in range(program * ROWS, m, programs * ROWS):
        # Behind the last row it stands again: that takes no mask.
        row = tl.minimum(first + tl.arange(0, ROWS), m - 1)
        start = row[:, None].to(tl.int64)
        x = load(x_ptr + start * x_stride + columns, inside)
        # Non-finite values are ignored when the scale is computed, and become NaN.
        nan = nan_unless_finite(x)
        amax = tl.maximum(tl.max(tl.abs(x) + nan, 1), 7.888609052210118e-31)  # 2**-100
        scale, reciprocal = power_of_two_scale(amax, LIMIT)
        values = x * reciprocal[:, None] - nan
        tl.store(values_ptr + start * COLUMNS + columns, values.to(values_ptr.dtype.element_ty), mask=written)
        tl.store(scale_ptr + row, scale)
        scale_max = tl.maximum(scale_max, tl.max(scale, 0))
    tl.store(scale_max_ptr + program, scale_max)


@triton.jit
def tiles_of(m, n, side: tl.constexpr):
    """How many tiles of side x side a matrix (m, n) has, at least one."""
    return tl.maximum(tl.cdiv(m, side), 1) * tl.maximum(tl.cdiv(n, side), 1)


@triton.jit
def sum_columns(block, partial_ptr, total_ptr, p, n, rows: tl.constexpr, columns: tl.constexpr):
    """Sums of one block of columns of partial (p, n), written to total (n,)."""
    column = block * columns + tl.arange(0, columns)
    inside = column < n
    total = tl.zeros([rows, columns], tl.float32)
    for first in range(0, p, rows):
        row = first + tl.arange(0, rows)
        mask = (row < p)[:, None] & inside[None, :]
        total += tl.load(partial_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    tl.store(total_ptr + column, tl.sum(total, 0), mask=inside)


@triton.jit
def requantize_transpose_tile(
    tile, values_ptr, scale_ptr, scale_max_ptr, transposed_ptr, scale_t_ptr, m, n, m_t, parts, side: tl.constexpr,
    chunk: tl.constexpr,
):  # fmt: skip
    """One tile of side x side of values (m, n), written to transposed (n, m_t); the first ones fill scale_t (n,)."""
    # The largest of the scales; 2**-108 is that of a zero row, the smallest there is.
    scale_max = tl.full([chunk], 3.0814879110195774e-33, tl.float32)
    for first in range(0, parts, chunk):
        part = first + tl.arange(0, chunk)
        scale_max = tl.maximum(scale_max, tl.load(scale_max_ptr + part, mask=part < parts, other=0.0))
    bits = tl.max(scale_max, 0).to(tl.int32, bitcast=True)
    reciprocal = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    across = tl.maximum(tl.cdiv(n, side), 1)
    row = tile // across * side + tl.arange(0, side)
    column = tile % across * side + tl.arange(0, side)
    mask = (row < m)[:, None] & (column < n)[None, :]
    values = tl.load(values_ptr + row[:, None].to(tl.int64) * n + column[None, :], mask=mask, other=0.0)
    ratio = tl.load(scale_ptr + row, mask=row < m, other=0.0) * reciprocal
    transposed = tl.trans((values.to(tl.float32) * ratio[:, None]).to(transposed_ptr.dtype.element_ty))
    # Behind the last row come zeros, up to m_t.
    written = (column < n)[:, None] & (row < m_t)[None, :]
    tl.store(transposed_ptr + column[:, None].to(tl.int64) * m_t + row[None, :], transposed, mask=written)
    if tile < across:
        scale_t = tl.zeros([side], tl.float32) + bits.to(tl.float32, bitcast=True)
        tl.store(scale_t_ptr + column, scale_t, mask=column < n)


@triton.jit(do_not_specialize=["m"])
def concat_norm_backward(
    grad_ptr, part_0_ptr, part_1_ptr, part_2_ptr, part_3_ptr, residual_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr,
    dweight_ptr, dbias_ptr, n_0, n_1, n_2, n_3, n, m, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of `concat_norm_forward`: of the rows (m, WIDTH), and partial sums of those of weight and bias."""
    columns = tl.arange(0, PADDED)
    inside = mask_of(None, columns[None, :] < WIDTH, WIDTH == PADDED)
    weight = load_vector(weight_ptr, columns[None, :], inside)
    dweight, dbias = tl.zeros([ROWS, PADDED], tl.float32), tl.zeros([ROWS, PADDED], tl.float32)
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        mask = mask_of(valid, inside, WIDTH == PADDED)
        offsets = row[:, None].to(tl.int64) * WIDTH + columns
        n_of_rows = joined_rows(
            part_0_ptr, part_1_ptr, part_2_ptr, part_3_ptr, residual_ptr, row, columns, offsets, mask,
            n_0, n_1, n_2, n_3, n, WIDTH,
        )  # fmt: skip
        grad = load(grad_ptr + offsets, mask)
        if mean_ptr is not None:
            n_of_rows = n_of_rows - load(mean_ptr + row, valid)[:, None]
        rstd = load(rstd_ptr + row, valid)
        n_of_rows = n_of_rows * rstd[:, None]
        dweight += grad * n_of_rows
        dbias += grad
        if weight_ptr is not None:
            grad = grad * weight
        mean_dn_n = tl.sum(grad * n_of_rows, 1) / WIDTH
        if mean_ptr is None:
            dx = grad - n_of_rows * mean_dn_n[:, None]
        else:
            mean_dn = tl.sum(grad, 1) / WIDTH
            dx = grad - mean_dn[:, None] - n_of_rows * mean_dn_n[:, None]
        tl.store(dx_ptr + offsets, dx * rstd[:, None], mask=mask)
    part = tl.program_id(0).to(tl.int64) * WIDTH + columns
    within = mask_of(None, columns < WIDTH, WIDTH == PADDED)
    store_sums(dweight_ptr, part, dweight, within, 0)
    store_sums(dbias_ptr, part, dbias, within, 0)


@triton.jit(do_not_specialize=["m"])
def concat_norm_forward(
    part_0_ptr, part_1_ptr, part_2_ptr, part_3_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, mean_ptr, rstd_ptr,
    n_0, n_1, n_2, n_3, n, m, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """The norm of rows (m, WIDTH) of concatenated parts, n_0, n_1, ... of the n of a sample, plus a residual.

    It is a LayerNorm if there is a mean to write, else an RMSNorm. Pointers are None for what is not there.
    """
    columns = tl.arange(0, PADDED)
    inside = mask_of(None, columns[None, :] < WIDTH, WIDTH == PADDED)
    weight = load_vector(weight_ptr, columns[None, :], inside)
    bias = load_vector(bias_ptr, columns[None, :], inside)
    for first in range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        valid = row < m
        mask = mask_of(valid, inside, WIDTH == PADDED)
        offsets = row[:, None].to(tl.int64) * WIDTH + columns
        s = joined_rows(
            part_0_ptr, part_1_ptr, part_2_ptr, part_3_ptr, residual_ptr, row, columns, offsets, mask,
            n_0, n_1, n_2, n_3, n, WIDTH,
        )  # fmt: skip
        if mean_ptr is not None:
            mean = tl.sum(s, 1) / WIDTH
            s = zero_outside(s - mean[:, None], inside, WIDTH == PADDED)
            tl.store(mean_ptr + row, mean, mask=valid)
        rstd = tl.rsqrt(tl.sum(s * s, 1) / WIDTH + EPS)
        tl.store(rstd_ptr + row, rstd, mask=valid)
        y = s * rstd[:, None]
        if weight_ptr is not None:
            y = y * weight
        if bias_ptr is not None:
            y = y + bias
        tl.store(out_ptr + offsets, y, mask=mask)


@triton.jit(do_not_specialize=["batch"])
def fm_backward(
    dproducts_ptr, dcompressed_ptr, x_ptr, rank_ptr, compress_ptr, passed_ptr, dx_ptr, drank_ptr, dcompress_ptr,
    dcompressed_stride, passed_stride, batch, N: tl.constexpr, D: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    N_HELD: tl.constexpr, CHUNK: tl.constexpr, R_HELD: tl.constexpr, C_HELD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of `fm_forward`, CHUNK columns of a sample at a step; another one of x, `passed`, is added to dx.

    drank (programs, N * R) and dcompress (programs, C * N) are partial sums.
    """
    n, r, c = tl.arange(0, N_HELD), tl.arange(0, R_HELD), tl.arange(0, C_HELD)
    rank = load_as_is(rank_ptr + n[:, None] * R + r[None, :], inside_of(n, N, N_HELD, r, R, R_HELD))
    drank = tl.zeros([N_HELD, R_HELD], tl.float32)
    if compress_ptr is not None:
        compress = load_as_is(compress_ptr + c[:, None] * N + n[None, :], inside_of(c, C, C_HELD, n, N, N_HELD))
        dcompress = tl.zeros([C_HELD, N_HELD], tl.float32)
    chunks: tl.constexpr = (D + CHUNK - 1) // CHUNK
    for step in tl.range(tl.program_id(0), batch * chunks, tl.num_programs(0), num_stages=STAGES):
        sample = tl.cast(step // chunks, tl.int64)
        d = step % chunks * CHUNK + tl.arange(0, CHUNK)
        x_at = sample * (N * D) + n[:, None] * D + d[None, :]
        of_sample = inside_of(n, N, N_HELD, d, D, CHUNK)
        x = load_as_is(x_ptr + x_at, of_sample)
        dproducts_at = dproducts_ptr + sample * (N * R) + n[:, None] * R + r[None, :]
        dproducts = load_as_is(dproducts_at, inside_of(n, N, N_HELD, r, R, R_HELD))
        if passed_ptr is not None:
            passed = load(passed_ptr + sample * passed_stride + n[:, None] * D + d[None, :], of_sample)
        inner = tl.dot(tl.trans(rank), x).to(x.dtype)
        dinner = tl.dot(tl.trans(dproducts), x).to(x.dtype)
        dx = tl.dot(dproducts, inner) if passed_ptr is None else tl.dot(dproducts, inner, passed)
        dx = tl.dot(rank, dinner, dx)
        if compress_ptr is not None:
            dcompressed_at = dcompressed_ptr + sample * dcompressed_stride + c[:, None] * D + d[None, :]
            dcompressed = load_as_is(dcompressed_at, inside_of(c, C, C_HELD, d, D, CHUNK))
            dx = tl.dot(tl.trans(compress), dcompressed, dx)
            dcompress = tl.dot(dcompressed, tl.trans(x), dcompress)
        drank = tl.dot(x, tl.trans(dinner), drank)
        tl.store(dx_ptr + x_at, dx, mask=of_sample)
    part = tl.program_id(0)
    drank_at = drank_ptr + part * (N * R) + n[:, None] * R + r[None, :]
    tl.store(drank_at, drank, mask=inside_of(n, N, N_HELD, r, R, R_HELD))
    if compress_ptr is not None:
        dcompress_at = dcompress_ptr + part * (C * N) + c[:, None] * N + n[None, :]
        tl.store(dcompress_at, dcompress, mask=inside_of(c, C, C_HELD, n, N, N_HELD))


@triton.jit(do_not_specialize=["batch"])
def fm_forward(
    x_ptr, rank_ptr, compress_ptr, products_ptr, compressed_ptr, batch, N: tl.constexpr, D: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, N_HELD: tl.constexpr, D_HELD: tl.constexpr, R_HELD: tl.constexpr,
    C_HELD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """products = x @ (x^T @ rank), and compressed = compress @ x if there is compress, for x (batch, N, D).

    rank (N, R), compress (C, N), products (batch, N, R), compressed (batch, C, D); held are sides in powers of two.
    """
    n, d, r, c = tl.arange(0, N_HELD), tl.arange(0, D_HELD), tl.arange(0, R_HELD), tl.arange(0, C_HELD)
    rank_t = load_as_is(rank_ptr + n[None, :] * R + r[:, None], inside_of(r, R, R_HELD, n, N, N_HELD))
    if compress_ptr is not None:
        compress = load_as_is(compress_ptr + c[:, None] * N + n[None, :], inside_of(c, C, C_HELD, n, N, N_HELD))
    for index in tl.range(tl.program_id(0), batch, tl.num_programs(0), num_stages=STAGES):
        sample = tl.cast(index, tl.int64)
        x = load_as_is(x_ptr + sample * (N * D) + n[:, None] * D + d[None, :], inside_of(n, N, N_HELD, d, D, D_HELD))
        inner = tl.dot(rank_t, x).to(x.dtype)  # (x^T @ rank)^T
        products = tl.dot(x, tl.trans(inner))
        products_at = products_ptr + sample * (N * R) + n[:, None] * R + r[None, :]
        tl.store(products_at, products, mask=inside_of(n, N, N_HELD, r, R, R_HELD))
        if compress_ptr is not None:
            compressed = tl.dot(compress, x)
            compressed_at = compressed_ptr + sample * (C * D) + c[:, None] * D + d[None, :]
            tl.store(compressed_at, compressed, mask=inside_of(c, C, C_HELD, d, D, D_HELD))


@triton.jit(do_not_specialize=["m", "parts"])
def norm_backward(
    grad_ptr, residual_grad_in_ptr, x_ptr, add_ptr, weight_ptr, bias_ptr, times_ptr, mean_ptr, rstd_ptr, mean_dn_ptr,
    mean_dn_n_ptr, maxima_ptr, overflow_stats_ptr, multiplier_ptr, mask_ptr, out_ptr, scale_ptr, scale_max_ptr,
    amax_ptr, overflow_ptr, residual_grad_out_ptr, dmultiplier_ptr, dweight_ptr, dbias_ptr, dadd_ptr, grad_stride,
    multiplier_stride, m, parts, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    HELD: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    SCALING: tl.constexpr, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """The gradient of [+ add] -> [* times] -> [norm] -> [activation] -> [* multiplier] with respect to x (m, WIDTH), in
    FP8 or as it is.

    A pointer is None where there is nothing to read or to write. Each program writes partial sums of vectors'
    gradients. mean_dn and mean_dn_n are of columns, for a norm over them.
    """
    columns = tl.arange(0, PADDED)
    inside = mask_of(None, columns < WIDTH, WIDTH == PADDED)
    if HELD:
        add = load_vector(add_ptr, columns, inside)
        weight = load_vector(weight_ptr, columns, inside)
        bias = load_vector(bias_ptr, columns, inside)
    sums: tl.constexpr = [PADDED] if ROWS == 1 else [ROWS, PADDED]
    dweight, dbias, dadd = tl.zeros(sums, tl.float32), tl.zeros(sums, tl.float32), tl.zeros(sums, tl.float32)
    factor, largest, overflow = begin_output(scale_ptr, maxima_ptr, parts, SCALING, LIMIT, POWER_OF_TWO, ROWS * PADDED)
    for first in tl.range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first if ROWS == 1 else first + tl.arange(0, ROWS)
        valid = None if ROWS == 1 else row < m
        start = by_row(tl.cast(row, tl.int64), ROWS)
        offsets = start * WIDTH + columns
        mask = mask_of(valid, inside, WIDTH == PADDED)
        if not HELD:
            add = load_vector(add_ptr, columns, inside)
            weight = load_vector(weight_ptr, columns, inside)
            bias = load_vector(bias_ptr, columns, inside)
        grad = load(grad_ptr + start * grad_stride + columns, mask)
        if mask_ptr is not None:
            grad = dropped(grad, mask_ptr + offsets, mask, DROPOUT)
        product_grad = grad
        if multiplier_ptr is not None:
            grad = grad * load(multiplier_ptr + start * multiplier_stride + columns, mask)
        dz = grad
        if x_ptr is not None:
            x = load(x_ptr + offsets, mask)
            if add_ptr is not None:
                x = x + add
            dz, _, n, rstd = gradient_of_output(
                grad, x, row, valid, weight, bias, mean_ptr, rstd_ptr, ROWS, NORM, EPS, BLOCK, ACTIVATION
            )
        if dmultiplier_ptr is not None:
            y = output_of(n, x, weight, bias, inside, WIDTH == PADDED, ACTIVATION, None)
            tl.store(dmultiplier_ptr + offsets, product_grad * y, mask=mask)
        if dweight_ptr is not None:
            dweight += dz * n
        if dbias_ptr is not None:
            dbias += dz
        dx = dz
        if weight_ptr is not None:
            dx = dx * weight
        if NORM is not None:
            mean_dn, mean_dn_n = tl.sum(dx, -1) / WIDTH, tl.sum(dx * n, -1) / WIDTH
            dx = norm_gradient(dx, n, rstd, mean_dn, mean_dn_n, WIDTH, ROWS, NORM, EPS, BLOCK)
        if mean_ptr is not None and SCALING is not None:
            dx = zero_outside(dx, inside, WIDTH == PADDED)
        if residual_grad_in_ptr is not None:
            dx = dx + load(residual_grad_in_ptr + offsets, mask)
        if residual_grad_out_ptr is not None:
            tl.store(residual_grad_out_ptr + offsets, dx, mask=mask)
        if times_ptr is not None:
            dx = dx * load(times_ptr + offsets, mask)
        if dadd_ptr is not None:
            dadd += dx
        if SCALING is not None or out_ptr is not None:
            largest, overflow = store_output(
                dx, out_ptr, scale_ptr, offsets, row, valid, mask, factor, largest, overflow,
                SCALING, LIMIT, POWER_OF_TWO, WIDTH, ROWS,
            )  # fmt: skip
    part = tl.program_id(0).to(tl.int64) * WIDTH + columns
    store_sums(dweight_ptr, part, dweight, inside, ROWS)
    store_sums(dbias_ptr, part, dbias, inside, ROWS)
    store_sums(dadd_ptr, part, dadd, inside, ROWS)
    end_output(scale_max_ptr, amax_ptr, overflow_ptr, overflow_stats_ptr, largest, overflow)


@triton.jit(do_not_specialize=["m", "parts", "k"])
def norm_forward(
    x_ptr, add_ptr, times_ptr, residual_ptr, weight_ptr, bias_ptr, maxima_ptr, overflow_stats_ptr, multiplier_ptr,
    mask_ptr, out_ptr, scale_ptr, scale_max_ptr, amax_ptr, overflow_ptr, kept_ptr, mean_ptr, rstd_ptr, x_stride,
    multiplier_stride, m, parts, k, WIDTH: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, HELD: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, SCALING: tl.constexpr, LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """[+ add] -> [* times] -> [+ residual] -> [norm] -> [activation] -> [* multiplier] -> FP8 or a plain matrix, of x
    (m, WIDTH).

    A pointer is None where there is nothing to read or to write. A program takes ROWS rows at a step.
    """
    columns = tl.arange(0, PADDED)
    # Where zeros are written behind x, its width k is no constant: ptxas (of Triton 3.6) miswrites the upper of two
    # packed FP8 values where it knows of the zeros.
    inside = mask_of(None, columns < (WIDTH if COLUMNS == WIDTH else k), WIDTH == PADDED)
    written = mask_of(None, columns < COLUMNS, COLUMNS == PADDED)
    if HELD:
        add = load_vector(add_ptr, columns, inside)
        weight = load_vector(weight_ptr, columns, inside)
        bias = load_vector(bias_ptr, columns, inside)
    factor, largest, overflow = begin_output(scale_ptr, maxima_ptr, parts, SCALING, LIMIT, POWER_OF_TWO, ROWS * PADDED)
    for first in tl.range(tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = first if ROWS == 1 else first + tl.arange(0, ROWS)
        valid = None if ROWS == 1 else row < m
        start = by_row(tl.cast(row, tl.int64), ROWS)
        offsets = start * COLUMNS + columns
        mask = mask_of(valid, inside, WIDTH == PADDED)
        stored = mask_of(valid, written, COLUMNS == PADDED)
        if not HELD:
            add = load_vector(add_ptr, columns, inside)
            weight = load_vector(weight_ptr, columns, inside)
            bias = load_vector(bias_ptr, columns, inside)
        x = load_sum(x_ptr + start * x_stride + columns, add, times_ptr, residual_ptr, offsets, mask)
        if kept_ptr is not None:
            tl.store(kept_ptr + offsets, x, mask=stored)
        n = normalise(x, inside, row, valid, mean_ptr, rstd_ptr, WIDTH, WIDTH == PADDED, ROWS, NORM, EPS, BLOCK)
        y = output_of(n, x, weight, bias, inside, WIDTH == PADDED, ACTIVATION, SCALING)
        if multiplier_ptr is not None:
            y = y * load(multiplier_ptr + start * multiplier_stride + columns, mask)
        if mask_ptr is not None:
            y = dropped(y, mask_ptr + offsets, mask, DROPOUT)
        largest, overflow = store_output(
            y, out_ptr, scale_ptr, offsets, row, valid, stored, factor, largest, overflow,
            SCALING, LIMIT, POWER_OF_TWO, WIDTH, ROWS,
        )  # fmt: skip
    end_output(scale_max_ptr, amax_ptr, overflow_ptr, overflow_stats_ptr, largest, overflow)


@triton.jit(do_not_specialize=["m_0", "k_0", "programs_0", "m_1", "k_1", "programs_1", "m_2", "k_2", "programs_2"])
def quantize_weights(
    weight_0_ptr, values_0_ptr, scale_0_ptr, scale_max_0_ptr, stride_0, m_0, k_0, programs_0, weight_1_ptr,
    values_1_ptr, scale_1_ptr, scale_max_1_ptr, stride_1, m_1, k_1, programs_1, weight_2_ptr, values_2_ptr, scale_2_ptr,
    scale_max_2_ptr, stride_2, m_2, k_2, programs_2, WIDTH_0: tl.constexpr, COLUMNS_0: tl.constexpr,
    PADDED_0: tl.constexpr, ROWS_0: tl.constexpr, WIDTH_1: tl.constexpr, COLUMNS_1: tl.constexpr,
    PADDED_1: tl.constexpr, ROWS_1: tl.constexpr, WIDTH_2: tl.constexpr, COLUMNS_2: tl.constexpr,
    PADDED_2: tl.constexpr, ROWS_2: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Up to 3 weights (m, k) to e4m3 with one power-of-two scale a row. Pointers to no weight are None."""
    program = tl.program_id(0)
    if weight_0_ptr is not None:
        if program >= 0 and program < programs_0:
            quantize_rows(
                program, programs_0, weight_0_ptr, values_0_ptr, scale_0_ptr, scale_max_0_ptr, stride_0, m_0, k_0,
                WIDTH_0, COLUMNS_0, PADDED_0, ROWS_0, LIMIT,
            )  # fmt: skip
        program -= programs_0
    if weight_1_ptr is not None:
        if program >= 0 and program < programs_1:
            quantize_rows(
                program, programs_1, weight_1_ptr, values_1_ptr, scale_1_ptr, scale_max_1_ptr, stride_1, m_1, k_1,
                WIDTH_1, COLUMNS_1, PADDED_1, ROWS_1, LIMIT,
            )  # fmt: skip
        program -= programs_1
    if weight_2_ptr is not None:
        if program >= 0 and program < programs_2:
            quantize_rows(
                program, programs_2, weight_2_ptr, values_2_ptr, scale_2_ptr, scale_max_2_ptr, stride_2, m_2, k_2,
                WIDTH_2, COLUMNS_2, PADDED_2, ROWS_2, LIMIT,
            )  # fmt: skip
        program -= programs_2


@triton.jit(do_not_specialize=["p_0", "p_1", "p_2", "p_3", "p_4", "p_5"])
def reduce(
    partial_0_ptr, total_0_ptr, p_0, n_0, partial_1_ptr, total_1_ptr, p_1, n_1, partial_2_ptr, total_2_ptr, p_2, n_2,
    partial_3_ptr, total_3_ptr, p_3, n_3, partial_4_ptr, total_4_ptr, p_4, n_4, partial_5_ptr, total_5_ptr, p_5, n_5,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Column sums of up to 6 matrices (p, n), a block of columns a program. Pointers to no matrix are None."""
    block = tl.program_id(0)
    if partial_0_ptr is not None:
        if block >= 0 and block < tl.cdiv(n_0, COLUMNS):
            sum_columns(block, partial_0_ptr, total_0_ptr, p_0, n_0, ROWS, COLUMNS)
        block -= tl.cdiv(n_0, COLUMNS)
    if partial_1_ptr is not None:
        if block >= 0 and block < tl.cdiv(n_1, COLUMNS):
            sum_columns(block, partial_1_ptr, total_1_ptr, p_1, n_1, ROWS, COLUMNS)
        block -= tl.cdiv(n_1, COLUMNS)
    if partial_2_ptr is not None:
        if block >= 0 and block < tl.cdiv(n_2, COLUMNS):
            sum_columns(block, partial_2_ptr, total_2_ptr, p_2, n_2, ROWS, COLUMNS)
        block -= tl.cdiv(n_2, COLUMNS)
    if partial_3_ptr is not None:
        if block >= 0 and block < tl.cdiv(n_3, COLUMNS):
            sum_columns(block, partial_3_ptr, total_3_ptr, p_3, n_3, ROWS, COLUMNS)
        block -= tl.cdiv(n_3, COLUMNS)
    if partial_4_ptr is not None:
        if block >= 0 and block < tl.cdiv(n_4, COLUMNS):
            sum_columns(block, partial_4_ptr, total_4_ptr, p_4, n_4, ROWS, COLUMNS)
        block -= tl.cdiv(n_4, COLUMNS)
    if partial_5_ptr is not None:
        if block >= 0 and block < tl.cdiv(n_5, COLUMNS):
            sum_columns(block, partial_5_ptr, total_5_ptr, p_5, n_5, ROWS, COLUMNS)
        block -= tl.cdiv(n_5, COLUMNS)


@triton.jit(do_not_specialize=["parts_0", "parts_1", "parts_2"])
def requantize_transpose(
    values_0_ptr, scale_0_ptr, scale_max_0_ptr, transposed_0_ptr, scale_t_0_ptr, m_0, n_0, m_t_0, parts_0, values_1_ptr,
    scale_1_ptr, scale_max_1_ptr, transposed_1_ptr, scale_t_1_ptr, m_1, n_1, m_t_1, parts_1, values_2_ptr, scale_2_ptr,
    scale_max_2_ptr, transposed_2_ptr, scale_t_2_ptr, m_2, n_2, m_t_2, parts_2, SIDE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Transposed copies of up to 3 e4m3 matrices (m, n), a tile a program. Pointers to no matrix are None."""
    tile = tl.program_id(0)
    if values_0_ptr is not None:
        if tile >= 0 and tile < tiles_of(m_0, n_0, SIDE):
            requantize_transpose_tile(
                tile, values_0_ptr, scale_0_ptr, scale_max_0_ptr, transposed_0_ptr, scale_t_0_ptr, m_0, n_0, m_t_0,
                parts_0, SIDE, CHUNK,
            )  # fmt: skip
        tile -= tiles_of(m_0, n_0, SIDE)
    if values_1_ptr is not None:
        if tile >= 0 and tile < tiles_of(m_1, n_1, SIDE):
            requantize_transpose_tile(
                tile, values_1_ptr, scale_1_ptr, scale_max_1_ptr, transposed_1_ptr, scale_t_1_ptr, m_1, n_1, m_t_1,
                parts_1, SIDE, CHUNK,
            )  # fmt: skip
        tile -= tiles_of(m_1, n_1, SIDE)
    if values_2_ptr is not None:
        if tile >= 0 and tile < tiles_of(m_2, n_2, SIDE):
            requantize_transpose_tile(
                tile, values_2_ptr, scale_2_ptr, scale_max_2_ptr, transposed_2_ptr, scale_t_2_ptr, m_2, n_2, m_t_2,
                parts_2, SIDE, CHUNK,
            )  # fmt: skip
        tile -= tiles_of(m_2, n_2, SIDE)
