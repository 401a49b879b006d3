"""Specs of the rendered kernels for an interaction's form."""

from __future__ import annotations

from loka.kernels.fused.interaction.concat_norm import ConcatNormBackward, ConcatNormForward, backward_of
from loka.kernels.fused.interaction.dot import DotSpec
from loka.kernels.fused.interaction.fm import FmBackward, FmForward, FmSizes
from loka.kernels.measurements.interaction_forms import ConcatNormForm, DotForm, FmForm, Form

Forward = FmForward | ConcatNormForward | DotSpec
Backward = FmBackward | ConcatNormBackward | DotSpec

EPS = 1e-5  # of a norm over concatenated rows; the value does not change its time


def specs_of(form: Form, columns: int) -> tuple[Forward, Backward]:
    """The specs of the forward and of the gradients. Raises InputError where there is none for these sizes."""
    match form:
        case FmForm():
            sizes = FmSizes(form.embeddings, columns, form.rank, form.sums)
            return FmForward(sizes), FmBackward(sizes, form.passing)
        case ConcatNormForm():
            forward = ConcatNormForward(columns, len(form.rows), form.residual, form.norm, form.weight, form.bias, EPS)
            return forward, backward_of(forward)
        case DotForm():
            return DotSpec(form.embeddings, columns), DotSpec(form.embeddings, columns, backward=True)
