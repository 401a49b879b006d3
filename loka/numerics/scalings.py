"""Tables of the scalings: the block that shares a scale, and the pairs that a GEMM's two operands can have.

Quantizers, labels, generated code and a policy's checks read these tables; a new scaling is a member of `Scaling` and
an entry in each.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.numerics.enums import Operand, Scaling


@dataclass(frozen=True, slots=True)
class Block:
    """The rows and columns of a matrix (R, C) that share one scale; None means all of them."""

    rows: int | None
    columns: int | None
    label: str  # in names and tables: rowwise, 1x128
    described: str  # in generated docstrings

    def count(self, rows: int, columns: int) -> tuple[int, int]:
        """Number of blocks of a (rows, columns) matrix in each dimension: the shape of its scales."""
        return _count(rows, self.rows), _count(columns, self.columns)


def _count(size: int, block: int | None) -> int:
    return 1 if block is None else -(-size // block)


BLOCKS: dict[Scaling, Block] = {
    Scaling.TENSORWISE: Block(None, None, "tensorwise", "one scale"),
    Scaling.ROWWISE: Block(1, None, "rowwise", "one scale a row"),
    Scaling.BLOCKWISE_1X128: Block(1, 128, "1x128", "one scale for 128 neighbours in a row"),
    Scaling.BLOCKWISE_128X128: Block(128, 128, "128x128", "one scale for each square of 128 x 128"),
    Scaling.BLOCKWISE_1X32: Block(1, 32, "1x32", "one scale for 32 neighbours in a row"),
    Scaling.NVFP4: Block(1, 16, "nvfp4", "one scale for 16 neighbours in a row"),
}
PROBED = frozenset({Scaling.NVFP4})  # simulated for the Probe, in fprop; never planned
TOGETHER = frozenset(
    {
        frozenset({Scaling.TENSORWISE}),
        frozenset({Scaling.ROWWISE}),
        frozenset({Scaling.BLOCKWISE_1X128}),
        frozenset({Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128}),
        frozenset({Scaling.BLOCKWISE_1X32}),
        frozenset({Scaling.NVFP4}),
    }
)  # scalings of the two operands of one GEMM, in either order


def block_of(scaling: Scaling) -> Block:
    """The block of a scaling."""
    # Look up by value: torch.compile guards on that but not on a dictionary key, so code compiled for one scaling would
    # run for another.
    return BLOCKS[Scaling(scaling.value)]


def blockwise(operand: Operand) -> Scaling:
    """The blockwise scaling for an operand: 128 x 128 squares for a weight, 1 x 128 for the others."""
    return Scaling.BLOCKWISE_128X128 if operand is Operand.WEIGHT else Scaling.BLOCKWISE_1X128


def alike() -> tuple[Scaling, ...]:
    """The scalings that both operands of a GEMM can have at once in a plan."""
    return tuple(scaling for scaling in Scaling if frozenset({scaling}) in TOGETHER and scaling not in PROBED)


def mixed() -> tuple[tuple[Scaling, ...], ...]:
    """The pairs of different scalings that the two operands of a GEMM can have."""
    return tuple(sorted(tuple(sorted(pair, key=list(Scaling).index)) for pair in TOGETHER if len(pair) > 1))
