"""Where a mode stands on this thread's stack of torch function modes, and that it stays there in the backward."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

BACKWARDS = frozenset((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad))


def modes() -> list[Any]:
    """The modes of this thread, the outermost call's last."""
    return [torch._C._get_function_stack_at(place) for place in range(torch._C._len_torch_function_stack())]


def put_on(mode: TorchFunctionMode) -> None:
    """Put a mode under all others, but over the default device's, which must stay the lowest.

    Modes of the user that are on the stack now may be left while `mode` stays: leaving takes what is on top.
    """
    below = _pop_all()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    place = 1 if below and below[0] is default else 0
    for each in (*below[:place], mode, *below[place:]):
        torch._C._push_on_torch_function_stack(each)


def take_off(mode: TorchFunctionMode) -> None:
    """Take a mode off, wherever it stands; nothing happens where it is not there."""
    for each in _pop_all():
        if each is not mode:
            torch._C._push_on_torch_function_stack(each)


@contextmanager
def kept_in_backward(mode: TorchFunctionMode) -> Iterator[None]:
    """While a mode handles one of BACKWARDS it is off the stack; put it on again where autograd's engine starts.

    What runs in the backward, a forward that is run again or a torch.autograd.Function, is then seen too: the engine
    takes the stack with it into its threads. torch has no switch for it before 2.13, so the function by which
    torch.autograd starts the engine is replaced for the time of this one call, and only for this thread.
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
    """Empty the stack; what was on it, the lowest first."""
    return [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())][::-1]
