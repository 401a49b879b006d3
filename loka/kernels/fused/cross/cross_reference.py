"""What the kernel of a cross layer's gradients computes, in torch: its CPU implementation, and its oracle."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CrossGradients:
    """Gradients in float32: of the product and of the factor (M, width), and of the bias, summed over rows (1, width).

    All three are those of factor * (product + bias) + residual, whose residual has the gradient of the whole.
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
    """grad, product, factor, passed (M, width); bias (width,).

    `passed` is a further gradient of the factor; with `itself` the residual is the factor too.
    """
    grad, product = grad.float(), product.float()
    dproduct = grad * factor.float()
    dfactor = grad * (product if bias is None else product + bias.float())
    if itself:
        dfactor = dfactor + grad
    if passed is not None:
        dfactor = dfactor + passed.float()
    return CrossGradients(dproduct, dfactor, dproduct.sum(0, keepdim=True))
