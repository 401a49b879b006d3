"""FM and dot interactions, concat norms: shapes of their functions, and the arguments of their calls.

Each shape gives a function, from templates/interaction.py.j2, which calls that of its kind in `loka.dispatch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loka.codegen.modules import statement_text
from loka.codegen.names import Layers, Names
from loka.errors import LokaError
from loka.graph.ir import ConcatNorm, FmInteraction, ForwardIR
from loka.graph.patterns.concat_norm import concatenated_norm
from loka.graph.patterns.norm import ChainNorm
from loka.kernels.fused.interaction.concat_norm import (
    ConcatNormBackward,
    ConcatNormForward,
    backward_of,
    part_names,
    unsupported_reason,
)
from loka.kernels.fused.interaction.dot import DotSpec
from loka.kernels.fused.interaction.fm import FmBackward, FmForward, FmSizes
from loka.kernels.fused.matrix_kernels import Reduce
from loka.kernels.fused.rendering import AnySpec


@dataclass(frozen=True, slots=True)
class FmShape:
    """An FM interaction."""

    sizes: FmSizes
    passes: bool  # x is also returned, for a sum that reads it: the backward kernel then adds that gradient

    @property
    def forward(self) -> FmForward:
        """The kernel of the products."""
        return FmForward(self.sizes)

    @property
    def backward(self) -> FmBackward:
        """The kernel of the gradients."""
        return FmBackward(self.sizes, self.passes)

    @property
    def reduce(self) -> Reduce:
        """The kernel that reduces partial sums."""
        return Reduce(2 if self.sizes.made else 1)


@dataclass(frozen=True, slots=True)
class ConcatNormShape:
    """A norm of a concatenation, optionally with a residual."""

    forward: ConcatNormForward

    @property
    def backward(self) -> ConcatNormBackward:
        """The kernel of its gradients."""
        return backward_of(self.forward)

    @property
    def reduce(self) -> Reduce | None:
        """The kernel that reduces partial sums; None without parameters."""
        return Reduce(len(self.vectors)) if self.vectors else None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the concatenated tensors."""
        return part_names(self.forward.parts)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The parameters of the norm."""
        return tuple(name for name in ("weight", "bias") if name in self.forward.parameters)


@dataclass(frozen=True, slots=True)
class DotShape:
    """A dot interaction: x @ x^T."""

    embeddings: int
    dim: int
    reduce = None  # it has no parameters

    @property
    def forward(self) -> DotSpec:
        """The kernel of the products."""
        return DotSpec(self.embeddings, self.dim)

    @property
    def backward(self) -> DotSpec:
        """The kernel of the gradient."""
        return DotSpec(self.embeddings, self.dim, backward=True)


Shape = FmShape | ConcatNormShape | DotShape


def kernels_of(shape: Shape) -> tuple[AnySpec, ...]:
    """The kernels that a function launches."""
    reduce = () if shape.reduce is None else (shape.reduce,)
    return (shape.forward, shape.backward, *reduce)


@dataclass(frozen=True, slots=True)
class FunctionView:
    """View of a function, for templates/interaction.py.j2."""

    kind: str  # fm_interaction, concat_norm or dot_interaction
    name: str
    shape: Shape


class InteractionCalls:
    """The interactions of a package, each once, in order of first use."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._found: dict[Shape, str] = {}

    def function(self, shape: Shape, layers: Layers) -> str:
        """Register a call; returns the function's name in kernels.py, after the first layers with this shape."""
        if shape not in self._found:
            self._found[shape] = self._names.unique(f"{layers.name}_{_KINDS[type(shape)]}")
        return self._found[shape]

    def views(self) -> tuple[FunctionView, ...]:
        """Views of all registered functions."""
        return tuple(FunctionView(_KINDS[type(shape)], name, shape) for shape, name in self._found.items())

    def specs(self) -> tuple[AnySpec, ...]:
        """Specs of the kernels that the functions call, each once."""
        return tuple(dict.fromkeys(spec for shape in self._found for spec in kernels_of(shape)))


def fm_shape(mix: FmInteraction, joins: Sequence[ConcatNorm]) -> FmShape:
    """The shape of an FM interaction in a forward with these concat norms."""
    return FmShape(FmSizes(*mix.sizes), mix.is_added(joins))


def concat_norm_shape(join: ConcatNorm, forward: ForwardIR) -> ConcatNormShape | None:
    """The shape of a concat norm; None if no kernel supports it."""
    norm = norm_of(join, forward)
    if unsupported_reason(norm.kind, norm.width, len(join.parts)) is not None:
        return None
    weight, bias = norm.weight is not None, norm.bias is not None
    residual = join.residual is not None
    return ConcatNormShape(ConcatNormForward(norm.width, len(join.parts), residual, norm.kind, weight, bias, norm.eps))


def norm_of(join: ConcatNorm, forward: ForwardIR) -> ChainNorm:
    """The norm of a concat norm."""
    norm = concatenated_norm(forward, join)
    if norm is None:
        raise LokaError(f"statement {join.norm} is no norm. This is a fault in LoKA: please report it.")
    return norm


def fm_arguments(mix: FmInteraction, scope: statement_text.NameScope) -> list[str]:
    """Arguments of an FM interaction's function."""
    return [scope.read(mix.x), mix.rank, *([] if mix.weights is None else [mix.weights])]


def concat_norm_arguments(
    join: ConcatNorm, forward: ForwardIR, scope: statement_text.NameScope, handed: Mapping[str, str]
) -> list[str]:
    """Arguments of a concat norm's function; `handed`: local -> name of its copy from an FM interaction's function."""
    parts = [scope.read(part.text) for part in join.parts]
    norm = norm_of(join, forward)
    vectors = [ref.text for ref in (norm.weight, norm.bias) if ref is not None]
    if join.residual is None:
        return [*parts, *vectors]
    return [*parts, handed.get(join.residual.text) or scope.read(join.residual.text), *vectors]


_KINDS = {FmShape: "fm_interaction", ConcatNormShape: "concat_norm", DotShape: "dot_interaction"}
