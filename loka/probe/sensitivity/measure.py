"""Measures the change of NE by each GEMM of each site, on a trained model and held-out batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loka.numerics.enums import Gemm
from loka.numerics.recipe import OperandPair
from loka.probe.estimate.intervals import interval
from loka.probe.profile.profile import Interval, NeEstimate
from loka.probe.sensitivity.gemm_errors import GemmErrors, Rounding, SiteRoundings, recipe_rounding
from loka.probe.sensitivity.gradient_bias import GradientBias, change_by_misalignment
from loka.probe.sensitivity.held_out import HeldOut, evaluating
from loka.probe.sensitivity.loss_change import LossChange, loss_change

SiteRecipes = Mapping[str, Mapping[Gemm, Sequence[OperandPair]]]  # by the site's name
BETWEEN = 0.3  # of the change itself: between trainings, and between a short one and a whole one
Progress = Callable[[int, int], None]  # (sites done, total sites)


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

    @torch.no_grad()
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

    def estimate(self, site: str, pair: OperandPair) -> NeEstimate:
        """The change by the forward GEMM with one recipe."""
        changes, varying = self.changes(recipe_rounding(pair), site)
        return NeEstimate(Gemm.FPROP, pair, *ne_change(changes), varying.relative)


class BackwardSensitivity:
    """The change of NE by single backward GEMMs, of a model that has lowered its loss from `first_loss`."""

    def __init__(self, held_out: HeldOut, first_loss: float) -> None:
        now = held_out.mean_loss()
        self._gain_percent = 100 * (first_loss - now) / now
        self._bias = GradientBias(held_out)

    def change(self, roundings: Mapping[str, SiteRoundings]) -> Interval:
        """The change by the backward GEMMs of these roundings together."""
        return change_by_misalignment(self._bias.misalignment(roundings), self._gain_percent)

    def estimate(self, site: str, gemm: Gemm, pair: OperandPair) -> NeEstimate:
        """The change by one GEMM with one recipe."""
        change = self.change({site: {gemm: recipe_rounding(pair)}})
        return NeEstimate(gemm, pair, change, 0.0, None)


def measure_ne(
    held_out: HeldOut,
    recipes: SiteRecipes,
    first_loss: float,
    progress: Progress | None = None,
    seconds: float = math.inf,
) -> dict[str, tuple[NeEstimate, ...]]:
    """The change of NE by each GEMM of each site in `recipes`, by the site's name, with each of its recipes.

    Every recipe of every site is a run of the whole model, so the time grows with the square of the number of sites:
    after `seconds` no further site is begun. `first_loss` is the loss on the same batches before training. The model is
    in evaluation mode meanwhile. Errors are those of a float32 reference of the FP8 GEMM (gemm_errors.py). Raises what
    the model and the loss raise.
    """
    found: dict[str, tuple[NeEstimate, ...]] = {}
    start = time.monotonic()
    with evaluating(held_out.live.root):
        forward, backward = ForwardSensitivity(held_out), BackwardSensitivity(held_out, first_loss)
        for number, (site, by_gemm) in enumerate(recipes.items()):
            if found and time.monotonic() - start > seconds:
                break
            found[site] = tuple(
                forward.estimate(site, pair) if gemm is Gemm.FPROP else backward.estimate(site, gemm, pair)
                for gemm, pairs in by_gemm.items()
                for pair in pairs
            )
            if progress is not None:
                progress(number + 1, len(recipes))
    return found


def ne_change(changes: Sequence[LossChange]) -> tuple[Interval, float]:
    """The expected change of NE in per cent, with its interval, and the size of its odd part.

    The mean is what the varying part of the error costs. The interval is the 95 % one over batches, widened by what one
    training differs from the next; its upper end has the cost of the error's mean over samples besides. A loss that is
    not finite on any batch is an infinite change, without an odd part.
    """
    varying, even, odd = ([getattr(change, part) for change in changes] for part in ("varying", "even", "odd"))
    if not all(map(math.isfinite, [*varying, *even, *odd])):
        return Interval(math.inf, math.inf, math.inf), 0.0
    found = interval(varying)
    below, above = (math.hypot(found.mean - end, BETWEEN * found.mean) for end in (found.low, found.high))
    shift = max(0.0, math.fsum(even) / len(even) - found.mean)
    return Interval(found.mean, found.mean - below, found.mean + above + shift), abs(math.fsum(odd) / len(odd))
