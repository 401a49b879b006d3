"""How often each planned GEMM ran, and on which kernel: a process-wide table of counters, keyed by number.

This is the only process-wide table of the project. A GEMM counts itself inside its operator (`gemm_operator`), because
only what happens inside an operator still happens when the model is compiled; and an operator's arguments are tensors
and numbers, so it can carry the number of a counter but no object that holds one. The table is that object.

A site takes three neighbouring numbers: fprop, dgrad (+ 1) and wgrad (+ 2). Under a CUDA graph an operator runs, and
counts, while the graph is captured, and not when it is replayed: a count above zero says that the kernel is in the
graph. Counting is safe between threads (backward runs in one of its own on a GPU).
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

from loka.errors import InputError

_lock = Lock()
_counts: dict[int, dict[str, int]] = {}  # by number, then by kernel: those that ran at least once since their reset
_next = 0


def new_counters(count: int) -> int:
    """Take `count` numbers that nobody else has, and return the first; the others follow it.

    Raises InputError where count is not positive.
    """
    global _next
    if count < 1:
        raise InputError(f"ticks: at least one number must be taken, not {count}")
    with _lock:
        first = _next
        _next += count
    return first


def increment(number: int, kernel: str) -> None:
    """Count one run on the kernel of that name in the catalogue."""
    with _lock:
        found = _counts.setdefault(number, {})
        found[kernel] = found.get(kernel, 0) + 1


def count(number: int) -> int:
    """Runs counted since the number was taken or last reset, on whatever kernel."""
    return sum(counts(number).values())


def counts(number: int) -> dict[str, int]:
    """The same by kernel, for those that ran."""
    with _lock:
        return dict(_counts.get(number, {}))


def reset(numbers: Iterable[int]) -> None:
    """Set counters back to zero."""
    with _lock:
        for number in numbers:
            _counts.pop(number, None)
