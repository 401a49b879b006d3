"""Records one training step: the operands of the sites' GEMMs, forward and backward, go into their trackers.

Nothing is installed in the model. While a sampled step runs, a mode sees each torch function that is called, so the
model must run eagerly and in Python; `Probe` ensures that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from os.path import basename
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from loka.errors import InputError, LokaError
from loka.probe.capture import mode_stack
from loka.probe.capture.live_sites import LiveModel, LiveSite
from loka.probe.capture.operand_views import OperandProduct, View, find_product, rows_of, take_rows
from loka.probe.capture.patched_operands import Patched
from loka.probe.capture.row_sampling import RowNumbers, is_rerun
from loka.probe.stats.site_trackers import Trackers, apart
from loka.sites.callables import is_library_file
from loka.sites.site import GemmKind


class _Running(threading.local):
    """Names of the modules whose forward runs in this thread; a checkpoint's recomputation may have its own thread."""

    def __init__(self) -> None:
        self.names: list[str] = []


class Watch(TorchFunctionMode):
    """The mode of sampled steps. `calls` counts the operands added to trackers since `start`."""

    def __init__(self, live: LiveModel, trackers: Mapping[str, Trackers], numbers: RowNumbers) -> None:
        super().__init__()
        self.active = False
        self.open = True  # False: gradients that still arrive are ignored
        self.calls = 0
        self._root = live.root
        self._numbers = numbers
        self._trackers = trackers
        self._sites: dict[int, list[LiveSite]] = {}  # by id of the Parameter, which stays alive with its site
        for site in (*live.sites, *live.others):
            self._sites.setdefault(id(site.parameter), []).append(site)
        self._patched = Patched(tuple(site for site in live.sites if site.counter_id is not None), trackers, numbers)
        self._running = _Running()
        self._hooks: list[RemovableHandle] = []

    def start(self) -> None:
        """See every torch function of this thread, and of the backward that it starts, from now on."""
        if any(isinstance(mode, Watch) for mode in mode_stack.modes()):
            raise InputError("probe: another Probe samples this step already; use one at a time")
        self.calls = 0
        self._running = _Running()
        for live in (each for sharing in self._sites.values() if len(sharing) > 1 for each in sharing):
            if live.module is not None:
                self._hooks += _tell(live.module, _module_name(live), self._running)
        mode_stack.put_on(self)
        self.active = True

    def stop(self) -> None:
        """Remove everything from the model and the stack of modes; the step's gradients may still arrive."""
        if not self.active:
            return
        self.active = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        mode_stack.take_off(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function; if it multiplies a site's Parameter, record its operands."""
        named = dict(kwargs or {})
        if func in mode_stack.BACKWARDS:
            with mode_stack.kept_in_backward(self):
                return func(*args, **named)
        out = func(*args, **named)
        if self._patched.runs(func):
            if self._can_look(args[0]):
                self.calls += self._patched.take(args, named)
            return out
        product = find_product(func, args, named, self._is_weight)
        if product is None or not product.x.is_floating_point() or not self._can_look(product.x):
            return out
        candidates = self._sites[self._key_of(product.weight)]
        if len(candidates) == 1 and candidates[0].counter_id is not None:
            self.calls += self._patched.take_kept(candidates[0], product)
        elif (live := self._choose(candidates, product, sys._getframe(1))) is not None:
            self._take(live, product, out)
        return out

    def _can_look(self, x: Tensor) -> bool:
        # Evaluation between steps is ignored. A checkpointed forward has no gradients, but is in training mode.
        if not (torch.is_grad_enabled() or self._root.training or is_rerun()):
            return False
        if type(x) not in (Tensor, nn.Parameter) or x.is_meta or x.is_nested or x.layout is not torch.strided:
            return False
        if torch._C._are_functorch_transforms_active():  # it stands for many, whose numbers cannot be read
            return False
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise LokaError(
                "probe: a CUDA graph is being captured in a step that is sampled, and would hold the Probe's own work: "
                "capture it before `with Probe(...)`, or in a step where `probe.sampling` is False"
            )
        return True

    def _take(self, live: LiveSite, product: OperandProduct, out: Any) -> None:
        """Record the input of a call and wait for its output gradient; only the latter for a recomputed forward."""
        trackers = self._trackers.get(live.site.name)
        rerun, awaits = is_rerun(), isinstance(out, Tensor) and out.requires_grad
        if trackers is None or (rerun and not awaits):
            return
        trackers.check_device(product.x)
        trackers.transposed = product.transposed is (product.weight is live.parameter)
        with apart(product.x.device):
            x = product.x.detach()
            index = self._numbers.draw(rows_of(x), x.device)
            rows = take_rows(x, index) if rerun else trackers.take_input(x, index)
            if awaits:
                part = trackers.joint_part(rows)
                watched, view = _before_views(out)
                views = (view, product.gradient)
                hook = partial(self._take_gradient, trackers, views, index, part)
                watched.register_hook(hook)  # type: ignore[no-untyped-call]
        self.calls += 1

    def _take_gradient(
        self, trackers: Trackers, views: tuple[View, View], index: Tensor | None, part: Tensor, grad: Tensor | None
    ) -> None:
        """The hook on an output: it keeps some features of the input's sampled rows, and nothing else of the input."""
        if not self.open or grad is None or type(grad) is not Tensor:
            return
        with apart(grad.device):
            trackers.take_gradient(views[1](views[0](grad.detach())), index, part)

    def _is_weight(self, value: Any) -> bool:
        return isinstance(value, Tensor) and self._key_of(value) in self._sites

    def _key_of(self, tensor: Tensor) -> int:
        """The id of the Parameter that a tensor is or transposes; the tensor's own id for others."""
        base = tensor._base
        if id(tensor) in self._sites or base is None or tensor.dim() != 2 or base.dim() != 2:
            return id(tensor)
        (rows, columns), (down, across) = base.shape, base.stride()
        transposed = tensor.shape == (columns, rows) and tensor.stride() == (across, down)
        return id(base) if transposed and tensor.storage_offset() == base.storage_offset() else id(tensor)

    def _choose(self, candidates: list[LiveSite], product: OperandProduct, frame: FrameType) -> LiveSite | None:
        """The site that a call belongs to; None if that is ambiguous."""
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


def _before_views(out: Tensor) -> tuple[Tensor, View]:
    """The tensor to hook for the gradient of a product, and the view from its gradient to that of `out`.

    torch.matmul and F.linear fold dimensions and return a view. An in-place operation on a view (an activation) removes
    its node from the graph, with its hooks; the node of the view's base stays.
    """
    base = out._base
    if base is None or base.grad_fn is None or base.numel() != out.numel() or not base.is_contiguous():
        return out, _unchanged
    place = (out.shape, out.stride(), int(out.storage_offset() - base.storage_offset()))
    return base, partial(_strided, place)


def _unchanged(grad: Tensor) -> Tensor:
    return grad


def _strided(place: tuple[torch.Size, tuple[int, ...], int], grad: Tensor) -> Tensor:
    return grad.contiguous().as_strided(*place)


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
