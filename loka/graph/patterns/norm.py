"""Norms over the last dimension, or over blocks of it, recognised in a forward's statements."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from torch import nn

from loka.graph.ir import Ref, RefKind, Statement


@dataclass(frozen=True, slots=True)
class TorchNorm:
    """A torch norm over the last dimension, as in traced statements and in generated code.

    `arguments` are those of `torch.nn.functional.NAME`, in order. Five of them have the meaning of layer_norm's: input,
    normalized_shape, weight, bias, eps; any other must be in `fixed`.
    """

    arguments: tuple[str, ...]
    defaults: Mapping[str, object] = field(default_factory=dict)  # torch's; without one, eps depends on the dtype
    fixed: Mapping[str, object] = field(
        default_factory=dict
    )  # required values of arguments; with others it is another norm
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # equivalent functions, with their arguments
    module: type[nn.Module] | None = None  # torch's module; its forward is inlined where kernels may fuse it


# By the function's name, which is also that of the norm in kernels (`loka.kernels.fused.norm.norms`).
TORCH_NORMS: Mapping[str, TorchNorm] = MappingProxyType(
    {
        "layer_norm": TorchNorm(
            ("input", "normalized_shape", "weight", "bias", "eps"),
            defaults={"eps": 1e-05},
            aliases={"torch.layer_norm": ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")},
            module=nn.LayerNorm,
        ),
        "rms_norm": TorchNorm(
            ("input", "normalized_shape", "weight", "eps"),
            aliases={"torch.rms_norm": ("input", "normalized_shape", "weight", "eps")},
            module=nn.RMSNorm,
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


def parse_norm(statement: Statement) -> ChainNorm | None:
    """The norm that a statement computes; None for another operation, or a norm over more than one dimension."""
    parsed = arguments(statement)
    called = None if parsed is None or statement.call is not None else _called(parsed[0])
    if parsed is None or called is None:
        return None
    _, positional, named = parsed
    kind, norm, names = called
    given = {**dict(zip(names, positional, strict=False)), **named}
    if len(positional) > len(names) or set(given) - set(names) or operand(statement, given.get("input")) is None:
        return None
    if given["input"] is not positional[0] or operand(statement, given["input"]) != statement.operands[0]:
        return None
    if any(not _is(given.get(name), value, norm.defaults.get(name)) for name, value in norm.fixed.items()):
        return None
    width = _width(given.get("normalized_shape")) if "normalized_shape" in names else 0
    eps = literal(given["eps"]) if "eps" in given else norm.defaults.get("eps")
    if width is None or not isinstance(eps, float):
        return None
    affine = [given.get(name) for name in ("weight", "bias")]
    refs = [operand(statement, _uncast(node)) for node in affine]
    absent = [node is None or _is_none(node) for node in affine]
    if any(ref is None and not none for ref, none in zip(refs, absent, strict=True)):
        return None
    return ChainNorm(kind, width, eps, refs[0], refs[1])


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


def _called(function: str) -> tuple[str, TorchNorm, tuple[str, ...]] | None:
    """The name and the norm of a torch function, and the names of the function's arguments."""
    for name, norm in TORCH_NORMS.items():
        spelled = {f"torch.nn.functional.{name}": norm.arguments, **norm.aliases}
        if function in spelled:
            return name, norm, spelled[function]
    return None


def _is(node: ast.expr | None, value: object, default: object) -> bool:
    """True if an argument has this value, explicitly or by default."""
    try:
        return (default if node is None else ast.literal_eval(node)) == value
    except ValueError:
        return False


def _width(node: ast.expr | None) -> int | None:
    """The only size of a literal `normalized_shape`."""
    shape = literal(node)
    return int(shape[0]) if isinstance(shape, tuple | list) and len(shape) == 1 else None


def operand(statement: Statement, node: ast.expr | None) -> Ref | None:
    """The operand that an argument is, without a change of view; None for another expression."""
    number = node.id.removeprefix("operand_") if isinstance(node, ast.Name) else ""
    if not isinstance(node, ast.Name) or node.id != f"operand_{number}" or not number.isdecimal():
        return None
    return statement.operands[int(number)]


def _uncast(node: ast.expr | None) -> ast.expr | None:
    """The argument of a cast to float32, or to its own dtype where that is wider: kernels compute in float32 anyway."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name() as cast, attr="to")) if (
            ast.unparse(node) == f"{cast.id}.to(torch.promote_types({cast.id}.dtype, torch.float32))"
        ):
            return cast
    return node


def literal(node: ast.expr | None) -> object:
    """The value of a constant argument; None for another expression."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


@dataclass(frozen=True, slots=True)
class NormRun:
    """The statements of one norm, and its input.

    `divides` is true if the statements alone show that the blocks divide the last dimension; otherwise the caller has
    to check the size.
    """

    first: int
    last: int
    source: str  # the input, a local except for a norm of one statement
    norm: ChainNorm
    divides: bool = True


_LONGEST_RUN = 8  # statements: shape, two sizes, view, norm, two sizes, view


def norm_starting_at(statements: Sequence[Statement], first: int) -> NormRun | None:
    """The norm that starts at `statements[first]`: one statement, or several for a block_norm.

    A block_norm is an rms_norm without weight over blocks of the last dimension, between two changes of view: to blocks
    by `unflatten(-1, (-1, 256))`, or by a `view` or `reshape` whose last size is a literal; back by `flatten(-2)` after
    an unflatten, by `view_as` of its input, or by a `view` to its shape or to its sizes in order. The sizes may be read
    before either view.
    """
    norm = parse_norm(statements[first])
    if norm is not None:
        return NormRun(first, first, statements[first].operands[0].text, norm)
    return _block_norm(statements, first)


def norm_ending_at(statements: Sequence[Statement], last: int) -> NormRun | None:
    """The norm that ends at `statements[last]`."""
    for first in range(last, max(last - _LONGEST_RUN, -1), -1):
        run = norm_starting_at(statements, first)
        if run is not None and run.last == last:
            return run
    return None


def _block_norm(statements: Sequence[Statement], first: int) -> NormRun | None:
    refs = statements[first].operands
    if not refs or refs[0].kind is not RefKind.LOCAL:
        return None
    source = refs[0].text
    sizes: dict[str, int | None] = {}
    place = _after_sizes(statements, first, source, sizes)
    split = _split(statements[place], source) if place < len(statements) else None
    if split is None or place + 1 >= len(statements):
        return None
    norm = parse_norm(statements[place + 1])
    if norm is None or statements[place + 1].operands[0].text != statements[place].target:
        return None
    if (norm.kind, norm.width, norm.weight, norm.bias) != ("rms_norm", split.block, None, None):
        return None
    last = _after_sizes(statements, place + 2, source, sizes)
    if last >= len(statements) or not _joins(statements[last], statements[place + 1].target, source, sizes, split):
        return None
    block_norm = ChainNorm("block_norm", split.block, norm.eps, None, None)
    return NormRun(first, last, source, block_norm, split.unflattened)


@dataclass(frozen=True, slots=True)
class _Split:
    """A change of view to blocks; `unflattened`: it splits only the last dimension, so the blocks divide it."""

    block: int
    unflattened: bool


def _after_sizes(statements: Sequence[Statement], first: int, source: str, sizes: dict[str, int | None]) -> int:
    """The first statement that reads no size of `source`; fills `sizes` (target -> dimension, None for the shape)."""
    for place in range(first, len(statements)):
        read, dimension = _size(statements[place], source, sizes)
        if not read:
            return place
        sizes[statements[place].target] = dimension
    return len(statements)


def _size(statement: Statement, source: str, sizes: dict[str, int | None]) -> tuple[bool, int | None]:
    """True if a statement is the shape of `source` or one of its sizes, and the dimension (None for the shape)."""
    if len(statement.operands) != 1 or statement.call is not None or statement.operands[0].kind is not RefKind.LOCAL:
        return False, None
    read, template = statement.operands[0].text, statement.template
    if read == source and template in ("{0}.shape", "{0}.size()"):
        return True, None
    of_shape = sizes.get(read, 0) is None
    before, after = ("{0}[", "]") if of_shape else ("{0}.size(", ")")
    number = template.removeprefix(before).removesuffix(after)
    if (of_shape or read == source) and template == f"{before}{number}{after}" and number.isdecimal():
        return True, int(number)
    return False, None


def _split(statement: Statement, source: str) -> _Split | None:
    """The split of `source` into blocks by a statement; None for another operation."""
    viewed = _view(statement)
    if viewed is None or viewed[1].text != source or viewed[1].kind is not RefKind.LOCAL:
        return None
    name, _, given = viewed
    if name == "unflatten" and len(given) == 2 and literal(given[0]) == -1:
        parts = literal(given[1])
        block = parts[1] if isinstance(parts, tuple | list) and len(parts) == 2 else None
    elif name in ("view", "reshape"):
        block = literal(_sizes_of(given)[-1]) if given else None
    else:
        return None
    return _Split(block, name == "unflatten") if type(block) is int and block > 1 else None


def _joins(statement: Statement, target: str, source: str, sizes: dict[str, int | None], split: _Split) -> bool:
    """True if a statement gives `target`, the norm's result in blocks, the shape of `source` again."""
    viewed = _view(statement)
    if viewed is None or viewed[1].text != target:
        return False
    name, _, given = viewed
    if name == "flatten":
        return split.unflattened and [literal(node) for node in given] in ([-2], [-2, -1])
    refs = [operand(statement, node) for node in _sizes_of(given)]
    names = [ref.text for ref in refs if ref is not None and ref.kind is RefKind.LOCAL]
    if not names or len(names) != len(refs):
        return False
    if name in ("view_as", "reshape_as"):
        return names == [source]
    # A view to sizes 0, 1, ... has as many elements as the input only if no dimension is left out.
    whole = len(names) == 1 and sizes.get(names[0], 0) is None
    return name in ("view", "reshape") and (whole or [sizes.get(n) for n in names] == list(range(len(names))))


def _view(statement: Statement) -> tuple[str, Ref, list[ast.expr]] | None:
    """A view method, or torch's function of that name, without keywords: its name, the tensor, the other arguments."""
    parsed = arguments(statement)
    if parsed is None or statement.call is not None or parsed[2]:
        return None
    function, given, _ = parsed
    owner, _, name = function.rpartition(".")
    node: ast.expr = ast.Name(owner)
    if owner == "torch" and given:
        node, given = given[0], given[1:]
    tensor = operand(statement, node)
    return None if tensor is None else (name, tensor, given)


def _sizes_of(given: list[ast.expr]) -> list[ast.expr]:
    """The sizes of a view, given one by one or as a tuple."""
    return given[0].elts if len(given) == 1 and isinstance(given[0], ast.Tuple | ast.List) else given
