"""Triton's interpreter made faster: it exchanges the functions of triton.language once a launch.

Left alone it does so again at every call of one function by another, to the same effect, after listing all of
triton.language: a third of the time of these programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


class PatchOnce:
    """`_patch_lang`, which does nothing for modules that were patched since the launch under way began."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch, self._launch = patch, interpreter._LangPatchScope()
        self._patched: set[frozenset[str]] = set()

    def __call__(self, function: Any) -> Any:
        modules = frozenset(
            value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core
        )  # a kernel sees the one, the functions of Triton's own library the other
        starts = not self._launch._changes  # a launch restores what it changed when it ends
        if starts:
            self._patched.clear()
        elif modules in self._patched:
            return interpreter._LangPatchScope()
        self._patched.add(modules)
        scope = self._patch(function)
        if starts:
            self._launch = scope
        return scope


def patch_once() -> None:
    """For this process; a Triton whose interpreter keeps no list of its changes is left as it is."""
    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = PatchOnce(interpreter._patch_lang)
