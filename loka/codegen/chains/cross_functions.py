"""Cross layers as text: an autograd function and its wrapper."""

from __future__ import annotations

from dataclasses import dataclass

from loka.codegen.chains.fm_functions import (
    INDENT,
    FunctionView,
    M,
    assigned,
    backward_header,
    body,
    called,
    header,
    returned,
)
from loka.codegen.text.comments import wrapped
from loka.codegen.text.layout import Code, call
from loka.kernels.fused.cross.cross_kernel import CrossBackward, cross_forward
from loka.kernels.fused.norm.norm_spec import NormForward


@dataclass(frozen=True, slots=True)
class CrossShape:
    """What a cross layer's text depends on."""

    width: int
    bias: bool
    itself: bool  # whether the residual is the factor
    passes: bool  # whether the factor is handed on, for the next layer: its gradients are then added in the same kernel

    @property
    def function(self) -> str:
        """The wrapper's name."""
        what = [*(["itself"] if self.itself else []), *([] if self.bias else ["unbiased"])]
        return "_".join(["cross", *what, str(self.width), *(["passing"] if self.passes else [])])

    @property
    def forward(self) -> NormForward:
        """The kernel of the sum."""
        return cross_forward(self.width, self.bias)

    @property
    def backward(self) -> CrossBackward:
        """The kernel of its gradients."""
        return CrossBackward(self.width, self.bias, self.itself, self.passes)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The wrapper's tensors."""
        return ("product", *(["bias"] if self.bias else []), "factor", *([] if self.itself else ["residual"]))


def cross_view(shape: CrossShape, name: str, function: str) -> FunctionView:
    """A cross layer; where it `passes` the factor on, its other gradient comes back with that of the sum."""
    tensors, results = shape.tensors, ["out.view(product.shape)", *(["factor.view_as(factor)"] if shape.passes else [])]
    product = "(product + bias)" if shape.bias else "product"
    residual = "factor" if shape.itself else "residual"
    handed = ", and factor itself for the next layer" if shape.passes else ""
    given = {"x": "rows", "add": "bias", "times": "factors", "residual": "factors" if shape.itself else "residuals"}
    matrices = " and ".join([", ".join(n for n in tensors[:-1] if n != "bias"), tensors[-1]])
    vector = f", bias ({shape.width},)" if shape.bias else ""
    saved = [name for name in tensors if name != "residual"]
    read = [name for name in tensors if name != "bias"]
    found = ["rows", "factors", *([] if shape.itself else ["residuals"])]
    return FunctionView(
        function,
        wrapped(f"factor * {product} + {residual}{handed}.", len(M) // 2, first=3),
        header("forward", tensors, "dtype: torch.dtype", len(results), method=True),
        (
            *_rows(found, shape, read),
            *called(["out"], shape.forward.function, [*(given[p] for p in shape.forward.parameters), "dtype"]),
            f"{M}ctx.save_for_backward({', '.join(saved)})",
            *([] if shape.itself else [f"{M}ctx.residual_dtype = residual.dtype"]),
            f"{M}return {', '.join(results)}",
        ),
        _backward(shape, saved),
        header(name, tensors, "", len(results)),
        wrapped(f"{matrices} (..., {shape.width}){vector} -> factor * {product} + {residual}{handed}.", 4, first=3),
        body(function, [*tensors, f"dispatch.summed_dtype({', '.join(n for n in tensors if n != 'bias')})"]),
    )


def _rows(targets: list[str], shape: CrossShape, tensors: list[str]) -> list[str]:
    """`targets = dispatch.rows(width, ...)`: each tensor as a matrix."""
    return assigned(targets, call("dispatch.rows", map(Code, [str(shape.width), *tensors])), INDENT)


def _backward(shape: CrossShape, saved: list[str]) -> tuple[str, ...]:
    backward = shape.backward
    results = ["dbias_sums" if name == "dbias" else name for name in backward.results]
    gradients = {
        "dproduct": "dproduct.view(product.shape)",
        "dfactor": "dfactor.view(factor.shape)",
        "dresidual": "grad.to(ctx.residual_dtype)",
    }
    given = {"grad": "grads", "product": "rows", "factor": "factors", "passed": "others"}
    matrices = [name for name in backward.parameters if name != "bias"]
    return (
        *backward_header(["grad: Tensor", *(["passed: Tensor"] if shape.passes else [])]),
        f"{M}{', '.join(saved)} = ctx.saved_tensors",
        *_rows([given[name] for name in matrices], shape, matrices),
        *called(results, backward.function, [given.get(name, name) for name in backward.parameters]),
        *(called(["dbias"], "reduce_1", ["dbias_sums", "bias.dtype"]) if shape.bias else []),
        *returned([*(gradients.get(f"d{name}", f"d{name}") for name in shape.tensors), "None"]),
    )
