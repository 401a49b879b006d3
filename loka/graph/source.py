"""Where a module's forward and class are from: torch or the user, hooks around it, the script that runs.

Imports only torch and the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

_SIMPLE = (int, str, bool, float, complex, type(None), torch.dtype, torch.device)


def has_running(module: nn.BatchNorm1d) -> bool:
    """True for a BatchNorm whose running statistics each batch moves by a momentum."""
    return module.track_running_stats and module.running_mean is not None and module.momentum is not None


def has_hooks(module: nn.Module) -> bool:
    """True if calling the module runs hooks besides its forward."""
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


def has_own_forward(module: nn.Module) -> bool:
    """True for a module with a forward that is not torch's."""
    return not (getattr(type(module).forward, "__module__", None) or "").startswith("torch.")


def same_type(cls: type, planned: str) -> bool:
    """True if a class is the one of a plan's qualified name, which knows a class of `__main__` by its file's name."""
    return qualified(cls) == planned or (in_script(cls.__module__) and qualified(cls, script_in((planned,))) == planned)


def is_simple(value: object) -> bool:
    """True for plain data, or a tuple of plain data: equal values have equal reprs."""
    if isinstance(value, tuple):
        return all(is_simple(item) for item in value)
    return isinstance(value, _SIMPLE)


def qualified(thing: object, script: str = "") -> str:
    """`package.module.Name` of a class or function; `script.Name` if the script that runs defines it."""
    name = getattr(thing, "__qualname__", None) or getattr(thing, "__name__", None) or type(thing).__qualname__
    return f"{module_name(getattr(thing, '__module__', None), script)}.{name}"


def module_name(name: str | None, script: str) -> str | None:
    """A module's name; `script`, unless it is "", for the script that runs."""
    return script if script and in_script(name) else name


_MAIN = "__main__"
_NAMES = frozenset({_MAIN, "__mp_main__"})  # the second in processes that multiprocessing has spawned


def in_script(module: str | None) -> bool:
    """True if a module of this name is the script that runs."""
    return module in _NAMES


def script_file() -> Path | None:
    """The absolute path of the script that runs; None in an interactive session or a notebook."""
    file = getattr(sys.modules.get(_MAIN), "__file__", None)
    return Path(os.path.abspath(file)) if file else None


def script_in(planned: Iterable[str]) -> str:
    """The module name under which a plan knows the script that runs: "train", or "package.train".

    Args:
        planned: Qualified names in the plan, such as "package.train.Ranker".

    Returns:
        The first module among them whose name is the end of the script's path; without one, the name of the script's
        file. "" if there is no such file.
    """
    file = script_file()
    if file is None:
        return ""
    path = file.with_suffix("").parts
    for name in planned:
        parts = tuple(name.split("."))
        for end in range(len(parts) - 1, 0, -1):
            if parts[:end] == path[-end:]:
                return ".".join(parts[:end])
    return file.stem
