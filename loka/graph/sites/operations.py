"""What a forward does: its operations, each with what it reads and what reads it, and the products among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from loka.graph.sites.op_names import VIEWS
from loka.graph.sites.site import GemmKind
from loka.graph.sites.sizes import Sizes

TRANSFORMED = "products under torch.vmap or another transform of torch.func"


@dataclass(slots=True, eq=False)
class Operation:
    """One result of one operation."""

    op: str  # "silu", "cat", "input", "parameter", ...
    parents: tuple[Operation, ...] = ()
    constant: bool = False  # depends only on parameters, buffers and constants
    gemm: bool = False
    parameter: str | None = None  # the qualified name, if this is a Parameter or a part of one
    copies: bool = False  # the matrix of its one parent, perhaps transposed, for each sample
    rows: bool = False  # a view with the rows of its parent, in their order
    folded: bool = False  # a product's rows as several dimensions, by a Parameter of more than two
    buffer: str | None = None
    children: list[Operation] = field(default_factory=list)
    owner: str = ""  # qualified name of the module whose forward computes it
    differentiable: bool = True  # False if gradients do not go through it

    @property
    def view(self) -> bool:
        """True if it has the same values in another shape or dtype."""
        return self.op in VIEWS


def reached(starts: Iterable[Operation], onward: Callable[[Operation], Iterable[Operation]]) -> set[Operation]:
    """Some operations, and all those to which these lead: `onward` gives the next ones of each."""
    found = set(starts)
    waiting = list(found)
    while waiting:
        new = {each for each in onward(waiting.pop()) if each not in found}
        found |= new
        waiting += new
    return found


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a GEMM. `module` is set for a plain nn.Linear and for attention: it names the site."""

    kind: GemmKind
    module: str | None
    owner: str
    weight: str | None
    bias: str | None
    m: Sizes
    k: Sizes
    n: Sizes
    flops: Sizes
    input_grad: bool
    weight_grad: bool
    source: Operation | None  # that makes the input
    result: Operation
    file: str
    line: int
    blocked: str | None

    @property
    def title(self) -> str:
        """What notes call it."""
        return self.module or self.weight or self.owner or "the model"


@dataclass(frozen=True, slots=True)
class OtherProduct:
    """A convolution or recurrent layer, which costs FLOPs and is not a site; or products that cannot be seen.

    `flops` are () where these are not known.
    """

    op: str
    owner: str
    flops: Sizes


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a norm or an activation, with its owner and position; torch's own modules have no position."""

    op: str  # one of FUNCTIONS
    owner: str
    file: str
    line: int
    result: Operation


@dataclass(frozen=True, slots=True)
class Operations:
    """What one forward does, in its order."""

    calls: tuple[Call, ...]
    others: tuple[OtherProduct, ...]
    functions: tuple[FunctionCall, ...]
    outputs: tuple[Operation, ...]  # results of the model
    parameters: Mapping[str, Operation]
    called: frozenset[str]  # modules whose forward runs
