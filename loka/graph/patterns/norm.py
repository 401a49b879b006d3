"""Norms over the last dimension, or over blocks of it, recognised in a forward's canonical statements."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from torch import nn

from loka.graph.expression import Arg, Call, Constant, Ref, items_of
from loka.graph.ir import RMS_NORM_EPS, BatchNorm, Statement


@dataclass(frozen=True, slots=True)
class TorchNorm:
    """A function of torch.nn.functional that is a norm over the last dimension, as generated code calls it.

    Five of its arguments have the meaning of layer_norm's: input, normalized_shape, weight, bias, eps; any other is in
    `fixed`.
    """

    module: type[nn.Module] | None = None  # torch's module; its forward is inlined where kernels may fuse it
    fixed: Mapping[str, object] = field(default_factory=dict)  # values of further arguments


# By the function's name, which is also that of the norm in kernels (`loka.kernels.fused.norm.norms`).
TORCH_NORMS: Mapping[str, TorchNorm] = MappingProxyType(
    {
        "layer_norm": TorchNorm(nn.LayerNorm),
        "rms_norm": TorchNorm(nn.RMSNorm),
    }
)
BATCH_NORM = "batch_norm"
_FUNCTIONS = "torch.nn.functional."


@dataclass(frozen=True, slots=True)
class ChainNorm:
    """A norm over the last dimension, of `width` elements; a block_norm is over blocks of `width` neighbours in it.

    A batch_norm is over the rows of each of `width` columns.
    """

    kind: str  # "block_norm", "batch_norm", or one of TORCH_NORMS
    width: int  # 0 if torch's function does not have it
    eps: float  # of a batch_norm its module has it
    weight: Ref | None
    bias: Ref | None
    module: Ref | None = None  # of a batch_norm


@dataclass(frozen=True, slots=True)
class NormRun:
    """The statements of one norm, and its input."""

    first: int
    last: int
    source: str  # the input, a local except for a norm of one statement
    norm: ChainNorm


def norm_starting_at(statements: Sequence[Statement], first: int) -> NormRun | None:
    """The norm that starts at `statements[first]`: one statement, or three for a block_norm.

    A block_norm is an rms_norm without weight over blocks of the last dimension, between `unflatten` and `flatten`.
    """
    norm = _norm(statements[first])
    if norm is not None:
        return NormRun(first, first, statements[first].operands[0].text, norm)
    steps = statements[first : first + 3]
    norm = _norm(steps[1]) if len(steps) == 3 else None
    if norm is None or norm.kind != "rms_norm" or norm.weight is not None or not _is_of_blocks(steps, norm.width):
        return None
    if any(after.operands[0].text != before.target for before, after in pairwise(steps)):
        return None
    return NormRun(
        first, first + 2, steps[0].operands[0].text, ChainNorm("block_norm", norm.width, norm.eps, None, None)
    )


def _is_of_blocks(steps: Sequence[Statement], width: int) -> bool:
    """True if three statements split the last dimension into blocks of this width and put them together again."""
    split, _, joined = (step.value for step in steps)
    if not isinstance(split, Call) or not isinstance(joined, Call):
        return False
    sizes = split.args[2] if split.target == ".unflatten" and split.args[1:2] == (-1,) else None
    is_split = isinstance(sizes, tuple) and len(sizes) == 2 and sizes[1] == width
    return is_split and joined.target == ".flatten" and joined.args[1:] == (-2,)


def norm_ending_at(statements: Sequence[Statement], last: int) -> NormRun | None:
    """The norm that ends at `statements[last]`."""
    for first in (last, last - 2):
        run = norm_starting_at(statements, first) if first >= 0 else None
        if run is not None and run.last == last:
            return run
    return None


def _norm(statement: Statement) -> ChainNorm | None:
    """The norm over the last dimension or over the rows that a statement computes; None for another operation."""
    if isinstance(statement.called, BatchNorm):
        norm = statement.called
        return ChainNorm(BATCH_NORM, norm.width, 0.0, norm.weight, norm.bias, norm.module)
    value = statement.value
    kind = value.target.removeprefix(_FUNCTIONS) if isinstance(value, Call) else ""
    if not isinstance(value, Call) or kind not in TORCH_NORMS or value.target == kind:
        return None
    given = norm_signature(kind).bind(*value.args, **dict(value.kwargs))
    given.apply_defaults()
    named: Mapping[str, Any] = given.arguments
    vectors = [named.get("weight"), named.get("bias")]
    weight, bias = map(_vector, vectors)
    sizes, eps = named.get("normalized_shape", (0,)), named["eps"]
    eps = RMS_NORM_EPS if eps is None and kind == "rms_norm" else eps
    if not isinstance(sizes, tuple) or len(sizes) != 1 or type(sizes[0]) is not int or not isinstance(eps, float | int):
        return None
    if [weight is None, bias is None] != [each is None for each in vectors]:
        return None
    fixed, x = TORCH_NORMS[kind].fixed, named["input"]
    if not isinstance(x, Ref) or x in (weight, bias) or any(named[name] != each for name, each in fixed.items()):
        return None
    return ChainNorm(kind, sizes[0], float(eps), weight, bias)


@cache
def norm_signature(kind: str) -> inspect.Signature:
    """The signature of a norm of torch.nn.functional."""
    return inspect.signature(getattr(nn.functional, kind))


def _vector(value: Arg) -> Ref | None:
    """A weight or bias of a norm, perhaps in float32 at least, as kernels compute; None for another expression."""
    if not isinstance(value, Call):
        return value if isinstance(value, Ref) else None
    of = value.args[0] if value.target == ".to" else None
    wide = Call("torch.promote_types", (Call("getattr", (of, "dtype")), Constant("torch.float32")))
    return of if isinstance(of, Ref) and value.args[1:] == (wide,) else None


_STATISTICS = frozenset({"mean", "var", "std", "var_mean", "std_mean", "norm", "vector_norm", "normalize"})


def over_other_dimensions(statement: Statement, dimensions: int) -> str | None:
    """The dimensions that a norm or a statistic is over, in words; None for others, and where it is the last alone.

    `dimensions` is the number of dimensions of the operand.
    """
    value = statement.value
    if not isinstance(value, Call) or not dimensions or statement.op not in _STATISTICS | TORCH_NORMS.keys():
        return None
    rest, named = value.args[1:], dict(value.kwargs)
    if statement.op in TORCH_NORMS:
        sizes = items_of(named.get("normalized_shape", rest[0] if rest else None))
        return f"the last {len(sizes)} dimensions" if len(sizes) > 1 else None
    takes_power = statement.op in ("norm", "vector_norm", "normalize")
    given = named.get("dim", rest[takes_power] if len(rest) > takes_power else None)
    over = (1,) if given is None and statement.op == "normalize" else items_of(given)
    places = [each % dimensions for each in over if type(each) is int]
    if not places or places == [dimensions - 1]:
        return None
    return f"dimension{'s' if len(places) > 1 else ''} {' and '.join(map(str, places))}"
