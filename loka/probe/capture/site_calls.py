"""Finds the site that a torch function's call belongs to, by the weight that it multiplies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from os.path import basename
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from loka.probe.capture.live_sites import LiveModel, LiveSite, WeightKey, weight_key
from loka.probe.capture.operand_views import OperandProduct, find_product
from loka.sites.callables import is_library_file
from loka.sites.site import GemmKind


class _Running(threading.local):
    """Names of the modules whose forward runs in this thread; a checkpoint's recomputation may have its own thread."""

    def __init__(self) -> None:
        self.names: list[str] = []


class SiteCalls:
    """The sites of a live model by weight; between `start` and `stop` it also tells apart those that share one."""

    def __init__(self, live: LiveModel) -> None:
        self._sites: dict[WeightKey, list[LiveSite]] = {}
        for site in (*live.sites, *live.others):
            self._sites.setdefault(site.key, []).append(site)
        self._running = _Running()
        self._hooks: list[RemovableHandle] = []

    def start(self) -> None:
        """Follow which modules run, as far as sites share a Parameter."""
        self._running = _Running()
        for live in (each for sharing in self._sites.values() if len(sharing) > 1 for each in sharing):
            if live.module is not None:
                self._hooks += _tell(live.module, _module_name(live), self._running)

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def product(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OperandProduct | None:
        """The product of an input and a site's Parameter in a call; None for any other call."""
        return find_product(function, args, kwargs, self._is_weight)

    def sharing(self, product: OperandProduct) -> list[LiveSite]:
        """The sites of a product's Parameter."""
        return self._sites[weight_key(product.weight)]

    def choose(self, product: OperandProduct, frame: FrameType) -> LiveSite | None:
        """The site that a call belongs to, made in `frame`; None if that is ambiguous."""
        candidates = self.sharing(product)
        fitting = [live for live in candidates if (live.site.k, live.site.n) == (product.k, product.n)]
        if len(candidates) == 1 or not fitting:
            return fitting[0] if fitting else None
        running = self._running.names[-1] if self._running.names else None
        for live in fitting:
            if live.site.kind is GemmKind.LINEAR and live.site.name == running:
                return live
        where = _place(frame)
        there = [live for live in fitting if live.site.kind is not GemmKind.LINEAR and live.site.where == where]
        if len(there) > 1:
            there = [live for live in there if live.site.owner == running]
        return there[0] if len(there) == 1 else None

    def _is_weight(self, value: Any) -> bool:
        return isinstance(value, Tensor) and weight_key(value) in self._sites


def _module_name(live: LiveSite) -> str:
    return live.site.name if live.site.kind is GemmKind.LINEAR else live.site.owner


def _tell(module: nn.Module, name: str, running: _Running) -> tuple[RemovableHandle, RemovableHandle]:
    """Hooks that record a module's name while its forward runs."""

    def entered(module: nn.Module, args: Any) -> None:
        running.names.append(name)

    def left(module: nn.Module, args: Any, out: Any) -> None:
        if name in running.names:
            del running.names[len(running.names) - 1 - running.names[::-1].index(name) :]

    return module.register_forward_pre_hook(entered), module.register_forward_hook(left, always_call=True)


def _place(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame of user code, as in `Site.where`."""
    while frame is not None:
        if not is_library_file(frame.f_code.co_filename):
            return f"{basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
