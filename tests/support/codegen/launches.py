"""The kernels that a step launches, counted on the CPU: a call of an operator there is a launch on a GPU."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from loka.kernels.fused import operators


class Launches(TorchDispatchMode):
    """Counts calls of generated kernels by name, without digests, and of FP8 GEMMs."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.called: list[str] = []
        self.operands: Counter[tuple[str, int]] = Counter()  # by name, and by how many tensors a list of them has
        self.gemms = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        namespace, _, name = function.name().partition("::")
        if namespace == operators.NAMESPACE:
            self.called.append(re.sub(r"_[0-9a-f]{8}(\.\w+)?$", "", name))
            self.kernels[self.called[-1]] += 1
            self.operands[self.called[-1], len(arguments[0]) if isinstance(arguments[0], list) else 0] += 1
        self.gemms += namespace == "loka" and name.startswith("scaled_mm")
        return function(*arguments, **(keywords or {}))
