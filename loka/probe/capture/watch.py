"""Records one training step: the operands of the sites' GEMMs, forward and backward, go into their trackers.

Nothing is installed in the model. While a sampled step runs, a mode sees each torch function that is called, so the
model must run eagerly and in Python; `Probe` ensures that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.errors import InputError, LokaError
from loka.probe.capture import mode_stack
from loka.probe.capture.live_sites import LiveModel, LiveSite
from loka.probe.capture.operand_views import OperandProduct, View, rows_of, take_rows
from loka.probe.capture.patched_operands import Patched
from loka.probe.capture.row_sampling import RowNumbers, is_rerun
from loka.probe.capture.site_calls import SiteCalls
from loka.probe.stats.site_trackers import Trackers, apart


class Watch(TorchFunctionMode):
    """The mode of sampled steps. `calls` counts the operands added to trackers since `start`."""

    def __init__(self, live: LiveModel, trackers: Mapping[str, Trackers], numbers: RowNumbers) -> None:
        super().__init__()
        self.active = False
        self.open = True  # False: gradients that still arrive are ignored
        self.calls = 0
        self._root = live.root
        self._site_calls = SiteCalls(live)
        self._numbers = numbers
        self._trackers = trackers
        self._patched = Patched(tuple(site for site in live.sites if site.counter_id is not None), trackers, numbers)

    def start(self) -> None:
        """See every torch function of this thread, and of the backward that it starts, from now on."""
        if any(isinstance(mode, Watch) for mode in mode_stack.modes()):
            raise InputError("probe: another Probe samples this step already; use one at a time")
        self.calls = 0
        self._site_calls.start()
        mode_stack.put_on(self)
        self.active = True

    def stop(self) -> None:
        """Remove everything from the model and the stack of modes; the step's gradients may still arrive."""
        if not self.active:
            return
        self.active = False
        self._site_calls.stop()
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
        product = self._site_calls.product(func, args, named)
        if product is None or not product.x.is_floating_point() or not self._can_look(product.x):
            return out
        candidates = self._site_calls.sharing(product)
        if len(candidates) == 1 and candidates[0].counter_id is not None:
            self.calls += self._patched.take_kept(candidates[0], product)
        elif (live := self._site_calls.choose(product, sys._getframe(1))) is not None:
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
        trackers.transposed = product.transposed is not live.transposes(product.weight)
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
