"""A forward as straight-line statements: traced, checked, printed and bound where a call or region is replaced."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka.graph.reads import Reads


class RefKind(StrEnum):
    """What a statement's operand is."""

    LOCAL = "local"  # a variable of the forward: an argument or an earlier target
    ATTRIBUTE = "attribute"  # an expression on self: "self.fmb[0].weight"


DTYPE = "residual_dtype"  # the op of a statement that computes a dtype, from those of locals and other such targets


@dataclass(frozen=True, slots=True)
class Ref:
    """One operand of a statement. `text` is a safe Python expression, made by LoKA, never copied from a name."""

    kind: RefKind
    text: str


@dataclass(frozen=True, slots=True)
class SiteCall:
    """A statement that is a GEMM of the plan, written as y = linear(x, weight, bias) between two changes of view.

    `x`, `weight` and `bias` are templates over the statement's operands ("{0}.transpose(-1, -2)"); `out` is a template
    over the product ("{0}.transpose(-1, -2)"). For a plain linear they are "{0}", "{1}", "{2}" and "{0}".
    """

    site: str
    x: str
    weight: str
    bias: str | None
    out: str


@dataclass(frozen=True, slots=True)
class Statement:
    """`target = template.format(*operands)`."""

    target: str  # an identifier
    op: str  # "linear", "layer_norm", "silu", "add", "cat", ...: the torch function's own name
    template: str  # "torch.nn.functional.layer_norm({0}, (2048,), {1}, {2}, 1e-05)"
    operands: tuple[Ref, ...]
    call: SiteCall | None = None
    note: str = ""  # the module it came from, where a child was inlined: "fmb.1"
    even: bool = False  # whether it is a sum or product of two locals that both have the result's shape

    def text(self) -> str:
        """The statement as Python, as the model has it."""
        return f"{self.target} = {self.template.format(*(ref.text for ref in self.operands))}"


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive statements around one site that one kernel takes along.

    `first` and `last` index `ForwardIR.statements`; what is read from outside are the region's arguments; only
    the last target is read outside.
    """

    site: str
    first: int
    last: int
    ops: tuple[str, ...]  # ("layer_norm", "linear", "layer_norm", "silu")


@dataclass(frozen=True, slots=True)
class FmInteraction:
    """Statements that mix a sample's embeddings (`fm_interaction`), which are computed together where they begin.

    Numbers but `sizes` index `ForwardIR.statements`.
    """

    first: int  # the first of the statements below
    transpose: int
    inner: int  # x^T @ rank
    outer: int  # x @ inner
    compress: int | None  # compress @ x
    x: str  # the local that is mixed
    sizes: tuple[int, int, int, int]  # embeddings, dimension, rank, weighted sums (0 without `compress`)

    @property
    def made(self) -> tuple[int, ...]:
        """The statements whose results are read outside."""
        return (self.outer,) if self.compress is None else (self.outer, self.compress)

    @property
    def places(self) -> tuple[int, ...]:
        """All of its statements."""
        found = (self.transpose, self.inner, self.outer, self.compress)
        return tuple(place for place in found if place is not None)


@dataclass(frozen=True, slots=True)
class ConcatNorm:
    """A norm with what is put together for it (`concat_norm`), which are computed together where the norm stands.

    Numbers index `ForwardIR.statements`.
    """

    norm: int
    skipped: tuple[int, ...]  # the concatenation and the sum, those that there are, and views before the norm's last
    parts: tuple[Ref, ...]  # (B, n_i, d) each
    residual: Ref | None  # (B, n, d), n the sum of the n_i
    rows: tuple[int, ...] = ()  # the n_i; plans of LoKA before version 4 do not have them

    @property
    def places(self) -> tuple[int, ...]:
        """All of its statements."""
        return (*self.skipped, self.norm)


@dataclass(frozen=True, slots=True)
class Cross:
    """A multiply-add behind a GEMM (`loka.graph.patterns.cross`), which is computed where its sum stands.

    Numbers index `ForwardIR.statements`.
    """

    sum: int  # factor * (product + bias) + residual
    skipped: tuple[int, ...]  # the multiplication, and the addition of a bias, where they are statements of their own
    linear: int  # the GEMM
    product: str  # the local that it sets
    bias: Ref | None  # (width,), of the GEMM or of an addition; where it is the GEMM's, that is computed without it
    factor: Ref  # (B, ..., width)
    residual: Ref  # (B, ..., width)
    width: int

    @property
    def places(self) -> tuple[int, ...]:
        """Its statements but for the GEMM."""
        return (*self.skipped, self.sum)

    @property
    def read(self) -> tuple[str, ...]:
        """The locals that it reads."""
        return (self.product, self.factor.text, self.residual.text)


@dataclass(frozen=True, slots=True)
class ForwardIR:
    """One module's forward, with the children named in `inlined` printed into it.

    It was shown to be the same function as the original: outputs, gradients, buffers, random state and attributes, in
    training and evaluation, at two batch sizes, with and without autocast (`loka.graph.equivalence`).
    """

    owner: str  # qualified name of the module; "" is the model
    owner_type: str  # "package.module.Class" of the module
    arguments: tuple[str, ...]  # of forward, without self; with "=None"-like defaults as printed by LoKA
    statements: tuple[Statement, ...]
    result: str  # the expression that is returned
    inlined: tuple[str, ...]  # names of children, relative to the owner, whose forward is printed here
    source_hash: str  # over the source of the owner's forward and of every inlined child's
    regions: tuple[Region, ...] = ()
    mixes: tuple[FmInteraction, ...] = ()
    joins: tuple[ConcatNorm, ...] = ()
    crosses: tuple[Cross, ...] = ()
    rewritten: tuple[str, ...] = ()  # by these mods, to the same function; then it is wanted whatever runs in FP8
    # What the text has built in, for the model that it is bound to to be compared with.
    reads: tuple[Reads, ...] = ()  # of the modules around what it calls; plans of before have none of these three
    called: tuple[str, ...] = ()  # children, relative to the owner, that it calls: they run as they are
    constants: tuple[tuple[str, str], ...] = ()  # global variables and the like, each with its value as text
