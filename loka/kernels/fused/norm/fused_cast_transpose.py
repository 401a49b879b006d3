"""Kernels that write a quantized result and its transpose in one pass, tile by tile.

With a static scale, quantizing an element needs nothing else of its row; only the operations before it may. With a
vector, a block_norm and an activation, a tile of the matrix is enough, and its transpose is written with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantization import Quantization

WIDEST_BLOCK = 512  # of a block_norm's blocks: a tile holds whole blocks
MOST_TILES = 2**16  # on a multiprocessor, one below the other: each row of tiles has its own programs


@dataclass(frozen=True, slots=True)
class FusedCastTranspose:
    """The kernel of a spec that also returns `transposed`, its values transposed: (width, M), after the values.

    Everything else is as in the spec. Raises InputError for a spec that needs more than a tile.
    """

    spec: NormForward | NormBackward

    def __post_init__(self) -> None:
        if not fits(self.spec):
            raise InputError(
                f"{self.spec.function} cannot be written as is and transposed from a tile: that takes a static scale "
                f"and overflow_stats, blocks of {WIDEST_BLOCK} at most or no norm, and no matrices in sums and products"
            )

    @property
    def function(self) -> str:
        """The operator's name."""
        return f"{self.spec.function}_cast_transpose_{self.width}"

    @property
    def width(self) -> int:
        """Columns of the values."""
        return self.spec.width

    @property
    def how(self) -> Quantization:
        """Quantization mode of the values."""
        return self.spec.how

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return self.spec.parameters

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        values, *rest = self.spec.results
        return (values, "transposed", *rest)


def fits(spec: NormForward | NormBackward) -> bool:
    """True if a tile is enough for a spec."""
    over_more = spec.traits.over_rows or spec.traits.over_columns
    if not (spec.quantize and spec.how.overflow_stats) or over_more or spec.times or spec.multiplied or spec.dropout:
        return False
    if spec.traits.over_blocks and spec.block > WIDEST_BLOCK:
        return False
    more = (
        spec.residual or spec.keep
        if isinstance(spec, NormForward)
        else spec.summed or spec.residual_grad_in or spec.residual_grad_out
    )
    return not more


@dataclass(frozen=True, slots=True)
class TransposeTile:
    """Tile of a program, and its warps."""

    rows: int
    columns: int
    warps: int


def tile_of(spec: NormForward | NormBackward, device: DeviceSpec = DEFAULT) -> TransposeTile:
    """The tile for a spec: whole blocks, and registers for two programs on a multiprocessor; not tuned."""
    launch = device.launches.fused_cast_transpose
    columns = max(launch.columns, spec.block if spec.norm else 0)
    return TransposeTile(launch.elements // columns, columns, launch.warps)
