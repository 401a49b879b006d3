"""Differences between two values, or between the states of two modules, in words."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

_INTERNAL = frozenset(vars(nn.Module()))
_CANCELLED = 4  # roundings of the largest gradient, left of sums that cancel, as in the gradient of a key's bias


def compare_leaves(a: tuple[object, ...], b: tuple[object, ...], rounding: float, beside: float = 0.0) -> str | None:
    """The first difference between two lists of values. `beside`: magnitude whose rounding is allowed."""
    if len(a) != len(b):
        return f"{len(b)} values instead of {len(a)}"
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
            found = _compare_tensors(x, y, rounding, beside)
            if found is not None:
                return found
        elif type(x) is not type(y) or (x != y and repr(x) != repr(y)):
            return f"{_shown(y)} instead of {_shown(x)}"
    return None


def scattered(a: tuple[object, ...], b: tuple[object, ...]) -> str | None:
    """Says that an output is not contiguous where the model's own is: what reads it may take a view of it."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)]
    lost = next((y for x, y in pairs if x.is_contiguous() and not y.is_contiguous()), None)
    return None if lost is None else f"gives an output that is not contiguous ({_kind(lost)})"


def _shown(value: object) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)


def _compare_tensors(x: torch.Tensor, y: torch.Tensor, rounding: float, beside: float = 0.0) -> str | None:
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return f"{_kind(y)} instead of {_kind(x)}"
    if x.requires_grad != y.requires_grad:
        return "with a gradient instead of without" if y.requires_grad else "without a gradient instead of with"
    if not rounding and x.stride() != y.stride():
        return f"strides {tuple(y.stride())} instead of {tuple(x.stride())}"
    if x.layout != torch.strided or torch.equal(x, y):
        return None
    exact = torch.promote_types(x.dtype, torch.float32)
    gap = (x.detach().to(exact) - y.detach().to(exact)).abs()
    gap = torch.where(torch.isnan(x) & torch.isnan(y) | (x == y), torch.zeros_like(gap), gap)
    largest = float("inf") if bool(gap.isnan().any()) else gap.max().item()
    allowed = rounding * max(largest_magnitude(x), 1e-6)
    if beside and x.is_floating_point():
        allowed = max(allowed, _CANCELLED * torch.finfo(x.dtype).eps * beside)
    return None if largest <= allowed else f"largest difference {largest:.3g}"


def largest_magnitude(x: torch.Tensor) -> float:
    """Largest magnitude of a tensor's finite values; 0 where there are none."""
    if x.layout != torch.strided or not x.numel():
        return 0.0
    if not x.is_complex():
        low, high = (end.item() for end in x.detach().aminmax())  # unlike the way below, without copies
        if math.isfinite(low) and math.isfinite(high):
            return float(max(-low, high))
    exact = torch.promote_types(x.dtype, torch.float32)
    return x.detach().to(exact).nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def _kind(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of {tuple(x.shape)}"


def compare_state(a: nn.Module, b: nn.Module) -> str | None:
    """The first difference between the buffers, Parameters and attributes of two modules; None where they are equal."""
    theirs = dict(b.named_modules())
    for path, module in a.named_modules():
        other = theirs.get(path)
        if other is None:
            return f"loses the child '{path}'"
        if other is module:
            continue
        for kind, mine, others in (
            ("buffer", module._buffers, other._buffers),
            ("Parameter", module._parameters, other._parameters),
            ("attribute", _attributes(module), _attributes(other)),
        ):
            found = _compare_named(mine, others)
            if found is not None:
                return f"leaves the {kind} '{f'{path}.{found[0]}'.lstrip('.')}' otherwise ({found[1]})"
    return None


def _attributes(module: nn.Module) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if name not in _INTERNAL}


def _compare_named(a: Any, b: Any) -> tuple[str, str] | None:
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            return name, "it is there in one of the two only"
        found = _compare_values(a[name], b[name], 0)
        if found is not None:
            return name, found
    return None


def _compare_values(x: object, y: object, depth: int) -> str | None:
    """The difference between two attributes: tensors and plain data by value, objects by content, others by type."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return _compare_tensors(x, y, 0.0)
    if type(x) is not type(y):
        return f"{_shown(y)} instead of {_shown(x)}"
    if isinstance(x, bool | int | float | str | bytes | None) and x != y and repr(x) != repr(y):
        return f"{_shown(y)} instead of {_shown(x)}"
    if depth > 4 or isinstance(x, nn.Module | type):
        return None
    if isinstance(x, dict) and isinstance(y, dict):
        found = _compare_named(x, y) if depth == 0 else _first(x.values(), y.values(), depth)
        return None if found is None else found if isinstance(found, str) else f"{found[0]!r}: {found[1]}"
    if isinstance(x, tuple | list) and isinstance(y, tuple | list):
        return _first(x, y, depth)
    if isinstance(x, set | frozenset) and x != y:
        return "other elements"
    if hasattr(x, "__dict__") and hasattr(y, "__dict__") and not callable(x):
        return _first(vars(x).values(), vars(y).values(), depth)
    return None


def _first(xs: Any, ys: Any, depth: int) -> str | None:
    xs, ys = list(xs), list(ys)
    if len(xs) != len(ys):
        return f"{len(ys)} elements instead of {len(xs)}"
    return next((found for x, y in zip(xs, ys, strict=True) if (found := _compare_values(x, y, depth + 1))), None)
