"""Canonical linears: a GEMM by a site's Parameter, and the bias that is added to it, as one `linear`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from loka.graph.canonical.evaluation import agree, drawn, evaluable, evaluated
from loka.graph.canonical.parts import group_of
from loka.graph.ir import Ref, RefKind, SiteCall, Statement
from loka.graph.trace.observed_shapes import Shape

_PLACES = re.compile(r"{(\d+)}")
_LATER = re.compile(r"{[1-9]\d*}")  # an operand, without a change of view, but the first


def canonical_linears(
    statements: Sequence[Statement],
    shapes: Mapping[str, Shape],
    readers: Mapping[str, Collection[int]],
    attributes: Mapping[str, tuple[int, ...]],
) -> tuple[Statement, ...]:
    """The statements with each GEMM that a bias is added to, and each whose first operand is not x, as a linear.

    Its product is not viewed. A bias is a Parameter or buffer of one dimension, or of one row, added by the statement
    after the GEMM, which alone reads the product, or multiplied along with it (`_factored_bias`). The arguments are
    those of `canonical_runs`.
    """
    made: list[Statement] = []
    place = 0
    while place < len(statements):
        step = statements[place]
        call = step.call
        if call is not None and call.plus is not None and shapes.get(step.target):
            made += _split(step, call, shapes)
            place += 1
            continue
        if call is None or call.out != "{0}" or call.plus is not None:
            made.append(step)
            place += 1
            continue
        factored = _factored_bias(statements, place, shapes, readers, attributes) if call.bias is None else None
        if factored is not None:
            run, (factor, vector) = tuple(statements[place : place + 4]), factored
            made.append(replace(_linear((step,), call, vector), written=group_of(run)))
            product = Ref(RefKind.LOCAL, step.target)
            made.append(Statement(run[-1].target, "mul", "{0} * {1}", (factor, product), note=run[-1].note))
            place += len(run)
            continue
        after = statements[place + 1] if place + 1 < len(statements) else None
        alone = set(readers.get(step.target, ())) == {place + 1}
        bias = _added_bias(after, step.target, shapes, attributes) if after and alone and call.bias is None else None
        written = (step,) if bias is None or after is None else (step, after)
        plain = not _LATER.fullmatch(call.x) and _needs_all(step, call)
        made.append(step if bias is None and plain else _linear(written, call, bias))
        place += len(written)
    return tuple(made)


def _split(step: Statement, call: SiteCall, shapes: Mapping[str, Shape]) -> list[Statement]:
    """The product of `torch.addmm(residual, x, weight)`, and the sum in its dtype, which autocast decides."""
    product, cast = (Ref(RefKind.LOCAL, _fresh(f"{step.target}_{name}", shapes)) for name in ("product", "residual"))
    gemm = _linear((step,), replace(call, plus=None), None)
    gemm = replace(gemm, target=product.text, template=call.out.format(gemm.template))
    residual = step.operands[int(_PLACES.findall(str(call.plus))[0])]
    return [
        gemm,
        Statement(cast.text, "to", "{0}.to({1}.dtype)", (residual, product), note=step.note),
        Statement(step.target, "add", "{0} + {1}", (product, cast), note=step.note),
    ]


def _fresh(name: str, taken: Mapping[str, Shape]) -> str:
    while name in taken:
        name += "_"
    return name


def _needs_all(step: Statement, call: SiteCall) -> bool:
    """True if the GEMM alone needs all of the operands: others are for the dtype or the size of a weight."""
    text = call.x + call.weight + (call.bias or "")
    return all(f"{{{place}}}" in text for place in range(len(step.operands)))


def _added_bias(
    step: Statement, product: str, shapes: Mapping[str, Shape], attributes: Mapping[str, tuple[int, ...]]
) -> Ref | None:
    """The Parameter that a statement adds to a product; None for another operation."""
    shape = shapes.get(product, ())
    biases = [ref for ref in step.operands if _is_vector(ref, shape[-1:], attributes)]
    known = evaluable(step)
    if known is None or len(biases) != 1 or len(shape) < 2 or step.call is not None:
        return None
    locals_ = [ref for ref in step.operands if ref != biases[0]]  # others than the product may have the dtype of a cast
    if any(ref.kind is not RefKind.LOCAL or ref.text not in shapes for ref in locals_):
        return None
    sizes = [attributes[biases[0].text], *(tuple(size or 3 for size in shapes[ref.text]) for ref in locals_)]
    values = dict(zip((biases[0], *locals_), drawn(sizes, seed=1), strict=True))
    total = values[Ref(RefKind.LOCAL, product)] + values[biases[0]]
    return _row(biases[0], attributes) if agree(evaluated([known], values), total) else None


def _factored_bias(
    statements: Sequence[Statement],
    place: int,
    shapes: Mapping[str, Shape],
    readers: Mapping[str, Collection[int]],
    attributes: Mapping[str, tuple[int, ...]],
) -> tuple[Ref, Ref] | None:
    """The factor and the bias of `x0 * u + x0 * bias` after a product u, which is x0 * (u + bias); None for others."""
    run = statements[place + 1 : place + 4]
    steps = [known for step in run if step.call is None and (known := evaluable(step)) is not None]
    inside = {statements[place].target, *(step.target for step in run[:-1])}
    if len(steps) < 3 or any(not set(readers.get(name, ())) <= set(range(place + 1, place + 4)) for name in inside):
        return None
    made = {step.target for step in run}
    refs = dict.fromkeys(ref for step in run for ref in step.operands if ref.text not in made)
    shape = shapes.get(statements[place].target, ())
    biases = [ref for ref in refs if _is_vector(ref, shape[-1:], attributes)]
    tensors = [ref for ref in refs if ref.kind is RefKind.LOCAL and shapes.get(ref.text) == shape]
    product = Ref(RefKind.LOCAL, statements[place].target)
    if (len(biases), len(tensors), len(refs)) != (1, 2, 3) or product not in tensors or len(shape) < 2:
        return None
    (factor,) = (ref for ref in tensors if ref != product)
    sizes = [attributes[biases[0].text], *(tuple(size or 3 for size in shape) for _ in tensors)]
    values = dict(zip((biases[0], *tensors), drawn(sizes, seed=1), strict=True))
    total = values[factor] * (values[product] + values[biases[0]])
    return (factor, _row(biases[0], attributes)) if agree(evaluated(steps, values), total) else None


def _is_vector(ref: Ref, size: Shape, attributes: Mapping[str, tuple[int, ...]]) -> bool:
    """True for a Parameter or buffer of this size, as it is or as the one row of a matrix."""
    return ref.kind is RefKind.ATTRIBUTE and attributes.get(ref.text) in (size, (1, *size))


def _row(ref: Ref, attributes: Mapping[str, tuple[int, ...]]) -> Ref:
    """The vector itself, or the one row of a matrix."""
    return ref if len(attributes[ref.text]) == 1 else replace(ref, text=f"{ref.text}.flatten()")


def _linear(written: tuple[Statement, ...], call: SiteCall, bias: Ref | None) -> Statement:
    """One linear for a GEMM, and for the sum after it if there is a bias to add.

    Its operands are x, the weight and the bias, in this order.
    """
    step = written[0]
    operands = step.operands if bias is None else (*step.operands, bias)
    parts = [call.x, call.weight, call.bias if bias is None else f"{{{len(operands) - 1}}}"]
    places = dict.fromkeys(int(place) for part in parts if part is not None for place in _PLACES.findall(part))
    renamed = {place: f"{{{number}}}" for number, place in enumerate(places)}
    x, weight, added = (
        part and part.format(*(renamed.get(place, "") for place in range(len(operands)))) for part in parts
    )
    template = f"torch.nn.functional.linear({', '.join(filter(None, (x, weight, added)))})"
    return replace(
        step,
        target=written[-1].target,
        op="linear",
        template=template,
        operands=tuple(operands[place] for place in places),
        call=SiteCall(call.site, str(x), str(weight), added, call.out),
        written=group_of(written),
    )
