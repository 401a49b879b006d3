"""Specification of a device: its limits and rates, host costs, and launch parameters of rendered kernels.

The modules `*_launch` of `loka.kernels.fused` select among the launches by what a kernel computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Execution(StrEnum):
    """How a training loop runs the model."""

    EAGER = "eager"
    COMPILED = "compiled"  # under torch.compile, without a CUDA graph
    REDUCE_OVERHEAD = "reduce-overhead"  # torch.compile's mode: CUDA graphs of what is compiled
    GRAPH = "graph"  # the whole step captured as a CUDA graph

    @property
    def replays(self) -> bool:
        """True if CUDA graphs are replayed: launches cost the host nothing."""
        return self in (Execution.REDUCE_OVERHEAD, Execution.GRAPH)


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Host time of one launch, microseconds, with all that stands around it: autograd, allocations, the wrapper.

    A launch is a GEMM or a part of a workload (`loka.plan.select.workload`), the unit that plans count: smaller kernels
    beside them, as of residuals or bias gradients, are in the average.
    """

    measured_on: str
    torch: Mapping[Execution, float]  # of the model's own operations; none for what is replayed
    generated: Mapping[Execution, float]  # of generated kernels and FP8 GEMMs; likewise


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """Launch of a kernel over whole rows."""

    rows: int  # of a program at a step, a power of two
    warps: int  # of a program
    programs: int  # most on each multiprocessor
    held: bool = True  # weight, bias and add stay in registers; otherwise each step reads them again (L1 cache)
    stages: int = 1  # steps whose rows are prefetched into shared memory at once
    chunk: int = 0  # columns at a step, a power of two, of rows that no program holds


@dataclass(frozen=True, slots=True)
class RowLaunches:
    """`RowLaunch` by the width that a program holds, a power of two; wider rows use `widest`.

    Measured at widths 512, 1024, 2048 and 4096 (docs/results/LOG.md, "rendered kernels" and "rows fetched ahead"), for
    norms over columns from 1024 ("BatchNorm on an H200"); others are chosen by registers: a thread holds at most 32
    elements of a row.
    """

    forward: Mapping[int, RowLaunch]
    forward_simple: Mapping[int, RowLaunch]  # without a norm over the whole row: a row waits only for its maximum
    # Under one scale for the whole matrix each program reads the maxima of all: few programs, many rows each. Where a
    # width is missing, as above.
    forward_tensorwise: Mapping[int, RowLaunch]
    backward: Mapping[int, RowLaunch]  # to a plain matrix; measured with the reduction of its sums, like the next
    backward_quantized: Mapping[int, RowLaunch]  # to FP8
    backward_simple: Mapping[int, RowLaunch]  # without column sums: as many programs as possible
    forward_columns: Mapping[int, RowLaunch]  # of a norm over columns, whose vectors are read instead of sums of rows
    backward_columns: Mapping[int, RowLaunch]  # the same, of its gradient, without the sums
    widest: RowLaunch
    streaming: int  # at this width, kernels with several matrices and no norm, or with an extra matrix or sum, ...
    streaming_forward: RowLaunch  # ... use these: as many programs as registers allow
    streaming_backward: RowLaunch
    loaded_backward: RowLaunch  # with an extra sum or matrix, where four warps would spill
    short: int  # widths up to this: several rows per warp; a backward's sums need the registers of two
    short_elements: int  # of all rows of a program
    short_forward: RowLaunch  # `rows` is computed from `short_elements`
    short_backward: RowLaunch
    most_warps: int  # of a program over whole rows
    least_summed: int  # least steps of a program with partial sums: it writes a row of them, however few it added


@dataclass(frozen=True, slots=True)
class WideLaunch:
    """Launch of kernels over rows too wide for one program (docs/results/LOG.md, rows of 123200)."""

    chunk: int  # columns of a forward's step
    forward: RowLaunch
    stages_read: int  # with more matrices and vectors read at each step, a forward has one stage less
    tile: tuple[int, int]  # rows and columns of a backward's step
    backward: RowLaunch  # `warps` is the most
    warp_elements: int  # of a backward's tile, per warp
    least_warps: int


@dataclass(frozen=True, slots=True)
class SquareLaunch:
    """Launch of transposes and casts with a transpose: one square tile per program."""

    tile: int  # rows and columns
    warps: int  # of a program
    chunk: int  # partial maxima read at a step


@dataclass(frozen=True, slots=True)
class WeightsLaunch:
    """Launch of a chain's weights' quantization: whole rows, in blocks of one size for all weights."""

    warp_elements: int  # of a block, per warp
    least_columns: int  # that a row of a block counts as
    most_warps: int  # of a program
    warps: int  # of a weight's programs on each multiprocessor, at most


@dataclass(frozen=True, slots=True)
class ReduceLaunch:
    """Launch of column sums: one block of columns per program."""

    columns: int
    rows: int  # read at a step
    warps: int  # of a program


@dataclass(frozen=True, slots=True)
class FusedCastLaunch:
    """Launch of a producer that writes both copies: one tile of whole blocks per program."""

    columns: int  # least number of a tile
    elements: int  # of a tile
    warps: int


@dataclass(frozen=True, slots=True)
class FmLaunch:
    """Launch of FM interactions of up to so many embeddings, padded to a power of two."""

    embeddings: int
    forward: tuple[int, int]  # warps and programs
    backward: tuple[int, int]
    chunk: int  # most columns of a backward's step
    chunk_passed: int  # the same where a gradient of x is added


@dataclass(frozen=True, slots=True)
class FmInteractionLaunch:
    """Launch of FM interactions; measured at 32 to 64 x 128 and 128 x 256 (docs/results/LOG.md)."""

    fetched: int  # elements of a sample up to which three samples are prefetched into shared memory, above it two
    stages: int  # most steps of a backward that are prefetched
    sizes: tuple[FmLaunch, ...]  # by embeddings, the last for the most that there are


@dataclass(frozen=True, slots=True)
class ConcatNormLaunch:
    """Launch of a norm of a concatenation; measured at widths 64, 128 and 256 (docs/results/LOG.md)."""

    wide: int  # widths above this process one row at a step
    wide_warp_elements: int
    wide_elements: int  # of the rows of all programs on a multiprocessor
    most_warps: int
    elements: int  # of all rows of a program
    launch: tuple[int, int]  # warps and programs
    summed_elements: int  # the same for a backward with sums for a weight or a bias, which stay in registers
    summed: tuple[int, int]


@dataclass(frozen=True, slots=True)
class DotLaunch:
    """Launch of dot interactions; swept at six sizes (docs/results/LOG.md, "dot interactions")."""

    warps: tuple[tuple[int, int], ...]  # (from so many elements of a sample or its products on, warps), the most first
    programs: int  # on each multiprocessor
    stages: int  # samples that are prefetched


@dataclass(frozen=True, slots=True)
class LaunchTables:
    """Launch parameters of all families of rendered kernels on a device."""

    rows: RowLaunches
    wide: WideLaunch
    weights: WeightsLaunch
    transpose: SquareLaunch
    cast_transpose: SquareLaunch
    fused_cast_transpose: FusedCastLaunch
    reduce: ReduceLaunch
    products_columns: int  # most of a program of `products`, which processes one row
    maxima_chunk: int  # partial maxima that a row kernel reads at a step
    fm_interaction: FmInteractionLaunch
    concat_norm: ConcatNormLaunch
    dot: DotLaunch


ALIGNMENT = 16  # elements, of every FP8 GEMM's contraction and of its result's columns, at least
OCP = "e4m3fn"  # e4m3 by the OCP specification, in torch's words; "e4m3fnuz" has another bias, and the maximum 240


@dataclass(frozen=True, slots=True)
class ScaledMMLimits:
    """Limits of `torch.nn.functional.scaled_mm` on a device; scalings by their names in policies."""

    pairs: frozenset[tuple[str, str]]  # scalings of the two operands
    precise_e4m3: frozenset[str]  # scalings with e4m3 operands only, and without fast accumulation
    alignment: Mapping[str, int] = field(default_factory=dict)  # scaling -> of what `multiple` is about, where not 16
    row_alignment: Mapping[str, int] = field(default_factory=dict)  # scaling -> alignment of the first operand's rows
    e4m3: str = OCP  # the type that the tensor cores multiply; LoKA quantizes to OCP's alone
    rounded: frozenset[str] = frozenset()  # scalings whose results are rounded to bfloat16, whatever is asked for
    swizzled: bool = True  # scales of blockwise_1x32 are read in tiles of 32 x 4 x 4, otherwise row by row

    def multiple(self, scaling: str) -> int:
        """The number that the contraction and the result's columns must be a multiple of."""
        return self.alignment.get(scaling, ALIGNMENT)

    def row_multiple(self, scaling: str) -> int:
        """The number that the first operand's rows must be a multiple of."""
        return self.row_alignment.get(scaling, 1)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One target device: an entry of `loka.devices.targets`.

    Rates were measured on `measured_on`. Of a device that nothing was measured on they are those of its data sheet, as
    are the peaks without sparsity; launches are then another device's.
    """

    name: str  # in policies: "h100"
    title: str  # in messages: "H100"
    pattern: str  # regular expression for words of the name that CUDA or ROCm gives the device
    architecture: str  # "Hopper"
    capability: tuple[int, int]  # compute capability, or the number that torch gives for an AMD architecture
    triton: tuple[str, int | str, int]  # what Triton compiles for: backend, architecture, threads of a warp
    multiprocessors: int
    shared_bytes: int  # most shared memory of a block
    l2_bytes: int
    measured_on: str  # CUDA's name of the device; "" if nothing was measured on one
    data_sheet: str  # the source of rates that were not measured; "" if they were
    bandwidth: float  # bytes a second, read plus written, of a copy of 1 GiB
    interaction_bandwidth: float  # the same of kernels of FM interactions and concat norms
    flops: Mapping[str, float]  # per second, by dtype of the operands; "e4m3 fast" with fast accumulation
    scaled_mm: ScaledMMLimits
    launches: LaunchTables
    host: HostCosts
    is_reference: bool = False  # plans use the reference path, which runs every recipe without a GPU

    def is_named(self, name: str) -> bool:
        """True if this is the device of that name ("NVIDIA H200"). A MIG partition of a GPU is not."""
        return re.search(rf"\b(?:{self.pattern})\b", name, re.IGNORECASE) is not None and "MIG" not in name

    @property
    def lacks_measurements(self) -> bool:
        """True for a GPU that nothing was measured on: what a plan decides for it is unknown until someone records."""
        return not (self.measured_on or self.is_reference)
