"""Runs a live model with rounded operands at some of its sites: each GEMM gets the error that its rounding makes.

Nothing is installed in the model. A mode sees each torch function, and adds to the product of a site's Parameter the
difference between the product of the rounded operands and that of the operands as they are, both in float32; in the
backward, the same is added to the gradients. So one GEMM of one site can be rounded alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loka.numerics.enums import Gemm
from loka.numerics.quantize import fake_quantize
from loka.numerics.recipe import OperandPair
from loka.probe.capture.live_sites import LiveModel, SiteCalls
from loka.probe.capture.operand_views import OperandProduct

Rounding = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # a GEMM's operands (R, C) and (S, C) -> both rounded
SiteRoundings = Mapping[Gemm, Rounding]  # GEMMs that are left out stay as they are
Observe = Callable[[str, Tensor, Tensor], None]  # (site, output y without bias (M, N), its error (M, N)), float32


def recipe_rounding(pair: OperandPair) -> Rounding:
    """The rounding of both operands of a GEMM by its recipe."""
    return lambda a, b: (fake_quantize(a, pair[0]), fake_quantize(b, pair[1]))


class GemmErrors(TorchFunctionMode):
    """Context in which the GEMMs of a live model's sites have the errors of `roundings`, by the sites' names.

    `observe` is called for each forward product of these sites. A GEMM in float32 is exact but for the rounding; one
    in another dtype is as it is, with the float32 error added.
    """

    def __init__(self, live: LiveModel, roundings: Mapping[str, SiteRoundings], observe: Observe | None = None) -> None:
        super().__init__()
        self._site_calls = SiteCalls(live)
        self._roundings = roundings
        self._observe = observe

    def __enter__(self) -> Self:
        self._site_calls.start()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._site_calls.stop()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a torch function, and add the error of its rounding to a site's product."""
        named = dict(kwargs or {})
        products = self._site_calls.products(func, args, named)
        out = func(*args, **named)
        for product in products:
            live = self._site_calls.choose(product, sys._getframe(1)) if product.x.is_floating_point() else None
            roundings = self._roundings.get(live.site.name) if live is not None else None
            if live is not None and roundings:
                out = self._with_error(live.site.name, product, roundings, out)
        return out

    def _with_error(self, site: str, product: OperandProduct, roundings: SiteRoundings, out: Tensor) -> Tensor:
        x = product.x.reshape(-1, product.k)
        weight = product.weight.t() if product.transposed else product.weight
        with torch.autocast(x.device.type, enabled=False):
            error: Tensor = _Errors.apply(x, weight, roundings)  # type: ignore[no-untyped-call]
            if self._observe is not None:
                self._observe(site, x.detach().float() @ weight.detach().float().t(), error.detach())
        made = out.clone()
        view = product.gradient(made)
        view.add_(error.view(view.shape).to(view.dtype))
        return made


class _Errors(torch.autograd.Function):
    """The error of y = x @ weight.T, x (M, K), weight (N, K), and in the backward those of the two gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, roundings: SiteRoundings) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.roundings = roundings
        return _error(roundings.get(Gemm.FPROP), x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight), (grad,) = ctx.saved_tensors, grads
        dx = dw = None
        with torch.autocast(x.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx = _error(ctx.roundings.get(Gemm.DGRAD), grad, weight.t()).to(x.dtype)
            if ctx.needs_input_grad[1]:
                dw = _error(ctx.roundings.get(Gemm.WGRAD), grad.t(), x.t()).to(weight.dtype)
        return dx, dw, None


def _error(rounding: Rounding | None, a: Tensor, b: Tensor) -> Tensor:
    """The error of a @ b.T, (R, S) float32: zeros without a rounding."""
    if rounding is None:
        return a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.float32)
    a, b = a.detach().float(), b.detach().float()
    rounded_a, rounded_b = rounding(a, b)
    return rounded_a @ rounded_b.t() - a @ b.t()
