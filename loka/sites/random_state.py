"""Python's, torch's and numpy's random state around a model author's code."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SEED = 0


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state after the block: of Python, of torch on the CPU, and of numpy if it is imported."""
    python, numbers = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(numbers)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def seeded(seed: int = _SEED) -> Iterator[None]:
    """As `random_state_kept`, with the same seed each time, so that inputs that are drawn give the same plan."""
    with random_state_kept():
        random.seed(seed)
        torch.default_generator.manual_seed(seed)
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed(seed % 2**32)  # all that numpy takes
        yield
