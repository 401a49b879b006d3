"""torch.einsum: the matrix products that an equation stands for, with the roles of its letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loka.graph.sites.products.matrix_product import (
    Args,
    Kwargs,
    MatrixProduct,
    TensorOrigins,
    grouped,
    no_weight,
    unpatchable,
)
from loka.graph.sites.site import GemmKind
from loka.graph.sites.sizes import Size, is_one, size_of


def describe_einsum(args: Args, kwargs: Kwargs, origins: TensorOrigins) -> MatrixProduct | None:
    """The product of an einsum; None where it sums over no common letter (an outer or an elementwise product)."""
    if not args or not isinstance(args[0], str):
        return None
    operands = _operands(args)
    equation = args[0].replace(" ", "")
    if len(operands) < 2:
        return None
    inputs, arrow, output = equation.partition("->")
    terms = _expand_ellipsis(inputs.split(","), operands)
    letters: dict[str, Size] = {}
    for term, operand in zip(terms, operands, strict=True):
        for c, s in zip(term, operand.shape, strict=True):
            if c not in letters or is_one(letters[c]):  # a size of one is broadcast
                letters[c] = s
    if arrow:
        dots = "".join(sorted({c for term in terms for c in term if c.isdigit()}))
        output = output.replace("...", dots)
    else:
        joined = "".join(terms)
        output = "".join(c for c in sorted(set(joined)) if joined.count(c) == 1 or c.isdigit())
    if len(operands) == 2:
        return _of_two(terms, output, letters, operands, origins)
    return _of_many(terms, output, letters, operands)


def _operands(args: Args) -> list[Tensor]:
    return list(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else list(args[1:])


def is_elementwise(func: object, args: Args) -> bool:
    """True for an einsum of two tensors that sums over nothing: their product, perhaps broadcast."""
    if func is not torch.einsum or not args or not isinstance(args[0], str) or "->" not in args[0]:
        return False
    inputs, _, output = args[0].replace(" ", "").partition("->")
    return inputs.count(",") == 1 and set(inputs) - {","} <= set(output)


def _expand_ellipsis(terms: list[str], operands: list[Tensor]) -> list[str]:
    """Replace "..." by digits as letters for its dimensions, counted from the right as einsum aligns them."""
    widths = [o.dim() - len(t.replace("...", "")) if "..." in t else 0 for t, o in zip(terms, operands, strict=True)]
    return [t.replace("...", "0123456789"[max(widths) - w : max(widths)]) for t, w in zip(terms, widths, strict=True)]


def _sizes(x: str, weight: str, output: str, letters: Mapping[str, Size]) -> tuple[Size, Size, Size] | None:
    """M, K and N of "x,weight->output"; None without a contraction.

    Letters that both operands and the output have are a batch of products, and count for M. A letter that one operand
    alone has, and not the output, is summed before the product.
    """
    k = size_of(letters[c] for c in dict.fromkeys(x) if c in weight and c not in output)
    if is_one(k):
        return None
    m = size_of(letters[c] for c in dict.fromkeys(x) if c in output)
    n = size_of(letters[c] for c in dict.fromkeys(weight) if c in output and c not in x)
    return m, k, n


def _of_two(
    terms: Sequence[str], output: str, letters: Mapping[str, Size], operands: Sequence[Tensor], origins: TensorOrigins
) -> MatrixProduct | None:
    found = [origins(operand) for operand in operands]
    side = next((i for i, o in enumerate(found) if o.parameter), None)
    if side is None:
        side = 0 if found[0].fixed and not found[1].fixed else 1
    x, weight = operands[1 - side], operands[side]
    mkn = _sizes(terms[1 - side], terms[side], output, letters)
    if mkn is None:
        return None
    if not found[side].parameter or found[1 - side].parameter:
        reason = no_weight(operands[0], operands[1], origins)
        return MatrixProduct(GemmKind.BMM, x, None, None, *mkn, (mkn,), reason)
    blocked = _blocked(terms[1 - side], terms[side], output, weight)
    shared = (size for c, size in zip(terms[side], weight.shape, strict=True) if c in terms[1 - side] and c in output)
    if weight.dim() > 2 and not all(map(is_one, shared)):
        blocked = grouped(weight, found[side].parameter or "")
    folded = blocked is None and sum(c in output for c in terms[side]) > 1
    return MatrixProduct(GemmKind.EINSUM, x, found[side].parameter, None, *mkn, (mkn,), blocked, folded)


@dataclass(frozen=True, slots=True)
class MatrixLetters:
    """The letters of a weight that is one matrix: activations keep their order, as the weight is smaller."""

    contracted: str  # the columns: letters that the input has, in its order, and the output has not
    free: str  # the rows: letters that the output alone has, in its order
    single: str  # of size 1, and letters of the input and the output as well: nothing is summed over them


def matrix_letters(x: str, weight: str, output: str, shape: Sequence[Size]) -> MatrixLetters | None:
    """The letters of the weight in "x,weight->output", which has this shape; None where it is no matrix.

    >>> matrix_letters("bfd", "fdr", "br", (4, 8, 2))
    MatrixLetters(contracted='fd', free='r', single='')
    """
    single = "".join(c for c, size in zip(weight, shape, strict=True) if c in x and c in output and is_one(size))
    contracted = "".join(c for c in x if c in weight and c not in output)
    free = "".join(c for c in output if c in weight and c not in x)
    distinct = all(len(set(term)) == len(term) for term in (x, weight, output))
    product = [c for c in x if c not in contracted] + list(free)
    fits = contracted and free and len(contracted + free + single) == len(weight) and sorted(product) == sorted(output)
    return MatrixLetters(contracted, free, single) if distinct and fits else None


def _blocked(x: str, weight: str, output: str, parameter: Tensor) -> str | None:
    """Reason why an einsum is not a matrix product with one weight; None where it is."""
    if len(weight) < 2:
        return unpatchable(parameter)
    fits = matrix_letters(x, weight, output, parameter.shape) is not None
    if not fits or (len(weight) > 2 and not (x + output).isalpha()):
        return f"einsum '{x},{weight}->{output}' is not a matrix product with one weight"
    return unpatchable(parameter, 2)


def _of_many(
    terms: Sequence[str], output: str, letters: Mapping[str, Size], operands: Sequence[Tensor]
) -> MatrixProduct | None:
    """Three operands or more, multiplied from the left; torch may choose a better order with opt_einsum.

    M, K and N are those of the last product.
    """
    steps = []
    left = terms[0]
    for place, right in enumerate(terms[1:], 2):
        needed = {*output, *"".join(terms[place:])}
        kept = "".join(c for c in dict.fromkeys(left + right) if c in needed)
        mkn = _sizes(left, right, kept, letters)
        if mkn is not None:
            steps.append(mkn)
        left = kept
    if not steps:
        return None
    reason = f"einsum '{','.join(terms)}->{output}' has {len(terms)} operands"
    return MatrixProduct(GemmKind.BMM, operands[0], None, None, *steps[-1], tuple(steps), reason)
