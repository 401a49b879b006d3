"""Convolutions of size 1 are the products and sums that they compute."""

from __future__ import annotations

from loka.graph.canonical.convolutions import products_of_convolutions
from loka.graph.ir import Ref, RefKind, SiteCall, Statement

SIZES = {"self.w": (6, 8, 1), "self.b": (6,)}


def convolution(bias: str | None) -> Statement:
    refs = [Ref(RefKind.LOCAL, "x"), Ref(RefKind.ATTRIBUTE, "self.w")]
    refs += [Ref(RefKind.ATTRIBUTE, bias)] if bias else []
    call = SiteCall("w", "{0}.transpose(-1, -2)", "{1}.flatten(1)", "{2}" if bias else None, "{0}.transpose(-1, -2)")
    text = f"torch.nn.functional.conv1d({', '.join(f'{{{place}}}' for place in range(len(refs)))})"
    return Statement("y", "conv1d", text, tuple(refs), call)


def test_a_convolution_is_a_product_with_its_matrix() -> None:
    step = convolution(None)
    (product,), sizes = products_of_convolutions([step], SIZES)
    assert product.text() == "y = torch.matmul(self.w.flatten(1), x)"
    assert product.call == SiteCall("w", "{1}.transpose(-1, -2)", "{0}", None, "{0}.transpose(-1, -2)")
    assert product.written == (step,)
    assert sizes == {"self.w.flatten(1)": (6, 8)}


def test_with_a_bias_it_is_a_linear_between_transposes() -> None:
    (linear,), _ = products_of_convolutions([convolution("self.b")], SIZES)
    text = "torch.nn.functional.linear(x.transpose(-1, -2), self.w.flatten(1), self.b).transpose(-1, -2)"
    assert linear.text() == f"y = {text}"
    assert linear.call == SiteCall("w", "{1}.transpose(-1, -2)", "{0}", "{2}", "{0}.transpose(-1, -2)")


def test_a_convolution_that_is_no_gemm_of_a_site_stays() -> None:
    step = convolution(None)
    other = Statement(step.target, step.op, step.template, step.operands)
    assert products_of_convolutions([other], SIZES) == ((other,), {})
