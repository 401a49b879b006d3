"""Norms over the last dimension, or over blocks of it, recognised in a forward's canonical statements."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

from torch import nn

from loka.graph.ir import Ref, Statement

_VECTOR = r"None|\{\d+\}|\{\d+\}\.to\(torch\.promote_types\(\{\d+\}\.dtype, torch\.float32\)\)"  # as kernels compute
_WIDTH, _WEIGHT, _BIAS = r"\((?P<width>\d+),\)", f"(?P<weight>{_VECTOR})", f"(?P<bias>{_VECTOR})"
_EPS = r"(?:eps=)?(?P<eps>[\d.e-]+)"


@dataclass(frozen=True, slots=True)
class TorchNorm:
    """A torch norm over the last dimension, as in canonical statements and in generated code.

    `arguments` are those of `torch.nn.functional.NAME`, in order. Five of them have the meaning of layer_norm's: input,
    normalized_shape, weight, bias, eps; any other is in `fixed`. `text` matches what follows the input in a statement,
    with the groups width, weight, bias and eps where the norm has these.
    """

    arguments: tuple[str, ...]
    text: str
    module: type[nn.Module] | None = None  # torch's module; its forward is inlined where kernels may fuse it
    eps: float = 0.0  # where a statement has none
    fixed: Mapping[str, object] = field(default_factory=dict)  # values of further arguments


# By the function's name, which is also that of the norm in kernels (`loka.kernels.fused.norm.norms`).
TORCH_NORMS: Mapping[str, TorchNorm] = MappingProxyType(
    {
        "layer_norm": TorchNorm(
            ("input", "normalized_shape", "weight", "bias", "eps"),
            f", {_WIDTH}, {_WEIGHT}, {_BIAS}, {_EPS}",
            nn.LayerNorm,
        ),
        "rms_norm": TorchNorm(
            ("input", "normalized_shape", "weight", "eps"),
            f", {_WIDTH}, {_WEIGHT}, {_EPS}",
            nn.RMSNorm,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ChainNorm:
    """A norm over the last dimension, of `width` elements; a block_norm is over blocks of `width` neighbours in it."""

    kind: str  # "block_norm", or one of TORCH_NORMS
    width: int  # 0 if torch's function does not have it
    eps: float
    weight: Ref | None
    bias: Ref | None


@dataclass(frozen=True, slots=True)
class NormRun:
    """The statements of one norm, and its input."""

    first: int
    last: int
    source: str  # the input, a local except for a norm of one statement
    norm: ChainNorm


_TO_BLOCKS = re.compile(r"\{0\}\.unflatten\(-1, \(\d+, (\d+)\)\)")
_FROM_BLOCKS = "{0}.flatten(-2)"


def norm_starting_at(statements: Sequence[Statement], first: int) -> NormRun | None:
    """The norm that starts at `statements[first]`: one statement, or three for a block_norm.

    A block_norm is an rms_norm without weight over blocks of the last dimension, between `unflatten` and `flatten`.
    """
    norm = _norm(statements[first])
    if norm is not None:
        return NormRun(first, first, statements[first].operands[0].text, norm)
    steps = statements[first : first + 3]
    split = _TO_BLOCKS.fullmatch(steps[0].template)
    norm = None if split is None or len(steps) < 3 else _norm(steps[1])
    if norm is None or split is None or steps[2].template != _FROM_BLOCKS:
        return None
    if (norm.kind, norm.width, norm.weight) != ("rms_norm", int(split[1]), None):
        return None
    if any(after.operands[0].text != before.target for before, after in pairwise(steps)):
        return None
    return NormRun(
        first, first + 2, steps[0].operands[0].text, ChainNorm("block_norm", norm.width, norm.eps, None, None)
    )


def norm_ending_at(statements: Sequence[Statement], last: int) -> NormRun | None:
    """The norm that ends at `statements[last]`."""
    for first in (last, last - 2):
        run = norm_starting_at(statements, first) if first >= 0 else None
        if run is not None and run.last == last:
            return run
    return None


def _norm(statement: Statement) -> ChainNorm | None:
    """The norm over the last dimension that a statement computes; None for another operation."""
    for kind, norm in TORCH_NORMS.items():
        found = re.fullmatch(rf"torch\.nn\.functional\.{kind}\(\{{0\}}{norm.text}\)", statement.template)
        if found is not None:
            given = found.groupdict()
            weight, bias = (_vector(statement, given.get(name)) for name in ("weight", "bias"))
            return ChainNorm(kind, int(given.get("width") or 0), float(given.get("eps") or norm.eps), weight, bias)
    return None


def _vector(statement: Statement, text: str | None) -> Ref | None:
    number = None if text is None else re.match(r"\{(\d+)\}", text)
    return None if number is None else statement.operands[int(number[1])]


def arguments(statement: Statement) -> tuple[str, list[ast.expr], dict[str, ast.expr]] | None:
    """The function that a statement calls and its arguments, with operand i as the name `operand_i`; or None."""
    names = [f"operand_{number}" for number in range(len(statement.operands))]
    try:
        node = ast.parse(statement.template.format(*names), mode="eval").body
    except (SyntaxError, ValueError, IndexError, KeyError):  # the template is no call of this form
        return None
    if not isinstance(node, ast.Call) or any(keyword.arg is None for keyword in node.keywords):
        return None
    return ast.unparse(node.func), node.args, {str(keyword.arg): keyword.value for keyword in node.keywords}


def operand(statement: Statement, node: ast.expr | None) -> Ref | None:
    """The operand that an argument is, without a change of view; None for another expression."""
    number = node.id.removeprefix("operand_") if isinstance(node, ast.Name) else ""
    if not isinstance(node, ast.Name) or node.id != f"operand_{number}" or not number.isdecimal():
        return None
    return statement.operands[int(number)]


def literal(node: ast.expr | None) -> object:
    """The value of a constant argument; None for another expression."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


_STATISTICS = frozenset({"mean", "var", "std", "var_mean", "std_mean", "norm", "vector_norm", "normalize"})


def over_other_dimensions(statement: Statement, dimensions: int) -> str | None:
    """The dimensions that a norm or a statistic is over, in words; None for others, and where it is the last alone.

    `dimensions` is the number of dimensions of the operand.
    """
    parsed = arguments(statement)
    if parsed is None or not dimensions or statement.op not in _STATISTICS | TORCH_NORMS.keys():
        return None
    function, positional, named = parsed
    rest = positional if function.startswith("operand_") else positional[1:]
    if statement.op in TORCH_NORMS:
        sizes = literal(named.get("normalized_shape", rest[0] if rest else None))
        several = isinstance(sizes, tuple | list) and len(sizes) > 1
        return f"the last {len(sizes)} dimensions" if several and isinstance(sizes, tuple | list) else None
    takes_power = statement.op in ("norm", "vector_norm", "normalize")
    given = named.get("dim", rest[takes_power] if len(rest) > takes_power else None)
    over = 1 if given is None and statement.op == "normalize" else literal(given)
    places = [each % dimensions for each in (over if isinstance(over, tuple | list) else [over]) if type(each) is int]
    if not places or places == [dimensions - 1]:
        return None
    return f"dimension{'s' if len(places) > 1 else ''} {' and '.join(map(str, places))}"
