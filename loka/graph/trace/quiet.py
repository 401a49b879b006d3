"""Runs of a model on a few samples leave no warnings of torch on stderr: they are about LoKA's runs, not the user's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings. Also a decorator."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
