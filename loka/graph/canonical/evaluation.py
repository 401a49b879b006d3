"""Runs of statements, evaluated in float64 on numbers drawn at random.

Two functions made of sums, products, quotients, powers, means and the like are analytic: where they agree at a few
random points, they are the same function. So it can be tested what statements compute, whichever way they are written.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loka.graph.ir import Ref, RefKind, Statement

ANALYTIC = frozenset(
    {
        "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "square", "pow",
        "sqrt", "rsqrt", "reciprocal", "exp", "log", "log1p", "sigmoid", "tanh", "erf", "silu", "gelu", "softplus",
        "mish", "addcmul", "addcdiv", "mean", "sum", "var", "std", "var_mean", "std_mean", "norm", "vector_norm",
        "layer_norm", "rms_norm", "group_norm", "einsum",
    }
)  # fmt: skip
PIECES = frozenset(
    {
        "threshold", "where", "zeros_like", "zeros", "new_zeros", "gt", "lt", "ge", "le", "maximum", "max", "clamp",
        "clamp_min", "clip",
    }
)  # fmt: skip
_PLACING = frozenset(
    {"cat", "concat", "concatenate", "hstack", "vstack", "unsqueeze", "squeeze"}
)  # values stay as they are
_SLICING = frozenset({"chunk", "split", "narrow", "tensor_split", "split_with_sizes", "unbind", "select"})
_READING = frozenset({"size", "dim", "shape", "ndim", "device"})
CASTS = frozenset({"to", "float", "double", "half", "bfloat16", "type_as", "contiguous"})  # of dtype and layout
_KNOWN = ANALYTIC | PIECES | _PLACING | _SLICING | _READING | CASTS
_NODES = (
    ast.Expression, ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.List,
    ast.BinOp, ast.UnaryOp,
    ast.Compare, ast.Gt, ast.Lt, ast.GtE, ast.LtE, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow,
    ast.Subscript, ast.Slice,
)  # fmt: skip
_DTYPES = frozenset({"float32", "float64", "bfloat16", "float16", "float", "double", "half", "dtype"})


@dataclass(frozen=True, slots=True)
class Evaluable:
    """A statement that can be evaluated. `code` is over the names of `named`."""

    target: str
    code: Any
    refs: tuple[Ref, ...]


def named(ref: Ref) -> str:
    """The name of an operand in the text of an evaluation."""
    if ref.kind is RefKind.LOCAL:
        return ref.text
    return "".join(letter if letter.isalnum() else f"_{ord(letter)}_" for letter in f"{ref.text}()")


def evaluable(statement: Statement) -> Evaluable | None:
    """The statement for evaluation; None where it may be no analytic function of its operands, or has effects."""
    names = [named(ref) for ref in statement.operands]
    try:
        tree = ast.parse(statement.template.format(*names), mode="eval")
    except (SyntaxError, ValueError, IndexError, KeyError):
        return None
    if statement.op in ("type_as", "checked_length") and names:  # their first operand: another has the dtype alone
        tree = ast.fix_missing_locations(ast.Expression(ast.Name(names[0], ast.Load())))
    if statement.target == "_" or not all(_is_known(node, names) for node in ast.walk(tree)):
        return None
    return Evaluable(statement.target, compile(tree, "<statement>", "eval"), statement.operands)


def evaluated(steps: Iterable[Evaluable], values: Mapping[Ref, Tensor], gradients: bool = False) -> object:
    """What the last of the steps computes from values of what they read; None where that cannot be computed.

    `gradients`: the result has them.
    """
    known: dict[str, object] = {named(ref): value for ref, value in values.items()}
    result: object = None
    with _IgnoreCasts(), torch.set_grad_enabled(gradients):
        for step in steps:
            try:
                result = known[step.target] = eval(step.code, {"torch": torch, "__builtins__": {}}, known)  # noqa: S307 - own text
            except (RuntimeError, TypeError, ValueError, IndexError, NameError, AttributeError):
                return None
    return result


def agree(ours: object, theirs: Tensor) -> bool:
    """True if two float64 results are the same but for rounding."""
    if not isinstance(ours, Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    return bool(torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12))


def drawn(sizes: Iterable[tuple[int, ...]], seed: int, scale: float = 1.0) -> list[Tensor]:
    """Normally distributed float64 tensors of these sizes, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64) * scale for size in sizes]


def _is_known(node: ast.AST, names: list[str]) -> bool:
    """True for a node of an expression over `names` that calls and reads only what is known."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and all(keyword.arg for keyword in node.keywords)
    if isinstance(node, ast.Attribute):
        return node.attr in (*_KNOWN, *_DTYPES, "nn", "functional", "special", "linalg")
    if isinstance(node, ast.Name):
        return node.id in (*names, "torch")
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str) or "->" in node.value  # an einsum's, no device that a cast moves it to
    return isinstance(node, _NODES)


class _IgnoreCasts(TorchFunctionMode):
    """Computes in the dtype of the inputs, whatever the statements cast to: it matters what they compute."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in CASTS and args:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "dtype"})
