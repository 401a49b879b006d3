"""The table of scalings: every scaling has a block, and policies and kernels know the same pairs."""

from __future__ import annotations

import pytest

from loka.numerics.enums import Scaling
from loka.numerics.scalings import BLOCKS, TOGETHER, alike, block_of, mixed


def test_every_scaling_has_its_block_and_a_neighbour() -> None:
    assert set(BLOCKS) == set(Scaling)
    assert {scaling for pair in TOGETHER for scaling in pair} == set(Scaling)
    labels = [block.label for block in BLOCKS.values()]
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (Scaling.TENSORWISE, (1, 1)),
        (Scaling.ROWWISE, (200, 1)),
        (Scaling.BLOCKWISE_1X128, (200, 3)),
        (Scaling.BLOCKWISE_128X128, (2, 3)),
        (Scaling.BLOCKWISE_1X32, (200, 10)),
        (Scaling.NVFP4, (200, 19)),
    ],
)
def test_blocks_of_a_matrix(scaling: Scaling, expected: tuple[int, int]) -> None:
    assert block_of(scaling).count(200, 300) == expected
    empty = block_of(scaling).count(0, 0)
    assert all(count <= of for count, of in zip(empty, expected, strict=True))


def test_which_scalings_go_together() -> None:
    assert alike() == (Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_1X32)
    assert mixed() == ((Scaling.BLOCKWISE_1X128, Scaling.BLOCKWISE_128X128),)
