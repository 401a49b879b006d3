"""How much longer this core takes for Python than the core that bounds on processor time are stated for."""

from __future__ import annotations

import gc
import time

# Of that core. Planning a thousand sites took 0.9 s on the one that the bounds were set on and 3.0 s on one that takes
# 0.315 s for `_work`, so that this errs on the strict side.
_REFERENCE_SECONDS = 0.13


class _Item:
    __slots__ = ("name", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = str(number)


def _work() -> float:
    """Seconds of this process for small objects, dictionaries, sorting and text: what planning consists of."""
    start = time.process_time()
    for _ in range(30):
        by_name = {item.name: item for item in map(_Item, range(10_000))}
        "".join(item.name for item in sorted(by_name.values(), key=lambda item: item.name))
    return time.process_time() - start


def slowness() -> float:
    """Seconds that this core takes for one second's work of the reference core; at least 1."""
    collected = gc.isenabled()
    gc.disable()  # its passes take as long as the process has objects
    try:
        return max(1.0, min(_work() for _ in range(5)) / _REFERENCE_SECONDS)
    finally:
        if collected:
            gc.enable()
