"""Files with one bit flipped, as disks and copies damage them."""

from __future__ import annotations

import random
from collections.abc import Iterator

FLIPS = 200


def flipped(data: bytes, count: int = FLIPS, seed: int = 15) -> Iterator[bytes]:
    """`count` copies of `data`, a bit of each flipped, the same for the same seed."""
    chance = random.Random(seed)
    for bit in chance.sample(range(8 * len(data)), count):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)
