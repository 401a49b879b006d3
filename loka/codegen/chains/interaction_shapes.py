"""Shapes of the functions around GEMMs: FM interactions, norms of concatenations, cross layers.

Each shape gives one autograd function and its wrapper, from templates/function/KIND.py.j2.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.kernels.fused.cast_transpose.matrix_spec import Reduce
from loka.kernels.fused.cross.cross_kernel import CrossBackward, cross_forward
from loka.kernels.fused.interaction.concat_norm_spec import (
    ConcatNormBackward,
    ConcatNormForward,
    backward_of,
    part_names,
)
from loka.kernels.fused.interaction.fm_spec import FmBackward, FmForward, FmSizes
from loka.kernels.fused.norm.norm_spec import NormForward
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
class CrossShape:
    """A cross layer: factor * (product + bias) + residual."""

    width: int
    bias: bool
    itself: bool  # the residual is the factor
    passes: bool  # the factor is also returned, for the next layer: the backward kernel then adds that gradient

    @property
    def forward(self) -> NormForward:
        """The kernel of the sum."""
        return cross_forward(self.width, self.bias)

    @property
    def backward(self) -> CrossBackward:
        """The kernel of its gradients."""
        return CrossBackward(self.width, self.bias, self.itself, self.passes)

    @property
    def reduce(self) -> Reduce | None:
        """The kernel that reduces partial sums; None without a bias."""
        return Reduce(1) if self.bias else None


Shape = FmShape | ConcatNormShape | CrossShape


def kernels_of(shape: Shape) -> tuple[AnySpec, ...]:
    """The kernels that a function launches."""
    reduce = () if shape.reduce is None else (shape.reduce,)
    return (shape.forward, shape.backward, *reduce)
