"""Garbage collection put off, where it would come at the wrong time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_gc() -> Iterator[None]:
    """Without garbage collection inside; afterwards it is on where it was."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
