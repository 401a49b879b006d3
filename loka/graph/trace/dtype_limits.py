"""`torch.finfo(scores.dtype).min`: the limits of a dtype that only the call knows, traced as they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx


@contextmanager
def traced_limits() -> Iterator[None]:
    """While a forward is traced, torch.finfo and torch.iinfo take a traced dtype; torch's own refuse a proxy."""
    originals = torch.finfo, torch.iinfo
    torch.finfo, torch.iinfo = (_traced(each) for each in originals)  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        torch.finfo, torch.iinfo = originals  # type: ignore[misc]


def _traced(limits: Callable[..., Any]) -> Callable[..., Any]:
    def limits_of(*args: Any, **kwargs: Any) -> Any:
        proxy = next((each for each in (*args, *kwargs.values()) if isinstance(each, fx.Proxy)), None)
        if proxy is None:
            return limits(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", limits, args, kwargs)

    return limits_of
