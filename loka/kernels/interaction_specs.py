"""The rendered kernels of an interaction's form."""

from __future__ import annotations

from loka.kernels.cross_text import CrossBackward, cross_forward
from loka.kernels.interactions import Crossing, Form, Joining, Mixing
from loka.kernels.join_specs import JoinBackward, JoinForward, backward_of
from loka.kernels.mix_specs import MixBackward, MixForward, MixSizes
from loka.kernels.rendered_specs import NormForward

EPS = 1e-5  # of a join's norm: a number in the text that no time depends on


def specs_of(
    form: Form, columns: int
) -> tuple[MixForward | JoinForward | NormForward, MixBackward | JoinBackward | CrossBackward]:
    """The kernel of the forward and that of the gradients. Raises InputError where there is none for these sizes."""
    match form:
        case Mixing():
            sizes = MixSizes(form.embeddings, columns, form.rank, form.sums)
            return MixForward(sizes), MixBackward(sizes, form.passing)
        case Joining():
            forward = JoinForward(columns, len(form.rows), form.residual, form.norm, form.weight, form.bias, EPS)
            return forward, backward_of(forward)
        case Crossing():
            return cross_forward(columns, form.bias), CrossBackward(columns, form.bias, form.itself, form.passing)


def sums_of(backward: MixBackward | JoinBackward | CrossBackward) -> int:
    """How many of its results are partial sums, the last ones, which `Reduce` adds up."""
    return len(backward.results) - (2 if isinstance(backward, CrossBackward) else 1)
