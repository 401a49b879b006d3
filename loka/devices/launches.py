"""How rendered kernels are launched on a device, as data: one record for each family of kernels.

The modules `*_launch` of `loka.kernels.fused` choose among these by what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """How a kernel that takes whole rows is launched."""

    rows: int  # that a program takes at a step, a power of two
    warps: int  # of a program
    programs: int  # on each multiprocessor, at most
    held: bool = True  # weight, bias and add stay in registers, or are read again (from the L1 cache) at each step
    stages: int = 1  # steps whose rows are on their way into shared memory at once


@dataclass(frozen=True, slots=True)
class RowLaunches:
    """`RowLaunch` by the width that a program holds, a power of two; wider ones take `widest`.

    Measured 512, 1024, 2048 and 4096 wide (docs/results/LOG.md, "rendered kernels" and "rows fetched ahead"); between
    and beyond, by what fits the registers: a thread has at most 32 elements of a row.
    """

    forward: Mapping[int, RowLaunch]
    forward_simple: Mapping[int, RowLaunch]  # without a norm over the whole row: a row waits for its maximum alone
    backward: Mapping[int, RowLaunch]  # to a plain matrix; measured with the reduction of its sums, as the next
    backward_quantised: Mapping[int, RowLaunch]  # to FP8
    backward_simple: Mapping[int, RowLaunch]  # without sums of columns: as many programs as there may be
    widest: RowLaunch
    streaming: int  # the width whose kernels of several matrices without a norm, or of one matrix or sum more ...
    streaming_forward: RowLaunch  # ... take these: as many programs as their registers leave room for
    streaming_backward: RowLaunch
    loaded_backward: RowLaunch  # one sum or one matrix more, and four warps would spill
    short: int  # widths up to this: several rows for a warp; a backward's sums need the registers of two
    short_elements: int  # of a program's rows together
    short_forward: RowLaunch  # its `rows` follow from `short_elements`
    short_backward: RowLaunch
    most_warps: int  # of a program that takes whole rows
    least_summed: int  # steps of a program that has partial sums: each writes a row of them, whatever it has added up


@dataclass(frozen=True, slots=True)
class WideLaunch:
    """How kernels of rows that no program holds are launched (docs/results/LOG.md, rows of 123200)."""

    chunk: int  # columns of a forward at a step
    forward: RowLaunch
    stages_read: int  # matrices and vectors read at each step, above which a forward has one stage less
    tile: tuple[int, int]  # rows and columns of a backward at a step
    backward: RowLaunch  # `warps` at most
    warp_elements: int  # of a backward's tile, for each warp
    least_warps: int


@dataclass(frozen=True, slots=True)
class TileLaunch:
    """How kernels of square tiles, partial sums and products of rows are launched."""

    requantize_tile: int  # rows and columns that a program of `requantize_transpose` takes
    requantize_warps: int
    quantise_tile: int  # of a program of `cast_transpose`
    quantise_warps: int
    parts: int  # of partial maxima read at a step
    reduce_columns: int  # of a program
    reduce_rows: int  # read at a step, so that every thread has 8 reads on their way
    reduce_warps: int
    products_columns: int  # of a program of `products`, at most; it takes one row
    cast_columns: int  # of a fused cast and transpose, at least: whole blocks
    cast_elements: int  # of its tile
    cast_warps: int


@dataclass(frozen=True, slots=True)
class FmInteractionLaunch:
    """How kernels of FM interactions are launched; measured on 64 x 128 and 128 x 256 (docs/results/LOG.md)."""

    fetched: int  # elements of a sample up to which three are on their way into shared memory, beyond them two
    forward: tuple[int, int]  # warps and programs
    chunk: int  # columns that a backward takes at a step, at most
    few: int  # embeddings up to which a backward takes `backward_few`
    backward_few: tuple[int, int]
    backward: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ConcatNormLaunch:
    """How a norm of a concatenation is launched; measured 64, 128 and 256 wide (docs/results/LOG.md)."""

    wide: int  # widths above this take one row at a step
    wide_warp_elements: int
    wide_elements: int  # of the rows of all programs on a multiprocessor
    most_warps: int
    elements: int  # of a program's rows together
    launch: tuple[int, int]  # warps and programs
    summed_elements: int  # of a backward with sums for a weight or a bias, which stay in registers
    summed: tuple[int, int]


@dataclass(frozen=True, slots=True)
class CrossLaunch:
    """How a cross layer's backward is launched; measured 3456 and 1024 wide (docs/results/LOG.md)."""

    columns: int  # of a block, at most
    elements: int  # of a block
    warps: int
    programs: int  # for all blocks of columns together


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is tiled and launched."""

    rows: int  # of a tile of the result
    columns: int  # of a tile of the result
    depth: int  # elements contracted at a step
    stages: int  # steps on their way from memory
    warps: int  # of a program
    programs: int = 1  # on each multiprocessor, at most
    flattened: bool = True  # whether the steps of a program's next tile are fetched while this one is written


@dataclass(frozen=True, slots=True)
class Tilings:
    """Every tiling that a rendered product may have, the first of each its usual one."""

    e4m3: tuple[Tiling, ...]
    small: tuple[Tiling, ...]  # at most 64 columns, or the power of two that holds them
    bfloat16: tuple[Tiling, ...]
    whole_rows: tuple[Tiling, ...]  # of 256 columns, two of them side by side; narrower ones take their power of two
    whole_rows_bfloat16: tuple[Tiling, ...]
    # Rows that are not aligned are read by pointers, and those take up registers: smaller tiles, few to choose from.
    pointers: tuple[Tiling, ...]
    whole_rows_pointers: tuple[Tiling, ...]
    grouped: tuple[Tiling, ...]  # one program a tile: products that are many and small
    grouped_pointers: tuple[Tiling, ...]


@dataclass(frozen=True, slots=True)
class LaunchTables:
    """How each family of rendered kernels is launched on a device."""

    rows: RowLaunches
    wide: WideLaunch
    tiles: TileLaunch
    fm_interaction: FmInteractionLaunch
    concat_norm: ConcatNormLaunch
    cross: CrossLaunch
    products: Tilings
