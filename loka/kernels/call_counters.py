"""Number of runs of each planned GEMM, by kernel: a process-wide table of counters, keyed by counter id.

This is the only process-wide table of the project. A GEMM counts its calls inside its operator (`gemm_operator`) or,
where the compiler calls the GEMM itself, in the operator `loka_counters::increment`, which takes the GEMM's result:
only code inside an operator still runs when the model is compiled, and what an operator takes is not removed as dead
code. An operator's arguments are tensors and numbers, so it can take a counter id but no object with a counter; the
table maps the one to the other.

A site takes three neighbouring ids: fprop, dgrad (+ 1) and wgrad (+ 2). Under a CUDA graph an operator runs, and
counts, while the graph is captured, and not when it is replayed: a count above zero says that the kernel is in the
graph. Counting is thread-safe (on a GPU, backward runs in its own thread).
"""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock

import torch
from torch import Tensor

from loka.errors import InputError

NAMESPACE = "loka_counters"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

_lock = Lock()
_counts: dict[int, dict[str, int]] = {}  # by id, then by kernel: those that ran since the last reset
_next = 0


def new_counters(count: int) -> int:
    """Reserve `count` consecutive ids and return the first.

    Raises InputError where count is not positive.
    """
    global _next
    if count < 1:
        raise InputError(f"ticks: at least one number must be taken, not {count}")
    with _lock:
        first = _next
        _next += count
    return first


def leave_out(number: int) -> None:
    """Reserve no ids below `number` from now on.

    Compiled code contains ids: with the same ones, another process finds it in the compiler's cache.
    """
    global _next
    with _lock:
        _next = max(_next, number)


def increment(number: int, kernel: str) -> None:
    """Count one run on a kernel, by its name in the catalogue."""
    with _lock:
        found = _counts.setdefault(number, {})
        found[kernel] = found.get(kernel, 0) + 1


def count(number: int) -> int:
    """Runs since the id was reserved or last reset, on all kernels."""
    return sum(counts(number).values())


def counts(number: int) -> dict[str, int]:
    """The same by kernel, for kernels that ran."""
    with _lock:
        return dict(_counts.get(number, {}))


def reset(numbers: Iterable[int]) -> None:
    """Set counters back to zero."""
    with _lock:
        for number in numbers:
            _counts.pop(number, None)


def increment_after(result: Tensor, number: int, kernel: str) -> None:
    """Count one run of a GEMM, in a graph that is being traced, whenever the graph has computed `result`."""
    torch.ops.loka_counters.increment(result, number, kernel)


def _increment_after(result: Tensor, number: int, kernel: str) -> None:
    increment(number, kernel)


_library.define("increment(Tensor result, SymInt number, str kernel) -> ()", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
_library.impl("increment", _increment_after, "CPU")  # type: ignore[no-untyped-call]
_library.impl("increment", _increment_after, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("loka_counters::increment", lambda result, number, kernel: None, lib=_library)
torch.fx.node.has_side_effect(torch.ops.loka_counters.increment.default)
