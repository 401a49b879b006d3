"""IR of a forward: straight-line statements, and the regions and patterns found in them; or the reason for none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from loka.errors import LokaError
from loka.graph.expression import (
    PRODUCT,
    Arg,
    Call,
    Constant,
    Ref,
    function,
    items_of,
    mapped,
    of_product,
    refs_in,
    text_of,
)
from loka.graph.fingerprint import Fingerprint

Shape = tuple[int | None, ...]  # of a tensor; None is a dimension that differs between calls, such as the batch

DTYPE = "residual_dtype"  # op of a statement that computes a dtype from those of locals and other such targets
# What torch's rms_norm without an eps takes in float32, bfloat16 and float16: float32's, in the digits that an eps of a
# norm is recognised to.
RMS_NORM_EPS = 1.19209e-07
LEAKY_RELU, SLOPE = "leaky_relu", 0.01  # op of a LeakyReLU, and the slope that torch's has where none is given
GEMMS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "conv1d"})
WEIGHTED = "weighted_sum"  # op of a product with a Parameter that is no GEMM as it is written, which they take, too


def is_slope(value: object) -> bool:
    """True for the slope of a LeakyReLU that kernels take: above 0, which is a ReLU's, and below 1, which is none."""
    return isinstance(value, float) and 0.0 < value < 1.0


@dataclass(frozen=True, slots=True)
class SiteCall:
    """A statement's GEMM in the form y = linear(x, weight, bias) between two changes of view.

    `out` is an expression over `PRODUCT`: "product.transpose(-1, -2)". For a plain linear it is `PRODUCT` alone, and x,
    weight and bias are names.
    """

    site: str
    x: Arg
    weight: Arg
    bias: Arg = None
    out: Arg = PRODUCT

    def linear(self, x: Arg, weight: Arg, bias: Arg) -> Arg:
        """The call as torch.nn.functional.linear of these, with the view of its product."""
        product = function("linear", x, weight) if bias is None else function("linear", x, weight, bias)
        return of_product(self.out, product)


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """The nn.BatchNorm1d that a statement calls, on a matrix (M, width)."""

    module: Ref  # "self.norms[0]"
    width: int
    weight: Ref | None
    bias: Ref | None


@dataclass(frozen=True, slots=True)
class Dropout:
    """The nn.Dropout that a statement calls."""

    module: Ref
    p: float  # above 0 and below 1
    columns: int  # of the matrix; 0: they differ between calls


@dataclass(frozen=True, slots=True)
class Statement:
    """`target = value`."""

    target: str  # identifier
    op: str  # "linear", "layer_norm", "silu", "add", "cat", ...: the torch function's own name
    value: Arg
    call: SiteCall | None = None
    note: str = ""  # the inlined child it came from: "fmb.1"
    columns: int | None = None  # of a sum or product of two locals of the result's shape; 0: they differ between calls
    called: BatchNorm | Dropout | None = None  # the module of torch that it calls, where kernels may take that

    @property
    def even(self) -> bool:
        """True for a sum or product of two different locals that both have the result's shape."""
        return self.columns is not None

    @property
    def operands(self) -> tuple[Ref, ...]:
        """What it reads, each once, in order; also what its call reads, which may name weights in another way."""
        call, called = self.call, self.called
        of_call = () if call is None else (call.x, call.weight, call.bias)
        of_norm = (called.weight, called.bias) if isinstance(called, BatchNorm) else ()
        return refs_in(self.value, *of_call, *of_norm)

    @property
    def form(self) -> str:
        """What it does, whatever its operands are called."""
        return text_of(self.value, lambda ref: ref.kind)

    def text(self) -> str:
        """The statement as Python code, without replacing its GEMM."""
        return f"{self.target} = {text_of(self.value)}"

    def reads(self, change: Callable[[Ref], Arg]) -> Statement:
        """The statement with something else for each name that it reads."""
        call = self.call
        if call is not None:
            x, weight, bias = (mapped(each, change) for each in (call.x, call.weight, call.bias))
            call = replace(call, x=x, weight=weight, bias=bias)
        return replace(self, value=mapped(self.value, change), call=call)


@dataclass(frozen=True, slots=True)
class Region:
    """Consecutive statements around one site that can be fused with its GEMM.

    `first` and `last` index `ForwardIR.statements`. Values read from outside are the region's arguments; only the last
    target is read outside.
    """

    site: str
    first: int
    last: int
    ops: tuple[str, ...]  # ("layer_norm", "linear", "layer_norm", "silu")


@dataclass(frozen=True, slots=True)
class FmInteraction:
    """Statements of an FM interaction (`fm_interaction`), computed together in the place of the first one.

    All numbers but `sizes` index `ForwardIR.statements`.
    """

    first: int  # the first of them that reads x
    outer: int  # what has the products x @ (x^T @ rank)
    compress: int | None  # what has the weighted sums compress @ x
    skipped: tuple[int, ...]  # the other statements, read by these alone
    gemms: tuple[int, ...]  # the products with the matrices, sites of their own: x^T @ rank, and the weighted sums
    x: str  # the local with the embeddings
    rank: str  # expression of the matrix (n, r)
    weights: str | None  # expression of the matrix (c, n)
    sizes: tuple[int, int, int, int]  # embeddings, dimension, rank, weighted sums (0 without `compress`)
    views: tuple[Arg, ...]  # of what the kernel writes, for each of `made`: expressions over `PRODUCT`

    @property
    def made(self) -> tuple[int, ...]:
        """The statements whose results are read outside."""
        return (self.outer,) if self.compress is None else (self.outer, self.compress)

    @property
    def places(self) -> tuple[int, ...]:
        """All statements of the interaction."""
        return (*self.skipped, *self.made)

    def is_added(self, joins: Iterable[ConcatNorm]) -> bool:
        """True if one of these norms is of a sum with the embeddings."""
        return any(join.residual is not None and join.residual.text == self.x for join in joins)


@dataclass(frozen=True, slots=True)
class ConcatNorm:
    """A norm fused with the concatenation and sum before it (`concat_norm`), computed in the place of the norm.

    Numbers index `ForwardIR.statements`.
    """

    norm: int
    skipped: tuple[int, ...]  # the concatenation and the sum, where present, and the norm's statements before its last
    parts: tuple[Ref, ...]  # (B, n_i, d) each
    residual: Ref | None  # (B, n, d), n being the sum of the n_i
    rows: tuple[int, ...]  # the n_i

    @property
    def places(self) -> tuple[int, ...]:
        """All statements of the pattern."""
        return (*self.skipped, self.norm)


@dataclass(frozen=True, slots=True)
class DotInteraction:
    """The products of all pairs of a sample's rows (`dot_interaction`), computed in the place of the product.

    Numbers except `sizes` index `ForwardIR.statements`.
    """

    product: int  # x @ x^T
    skipped: tuple[int, ...]  # the transposition, where the product alone reads it
    x: str  # the local with the rows (B, n, d)
    sizes: tuple[int, int]  # n, d

    @property
    def places(self) -> tuple[int, ...]:
        """Its statements."""
        return (*self.skipped, self.product)


class NearKind(StrEnum):
    """What a near miss would be."""

    JOIN = "join"
    MIXING = "mixing layer"
    NORM = "norm of a region"  # its place is that of the GEMM


@dataclass(frozen=True, slots=True)
class NearMiss:
    """A statement that would end an interaction or a region, but for one thing."""

    place: int  # its index in `ForwardIR.statements`
    missing: str  # what that is, in words
    kind: NearKind = NearKind.JOIN


@dataclass(frozen=True, slots=True)
class ForwardIR:
    """A module's forward, with the children named in `inlined` inlined.

    The equivalence check passed (`loka.graph.equivalence`): the same outputs, gradients, buffers, random state and
    attributes as the original, in training and evaluation, at two batch sizes, with and without autocast.
    """

    owner: str  # qualified name of the module; "" is the model
    owner_type: str  # "package.module.Class" of the module
    arguments: tuple[str, ...]  # arguments of forward without self, with their printed defaults
    statements: tuple[Statement, ...]
    result: Arg  # what it returns
    inlined: tuple[str, ...]  # names of the inlined children, relative to the owner
    regions: tuple[Region, ...] = ()
    mixes: tuple[FmInteraction, ...] = ()
    joins: tuple[ConcatNorm, ...] = ()
    dots: tuple[DotInteraction, ...] = ()
    near: tuple[NearMiss, ...] = ()  # of interactions; () in plans, which have the reasons
    rewritten: tuple[str, ...] = ()  # mods that rewrote it, to the same function; then it is used whatever runs in FP8
    fingerprint: Fingerprint | None = None  # of the owner's own forward; None after a quick check, which only times
    # Conditions on the arguments, such as "mask is None", under which the statements are the forward. A call that meets
    # one of them otherwise runs the module's own forward.
    guards: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """A module whose forward was not rewritten, with the reason.

    `reason` names the line of the user's code where there is one: "depends on the number of rows: x.shape[0] <= 1024 at
    models.py:44 'if x.size(0) > 1024'".
    """

    owner: str  # qualified name; "" is the model
    reason: str
    inside: str | None = ""  # the inlined child whose forward the reason is about; "": the owner's own; None: unknown
    called: bool = True  # False if the model never calls the module

    def __str__(self) -> str:
        return f"NOT PATCHED region '{self.owner}': {self.reason}"


class CannotTraceError(LokaError):
    """Raised during tracing; `trace_forward` turns it into `Refused`."""

    inside: str | None = None  # as in `Refused`

    def inside_of(self, child: str) -> CannotTraceError:
        """The same error, about the forward of a child unless another is known already."""
        if self.inside is None:
            self.inside = child
        return self


def padded(call: SiteCall, columns: int, rows: int, n: int) -> SiteCall:
    """The call with `columns` zero columns appended to x and weight, and `rows` zero rows to weight and bias.

    If `rows` is not 0, the product is sliced to its first `n` columns.
    """
    x = function("pad", call.x, (0, columns)) if columns else call.x
    weight = function("pad", call.weight, (0, columns, 0, rows) if rows else (0, columns))
    if not rows:
        return replace(call, x=x, weight=weight)
    first = Call("operator.getitem", (PRODUCT, (Constant("..."), Call("slice", (None, n, None)))))
    bias = None if call.bias is None else function("pad", call.bias, (0, rows))
    return SiteCall(call.site, x, weight, bias, of_product(call.out, first))


@dataclass(frozen=True, slots=True)
class Unpadded:
    """A padded linear whose zero columns are left to the kernels that write its operands."""

    x: Arg
    weight: Arg  # its rows may still be padded
    columns: int  # zero columns missing at the end of both


def unpadded(call: SiteCall) -> Unpadded | None:
    """The call without the zero columns added by `padded`; None where there are none."""
    x, weight = _padding(call.x), _padding(call.weight)
    if x is None or weight is None or x[1] != weight[1][:2] or x[1][0] != 0:
        return None
    bare, (_, columns, *rows) = weight
    return Unpadded(x[0], function("pad", bare, (0, 0, *rows)) if rows else bare, columns)


def _padding(value: Arg) -> tuple[Arg, tuple[int, ...]] | None:
    """What `padded` has padded, and by how much; None for another expression."""
    if not isinstance(value, Call) or value.target != "torch.nn.functional.pad" or len(value.args) != 2:
        return None
    inner, sizes = value.args
    return inner, tuple(each for each in items_of(sizes) if type(each) is int)
