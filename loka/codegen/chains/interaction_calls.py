"""Mixing layers, joins and cross layers of a forward: what is rendered for each, and what it is called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loka.codegen.chains.interaction_shapes import ConcatNormShape, CrossShape, FmShape, Shape, kernels_of
from loka.codegen.modules import statement_text
from loka.codegen.text.identifiers import Names, class_of
from loka.codegen.text.layer_names import Layers
from loka.errors import LokaError
from loka.graph.ir import ConcatNorm, Cross, FmInteraction, ForwardIR, Ref, RefKind
from loka.graph.patterns.concat_norm import concatenated_norm
from loka.graph.patterns.norm import ChainNorm
from loka.kernels.fused.interaction.concat_norm_spec import ConcatNormForward, unsupported_reason
from loka.kernels.fused.interaction.fm_spec import FmSizes
from loka.kernels.fused.rendering import AnySpec


@dataclass(frozen=True, slots=True)
class FunctionView:
    """One autograd function and its wrapper, as templates/function/KIND.py.j2 reads it."""

    kind: str  # fm_interaction, concat_norm or cross
    name: str  # of the wrapper
    function: str  # of the class
    shape: Shape


class InteractionCalls:
    """The mixing layers, joins and cross layers of one package, each once, in the order of their first uses."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._found: dict[Shape, tuple[str, str]] = {}

    def function(self, shape: Shape, layers: Layers) -> str:
        """The wrapper's name in kernels.py for one more call, after the first layers with this shape."""
        if shape not in self._found:
            kind = _KINDS[type(shape)]
            short = [layers.name] if kind in layers.name.split("_") else []  # cross_0, rather than cross_0_cross
            name = self._names.first_free([*short, f"{layers.name}_{kind}"])
            self._found[shape] = (name, self._names.unique(class_of(name)))
        return self._found[shape][0]

    def views(self) -> tuple[FunctionView, ...]:
        """Every function that was asked for."""
        return tuple(FunctionView(_KINDS[type(shape)], *names, shape) for shape, names in self._found.items())

    def specs(self) -> tuple[AnySpec, ...]:
        """The kernels that the functions call, each once."""
        return tuple(dict.fromkeys(spec for shape in self._found for spec in kernels_of(shape)))


def fm_shape(mix: FmInteraction, joins: Sequence[ConcatNorm]) -> FmShape:
    """The shape of a mixing layer in a forward with these joins."""
    return FmShape(FmSizes(*mix.sizes), any(_adds(join, mix) for join in joins))


def _adds(join: ConcatNorm, mix: FmInteraction) -> bool:
    return join.residual == Ref(RefKind.LOCAL, mix.x)


def passing(join: ConcatNorm, mixes: Sequence[FmInteraction]) -> FmInteraction | None:
    """The mixing layer that hands on what a join adds."""
    return next((mix for mix in mixes if _adds(join, mix)), None)


def concat_norm_shape(join: ConcatNorm, forward: ForwardIR) -> ConcatNormShape | None:
    """The shape of a join; None where no kernel takes it."""
    norm = norm_of(join, forward)
    if unsupported_reason(norm.kind, norm.width, len(join.parts)) is not None:
        return None
    weight, bias = norm.weight is not None, norm.bias is not None
    residual = join.residual is not None
    return ConcatNormShape(ConcatNormForward(norm.width, len(join.parts), residual, norm.kind, weight, bias, norm.eps))


def norm_of(join: ConcatNorm, forward: ForwardIR) -> ChainNorm:
    """The norm that a join ends with."""
    norm = concatenated_norm(forward, join)
    if norm is None:
        raise LokaError(f"statement {join.norm} is no norm. This is a fault in LoKA: please report it.")
    return norm


def fm_arguments(mix: FmInteraction, forward: ForwardIR, scope: statement_text.NameScope) -> list[str]:
    """What a mixing layer's function is called with."""
    weights = [forward.statements[mix.inner].operands[1].text]
    if mix.compress is not None:
        weights.append(forward.statements[mix.compress].operands[0].text)
    return [scope.read(mix.x), *weights]


def concat_norm_arguments(
    join: ConcatNorm, forward: ForwardIR, scope: statement_text.NameScope, handed: Mapping[str, str]
) -> list[str]:
    """What a join's function is called with; `handed` has the name of what a mixing layer handed on, by local."""
    parts = [scope.read(part.text) for part in join.parts]
    norm = norm_of(join, forward)
    vectors = [ref.text for ref in (norm.weight, norm.bias) if ref is not None]
    if join.residual is None:
        return [*parts, *vectors]
    return [*parts, handed.get(join.residual.text) or scope.read(join.residual.text), *vectors]


def cross_shape(cross: Cross, later: Sequence[Cross], biased: bool) -> CrossShape:
    """The shape of a cross layer before these others; `biased` says whether it takes the bias."""
    passes = any(other.factor == cross.factor for other in later)
    return CrossShape(cross.width, biased, cross.residual == cross.factor, passes)


def cross_arguments(
    cross: Cross, biased: bool, scope: statement_text.NameScope, handed: Mapping[str, str]
) -> list[str]:
    """What a cross layer's function is called with; `handed` has what a layer before handed on, by local."""
    bias = [cross.bias.text] if biased and cross.bias is not None else []
    factor = handed.get(cross.factor.text) or scope.read(cross.factor.text)
    residual = [scope.read(cross.residual.text)] if cross.residual != cross.factor else []
    return [scope.read(cross.product), *bias, factor, *residual]


_KINDS = {FmShape: "fm_interaction", ConcatNormShape: "concat_norm", CrossShape: "cross"}
