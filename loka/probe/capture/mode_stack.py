"""Position of a mode on this thread's stack of torch function modes, also during the backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
