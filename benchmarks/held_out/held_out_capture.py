"""Capture of the operands of every site in one forward and backward, as matrices; the weights do not change.

For y = x @ weight.T: the input x (M, K), the weight (N, K) and the output gradient dy (M, N), float32. A product with
the Parameter first, P @ x, is read as (x^T @ P^T)^T, as in `loka.graph.sites`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka.bench.quality.training_calls import Inputs, call
from loka.errors import InputError
from loka.graph.sites.site import Site
from loka.numerics.enums import Gemm

_LINEAR = (F.linear, torch._C._nn.linear)
_MATMUL = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


@dataclass(frozen=True, slots=True)
class CapturedOperands:
    """Operands of one call of a site: `input` (M, K), `weight` (N, K), `grad_output` (M, N)."""

    input: Tensor
    weight: Tensor
    grad_output: Tensor

    def of(self, gemm: Gemm) -> tuple[Tensor, Tensor]:
        """Both operands of a GEMM, K-major: a (R, C) and b (S, C), whose product is a @ b.T."""
        if gemm is Gemm.FPROP:
            return self.input, self.weight
        if gemm is Gemm.DGRAD:
            return self.grad_output, self.weight.t()
        return self.grad_output.t(), self.input.t()


@dataclass(slots=True)
class _Seen:
    input: Tensor
    weight: Tensor
    grad_output: Tensor | None = None


class _Watch(TorchFunctionMode):
    """Keeps both operands of each product with a Parameter in `names`, and its output's gradient by a hook."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names
        self.seen: dict[str, list[_Seen]] = {}

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **dict(kwargs or {}))
        if func in _LINEAR:
            x, weight = args[0], args[1]
            if (name := self._name(weight)) is not None:
                self._keep(name, x, weight, out, transposed=False)
        elif func in _MATMUL:
            left, right = args[0], args[1]
            if (name := self._name(right)) is not None:
                self._keep(name, left, right.t(), out, transposed=False)
            elif (name := self._name(left)) is not None:
                self._keep(name, right.transpose(-1, -2), left, out, transposed=True)
        return out

    def _name(self, tensor: Tensor) -> str | None:
        """The site of a Parameter or of its transpose; None for other tensors."""
        base = tensor if tensor._base is None else tensor._base
        name = self.names.get(id(base))
        whole = tensor.dim() == 2 and sorted(tensor.shape) == sorted(base.shape)
        return name if whole and tensor.dtype == base.dtype else None

    def _keep(self, name: str, x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> None:
        seen = _Seen(_matrix(x), weight.detach().float().clone())
        self.seen.setdefault(name, []).append(seen)

        def told(grad: Tensor) -> None:
            seen.grad_output = _matrix(grad.transpose(-1, -2) if transposed else grad)

        out.register_hook(told)  # type: ignore[no-untyped-call]


def capture(
    model: nn.Module, sites: Iterable[Site], inputs: Inputs, target: Tensor, loss: Any
) -> dict[str, tuple[CapturedOperands, ...]]:
    """Run one forward and backward; returns the operands of each call of every site, in order.

    Weights and existing gradients of Parameters do not change. Raises InputError if a site that is called in training
    was not seen or received no gradient.
    """
    wanted = [site for site in sites if site.calls and site.blocked is None and site.weight is not None]
    parameters = dict(model.named_parameters())
    names = {id(parameters[site.weight]): site.name for site in wanted if site.weight is not None}
    held = {name: parameter.grad for name, parameter in parameters.items()}
    watch = _Watch(names)
    for parameter in parameters.values():
        parameter.grad = None  # backward would add to it in place
    try:
        with watch:
            value = loss(call(model, inputs), target)
        value.backward()
    finally:
        for name, parameter in parameters.items():
            parameter.grad = held[name]
    return {site.name: tuple(_whole(site.name, seen) for seen in _calls(site.name, watch)) for site in wanted}


def _calls(name: str, watch: _Watch) -> list[_Seen]:
    if name not in watch.seen:
        raise InputError(
            f"capture: site {name!r} was not seen: it is not written as nn.Linear, F.linear, matmul, mm or @ with its "
            "Parameter as an operand, which is all that the held-out comparison follows"
        )
    return watch.seen[name]


def _whole(name: str, seen: _Seen) -> CapturedOperands:
    if seen.grad_output is None:
        raise InputError(f"capture: no gradient reached the output of site {name!r}; its loss must depend on it")
    return CapturedOperands(seen.input, seen.weight, seen.grad_output)


def _matrix(tensor: Tensor) -> Tensor:
    """A float32 copy with all leading dimensions as rows."""
    return tensor.detach().float().reshape(-1, tensor.shape[-1]).clone()
