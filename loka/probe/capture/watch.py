"""Records one training step: the operands of the sites' GEMMs, forward and backward, go into their trackers.

Nothing is installed in the model. While a sampled step runs, a mode sees each torch function that is called, so the
model must run eagerly and in Python; `Probe` ensures that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.errors import InputError, LokaError
from loka.numerics.enums import GEMM_NAMESPACE, Gemm
from loka.numerics.quantize import Quantized, dequantize
from loka.probe.capture.live_sites import LiveModel, LiveSite, SiteCalls
from loka.probe.capture.operand_views import OperandProduct, View, rows_of, take_rows
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
        if any(isinstance(mode, Watch) for mode in modes()):
            raise InputError("probe: another Probe samples this step already; use one at a time")
        self.calls = 0
        self._site_calls.start()
        put_on(self)
        self.active = True

    def stop(self) -> None:
        """Remove everything from the model and the stack of modes; the step's gradients may still arrive."""
        if not self.active:
            return
        self.active = False
        self._site_calls.stop()
        take_off(self)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function; if it multiplies a site's Parameter, record its operands."""
        named = dict(kwargs or {})
        if func in BACKWARDS:
            with kept_in_backward(self):
                return func(*args, **named)
        out = func(*args, **named)
        if self._patched.runs(func):
            if self._can_look(args[0]):
                self.calls += self._patched.take(args, named)
            return out
        for product in self._site_calls.products(func, args, named):
            if not product.x.is_floating_point() or not self._can_look(product.x):
                continue
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


_COUNTER_ID = 8  # position of the operator's argument


class Patched:
    """Records the sites that a generated package runs in FP8: the operands of the GEMM operators, dequantized.

    The counter id of such an operator identifies its site and GEMM (docs/kernels.md). The statistics are then those of
    the quantized values, with rounding and underflow. Other GEMMs of such a site call torch functions inside its
    torch.autograd.Function. `take` and `take_kept` return the number of operands added to a tracker.
    """

    def __init__(self, sites: tuple[LiveSite, ...], trackers: Mapping[str, Trackers], numbers: RowNumbers) -> None:
        self._any = bool(sites)
        self._trackers = trackers
        self._numbers = numbers
        self._gemms = {
            live.counter_id + offset: (live, gemm)
            for live in sites
            if live.counter_id is not None
            for offset, gemm in enumerate(Gemm)
        }

    def runs(self, func: Any) -> bool:
        """True if a function is a GEMM operator that sites may run on."""
        return self._any and isinstance(func, torch._ops.OpOverload) and func.namespace == GEMM_NAMESPACE

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Record one call of the operator."""
        found = self._gemms.get(args[_COUNTER_ID] if len(args) > _COUNTER_ID else kwargs.get("counter_id", -1))
        if found is None:
            return 0
        live, gemm = found
        trackers = self._trackers[live.site.name]
        a, scale_a, b, scale_b = args[:4]
        trackers.check_device(a)
        with apart(a.device):
            if gemm is Gemm.WGRAD:
                return self._take_both(live, trackers, Quantized(a, scale_a), Quantized(b, scale_b))
            # dgrad does not run if the input needs no gradient; wgrad has the gradient too.
            if is_rerun() if gemm is Gemm.FPROP else Gemm.WGRAD in live.fp8:
                return 0
            return self._take_one(trackers, dequantize(Quantized(a, scale_a)), gemm is Gemm.DGRAD)

    def take_kept(self, live: LiveSite, product: OperandProduct) -> int:
        """Record a native GEMM of a patched site: x @ weight.T, or dy @ weight in the backward."""
        trackers = self._trackers[live.site.name]
        trackers.check_device(product.x)
        site = live.site
        backward = is_rerun() and not torch.is_grad_enabled()
        if backward:
            wanted = Gemm.DGRAD not in live.fp8 and Gemm.WGRAD not in live.fp8
            fits = (product.k, product.n) == (site.n, site.k)
        else:
            wanted = Gemm.FPROP not in live.fp8 and Gemm.WGRAD not in live.fp8 and not is_rerun()
            fits = (product.k, product.n) == (site.k, site.n)
        if not wanted or not fits:
            return 0
        with apart(product.x.device):
            return self._take_one(trackers, product.x.detach(), backward)

    def _take_one(self, trackers: Trackers, x: Tensor, is_gradient: bool) -> int:
        index = self._numbers.draw(rows_of(x), x.device)
        if is_gradient:
            trackers.take_gradient(x, index, None)
        else:
            trackers.take_input(x, index)
        return 1

    def _take_both(self, live: LiveSite, trackers: Trackers, a: Quantized, b: Quantized) -> int:
        """Record wgrad's operands, dy.t() and x.t(): the gradient, and matching rows of the input."""
        grad, x = dequantize(a).t(), dequantize(b).t()
        index = self._numbers.draw(rows_of(x), x.device)
        rows = take_rows(x, index) if Gemm.FPROP in live.fp8 else trackers.take_input(x, index)
        trackers.take_gradient(grad, index, trackers.joint_part(rows))
        return 1


BACKWARDS = frozenset((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad))


def modes() -> list[Any]:
    """The modes of this thread, lowest first."""
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def put_on(mode: TorchFunctionMode) -> None:
    """Insert a mode below all others, except the default device's, which must stay the lowest.

    The user's modes on the stack can then exit while `mode` stays, as exiting pops the top of the stack.
    """
    below = _pop_all()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    place = 1 if below and below[0] is default else 0
    for each in (*below[:place], mode, *below[place:]):
        torch._C._push_on_torch_function_stack(each)


def take_off(mode: TorchFunctionMode) -> None:
    """Remove a mode from any position; does nothing if it is not there."""
    for each in _pop_all():
        if each is not mode:
            torch._C._push_on_torch_function_stack(each)


@contextmanager
def kept_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """While a mode handles one of BACKWARDS it is off the stack; this puts it back when autograd's engine starts.

    So the mode also sees operations in the backward (a recomputed forward, a torch.autograd.Function): the engine
    copies the stack to its threads. torch has no option for this before 2.13, so the function with which torch.autograd
    starts the engine is replaced during this call, only for this thread.
    """
    engine = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    thread = threading.get_ident()

    def run(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or mode in modes():
            return engine(*args, **kwargs)
        put_on(mode)
        try:
            return engine(*args, **kwargs)
        finally:
            take_off(mode)

    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = engine  # type: ignore[attr-defined]


def _pop_all() -> list[Any]:
    """Empty the stack and return its modes, lowest first."""
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())][::-1]


SEED = 20260417


class RowNumbers:
    """Draws row indices on the device, from its own generators: training's random numbers do not change."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._generators: dict[torch.device, torch.Generator] = {}

    def prepare(self, device: torch.device) -> None:
        """Create a device's generator."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(SEED)

    def draw(self, total: int, device: torch.device) -> Tensor | None:
        """`rows` different indices below `total`, (R,) int64; None if all rows are to be taken.

        One from each of `rows` equal parts of the call, rotated by a random offset: no index is drawn twice, so that
        pairs of sampled rows are pairs of different rows.
        """
        if total <= self.rows:
            return None
        self.prepare(device)
        generator, part = self._generators[device], total // self.rows
        within = torch.randint(part, (self.rows,), device=device, generator=generator)
        turn = torch.randint(total, (1,), device=device, generator=generator)
        return (torch.arange(self.rows, device=device) * part + within + turn) % total


def is_rerun() -> bool:
    """True if the running forward is a recomputation for a backward, by activation checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)
