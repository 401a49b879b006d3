"""Runs of a model on a few samples leave no warnings of torch on stderr: they are about LoKA's runs, not the user's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings, and what torch.fx logs of models that ask whether they are traced. Also a decorator."""
    log = logging.getLogger("torch.fx._symbolic_trace")
    disabled = log.disabled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.disabled = True
        try:
            yield
        finally:
            log.disabled = disabled
