"""Gradients of a cross layer in torch: the CPU implementation, and the reference of their kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CrossGradients:
    """Gradients in float32: of the product and of the factor (M, width), and of the bias, summed over rows (1, width).

    They are the gradients of factor * (product + bias) + residual; that of the residual is `grad` itself.
    """

    product: Tensor
    factor: Tensor
    bias: Tensor


def cross_backward(
    grad: Tensor,
    product: Tensor,
    factor: Tensor,
    *,
    bias: Tensor | None = None,
    passed: Tensor | None = None,
    itself: bool = False,
) -> CrossGradients:
    """Gradients of a cross layer, from grad, product, factor, passed (M, width) and bias (width,).

    `passed` is another gradient of the factor, to be added; with `itself` the residual is the factor too.
    """
    grad, product = grad.float(), product.float()
    dproduct = grad * factor.float()
    dfactor = grad * (product if bias is None else product + bias.float())
    if itself:
        dfactor = dfactor + grad
    if passed is not None:
        dfactor = dfactor + passed.float()
    return CrossGradients(dproduct, dfactor, dproduct.sum(0, keepdim=True))
