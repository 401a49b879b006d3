"""Measures the change of NE by each site's forward GEMM, on a trained model and held-out batches."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from loka.numerics.enums import Gemm
from loka.numerics.recipe import OperandPair
from loka.probe.capture.live_sites import LiveModel
from loka.probe.estimate.intervals import interval
from loka.probe.profile.profile import Interval, NeEstimate
from loka.probe.sensitivity.gemm_errors import GemmErrors, Rounding, recipe_rounding
from loka.probe.sensitivity.loss_change import Loss, LossChange, loss_change

Batch = tuple[Any, Tensor]  # inputs and target
Progress = Callable[[int, int], None]  # (sites done, total sites)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out batches of a live model, how to call it, and its loss."""

    live: LiveModel
    batches: Sequence[Batch]  # at least two
    run: Callable[[Any], Tensor]  # inputs -> output (samples, ...)
    loss: Loss


@dataclass(slots=True)
class VaryingError:
    """Power of a GEMM's output and of its error, both without their mean over the samples of each call."""

    output: float = 0.0
    error: float = 0.0

    def add(self, site: str, output: Tensor, error: Tensor) -> None:
        """Add one call: both (M, N) float32."""
        self.output += float((output - output.mean(0)).double().square().sum())
        self.error += float((error - error.mean(0)).double().square().sum())

    @property
    def relative(self) -> float:
        """The error's power over the output's; 0 where neither varies, inf where the error is not finite."""
        if not self.error:
            return 0.0
        return self.error / self.output if self.output and math.isfinite(self.error) else math.inf


@dataclass(frozen=True, slots=True)
class ForwardSensitivity:
    """Runs the model with the error of single forward GEMMs. The outputs without errors are kept."""

    held_out: HeldOut
    _outputs: list[Tensor] = field(default_factory=list)

    def changes(self, rounding: Rounding, site: str) -> tuple[list[LossChange], VaryingError]:
        """The change of the loss on each batch by a site's rounding, and the error of its output."""
        given, varying = self.held_out, VaryingError()
        if not self._outputs:
            self._outputs.extend(given.run(inputs) for inputs, _ in given.batches)
        found = []
        for (inputs, target), output in zip(given.batches, self._outputs, strict=True):
            with GemmErrors(given.live, {site: {Gemm.FPROP: rounding}}, varying.add):
                with_error = given.run(inputs)
            found.append(loss_change(given.loss, output, with_error, target))
        return found, varying


@torch.no_grad()
def measure_forward(
    held_out: HeldOut, recipes: Mapping[str, Sequence[OperandPair]], progress: Progress | None = None
) -> dict[str, tuple[NeEstimate, ...]]:
    """The change of NE by the forward GEMM of each site in `recipes`, by its name, with each of its recipes.

    The model is in evaluation mode meanwhile. Its numbers are those of a float32 reference of the FP8 GEMM
    (gemm_errors.py). Raises what the model and the loss raise.
    """
    measured = ForwardSensitivity(held_out)
    with evaluating(held_out.live.root):
        found = {}
        for number, (site, pairs) in enumerate(recipes.items()):
            found[site] = tuple(_estimate(pair, *measured.changes(recipe_rounding(pair), site)) for pair in pairs)
            if progress is not None:
                progress(number + 1, len(recipes))
    return found


def ne_change(changes: Sequence[LossChange]) -> tuple[Interval, float]:
    """The expected change of NE in per cent, with a 95 % interval over batches, and the size of its odd part.

    A loss that is not finite on any batch is an infinite change, without an odd part.
    """
    even = [change.even for change in changes]
    odd = math.fsum(change.odd for change in changes) / len(changes)
    if not all(map(math.isfinite, [*even, odd])):
        return Interval(math.inf, math.inf, math.inf), 0.0
    return interval(even), abs(odd)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context of evaluation mode in Python: compiled parts of the model run eagerly, so that a mode sees them."""
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
            yield
    finally:
        model.train(was_training)


def _estimate(pair: OperandPair, changes: Sequence[LossChange], varying: VaryingError) -> NeEstimate:
    return NeEstimate(Gemm.FPROP, pair, *ne_change(changes), varying.relative)
