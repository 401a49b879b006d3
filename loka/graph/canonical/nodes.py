"""Nodes of the canonical graph: what a forward computes, without the layouts in which it keeps it.

A node is a flat row of elements; a `Value` is a tensor that shows them in a layout (`layout`). Whatever a node reads,
it reads along its own elements (`Step`), so that transposes and reshapes between two nodes are no nodes themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeVar, cast

from loka.graph.canonical.layout import Dims, Piece, Size, Step


@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """A value of the forward. `shape` is that of its elements in order; `place` is the statement that made it."""

    shape: tuple[Size, ...] = field(compare=False)
    place: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: the elements of a node in a layout. A dimension of () is of one element, or broadcast to its size."""

    node: Node
    dims: Dims
    shape: tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """What a node reads: another node along its own elements."""

    node: Node
    steps: tuple[Step, ...]  # from the reader's elements to the operand's


@dataclass(eq=False, slots=True)
class Source(Node):
    """A tensor that is taken as it is: an argument, or the result of a statement that is not looked into."""


@dataclass(eq=False, slots=True)
class Parameter(Node):
    """A Parameter or a buffer of the owner, by its name."""

    name: str


@dataclass(eq=False, slots=True)
class Part(Node):
    """A slice of another value along one of its dimensions; where `selected`, without that dimension."""

    of: Value
    dim: int
    start: int
    length: int
    selected: bool


@dataclass(eq=False, slots=True)
class Linear(Node):
    """x @ weight.T, rows of x by a weight (N, K); the elements are (rows, N)."""

    x: Node
    rows: tuple[Step, ...]  # from the own elements to those of x, without N
    k: tuple[Piece, ...]  # of x
    weight: Node
    weight_n: tuple[Piece, ...]
    weight_k: tuple[Piece, ...]  # in the order of k
    site: str | None = field(compare=False)  # None for a product with a Parameter that is no GEMM as it is written
    bias: Value | None = None  # (N,)
    unbiased: Node | None = None  # the same without the bias


@dataclass(eq=False, slots=True)
class Product(Node):
    """A product of two values that are no Parameters, batched; the elements are (batch, rows, columns)."""

    left: Node
    right: Node
    batch: tuple[tuple[Step, ...], tuple[Step, ...]]  # from the own elements to those of left and right
    rows: tuple[Step, ...]  # to those of left
    columns: tuple[Step, ...]  # to those of right
    k: tuple[tuple[Piece, ...], tuple[Piece, ...]]  # of left and of right


@dataclass(eq=False, slots=True)
class Pair(Node):
    """A sum ("add") or a product ("mul") of two values, element by element."""

    op: str
    operands: tuple[Operand, Operand]
    cast: int | None = None  # the operand that is cast to the dtype of the other one, which autocast decides


@dataclass(eq=False, slots=True)
class Norm(Node):
    """A norm over some of the elements of x, with the same elements as x."""

    kind: str  # "layer_norm", "rms_norm"
    x: Node
    over: tuple[Piece, ...]
    eps: float
    weight: Value | None
    bias: Value | None


@dataclass(eq=False, slots=True)
class Activation(Node):
    """A function of each element of x, by torch's name of it, with the constants that are not torch's own."""

    name: str
    x: Node
    constants: tuple[float, ...] = ()


@dataclass(eq=False, slots=True)
class Concatenation(Node):
    """Values side by side along one dimension; the elements are those of that tensor in order."""

    parts: tuple[Value, ...]
    dim: int


@dataclass(eq=False, slots=True)
class Other(Node):
    """Anything else without an effect; it is computed by the statements as they were traced."""


N = TypeVar("N", bound=Node)


@dataclass(slots=True)
class Graph:
    """The nodes of a forward, each once."""

    known: dict[tuple[object, ...], Node] = field(default_factory=dict)

    def one(self, node: N, *key: object) -> N:
        """The given node, or one that is known already with the same key: without a key, with the same fields."""
        own = key or tuple(getattr(node, each.name) for each in fields(node) if each.compare)
        return cast(N, self.known.setdefault((type(node), *own), node))


def reads_of(node: Node) -> list[Node]:
    """The nodes that a node reads."""
    found: list[Node] = []
    waiting = [getattr(node, each.name) for each in fields(node)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Node):
            found.append(value)
        elif isinstance(value, Value | Operand):
            found.append(value.node)
        elif isinstance(value, tuple):
            waiting += value
    return found


def is_weight(node: Node) -> bool:
    """True for a Parameter, and for a part of one."""
    while isinstance(node, Part):
        node = node.of.node
    return isinstance(node, Parameter)
