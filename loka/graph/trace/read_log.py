"""The attributes that a forward reads from its modules while it is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from loka.graph.reads import NAMESPACE


class ReadLog:
    """Records the attributes that a forward reads from its modules while it is traced, including missing ones."""

    def __init__(self, module: nn.Module) -> None:
        self.names: dict[str, set[str]] = {}
        self._paths = {id(child): path for path, child in module.named_modules()}
        self._listening = False

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While active, reads are recorded from `listen` on, except inside `unheard`."""
        before = vars(nn.Module).get("__getattribute__")
        own = before or object.__getattribute__

        def read(module: nn.Module, name: str) -> Any:
            if self._listening:
                self._note(module, name)
            return own(module, name)

        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            self._listening = False
            if before is None:
                del nn.Module.__getattribute__
            else:
                nn.Module.__getattribute__ = before  # type: ignore[method-assign]

    def listen(self) -> None:
        """Starts recording: the forward is about to run."""
        self._listening = True

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Reads of the tracer itself, which are not recorded."""
        before, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = before

    def _note(self, module: nn.Module, name: str) -> None:
        path = self._paths.get(id(module))
        if path is None:
            return
        if name == NAMESPACE and sys._getframe(2).f_globals.get("__name__") == nn.Module.__module__:
            return  # torch's own look-up of a child, Parameter or buffer, which is recorded under its own name
        self.names.setdefault(path, set()).add(name)
