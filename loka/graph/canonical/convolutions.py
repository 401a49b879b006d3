"""Convolutions of kernel size 1 as the products that they are: W @ x of each sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from loka.graph.ir import Ref, RefKind, SiteCall, Statement

_FLIP = ".transpose(-1, -2)"


def products_of_convolutions(
    statements: Sequence[Statement], attributes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Statement, ...], Mapping[str, tuple[int, ...]]]:
    """The statements with each convolution that is a GEMM as a product with its matrix; and the sizes of the matrices.

    `attributes` are the sizes of Parameters and buffers by their expressions, as are those returned.
    """
    made, flat = list[Statement](), dict[str, tuple[int, ...]]()
    for step in statements:
        call, refs = step.call, step.operands
        weights = [ref for ref in refs if len(attributes.get(ref.text, ())) == 3]
        x = [ref for ref in refs if ref.kind is RefKind.LOCAL]
        if step.op != "conv1d" or call is None or (len(weights), len(x)) != (1, 1):
            made.append(step)
            continue
        matrix = Ref(RefKind.ATTRIBUTE, f"{weights[0].text}.flatten(1)")
        flat[matrix.text] = attributes[weights[0].text][:2]
        biases = tuple(ref for ref in refs if ref not in (*weights, *x))
        bias = "{2}" if biases else None
        linear = call.out.format(f"torch.nn.functional.linear({{1}}{_FLIP}, {{0}}, {{2}})")
        text = linear if biases else "torch.matmul({0}, {1})"
        made.append(
            replace(
                step,
                op="linear" if biases else "matmul",
                template=text,
                operands=(matrix, x[0], *biases),
                call=SiteCall(call.site, f"{{1}}{_FLIP}", "{0}", bias, call.out),
                written=(step,),
            )
        )
    return tuple(made), flat
