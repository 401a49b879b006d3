"""How much memory the results of operations hold at a time, on any device: for the tests of what a chain keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Sees each result while it is entered; what an operation holds inside does not count. `peak` is in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        results = func(*args, **kwargs)
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self._held:
                    self._held[key] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return results


def peak_of(step: Callable[[], object]) -> int:
    """Bytes that the results of a step's operations hold at most."""
    with torch.autograd.set_multithreading_enabled(False), Live() as live:
        step()
    return live.peak
