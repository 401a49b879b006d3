"""Generated functions compiled by themselves, for `Patch.compile`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def compile_functions(generated: type[nn.Module], options: Mapping[str, Any]) -> None:
    """Put compiled functions in the place of those of `kernels` that a generated class's forward calls.

    Forwards look the functions up in their module at each call, so those of other models change too.
    """
    kernels = sys.modules[generated.__module__.rpartition(".")[0] + ".kernels"]
    for name in generated.forward.__code__.co_names:
        found = vars(kernels).get(name)
        if inspect.isfunction(found):
            setattr(kernels, name, torch.compile(inspect.unwrap(found), fullgraph=True, **options))
