"""The change of NE by each GEMM of each site, measured on a trained model and held-out batches.

Forward GEMMs: an output z of the model with an error dz changes the loss L by an even and an odd part:

- even, (L(z + dz) + L(z - dz)) / 2 - L(z): what the error costs whatever its sign, for a log loss about the mean of
  p (1 - p) dz^2 / 2. It needs no Hessian, and holds for errors that are not small;
- odd, (L(z + dz) - L(z - dz)) / 2: the error times what the model still predicts wrong. Its sign is another one in each
  training, so that it is no loss on average, but part of what one run differs by from another.

The mean of dz over samples, which comes from the rounding of the weights, is learned by a bias as long as the rounding
stays the same. Averaged weights round in another way than those that trained: then it costs its even part too.

Backward GEMMs: what their errors do to the direction in which a model learns. Rounding noise in gradients averages out
over steps, like the noise between batches, and Adam undoes a common factor; few bits alone do no harm. What harms is an
error that is the same in every batch: saturated or lost gradients, by which parameters learn something else or nothing.
So the mean gradients without and with the error are compared,

    misalignment = 1 - <g, g'> / (|g| |g'|),

with products between different batches alone, in which noise has no part. They are weighted by 1 / rms of each
parameter's gradient over batches, so that |g|^2 is the progress of a step of Adam. Of what training has gained, a share
is taken for lost: all of it where the misalignment is 1, and proportionally little where it is small, so that single
GEMMs add up. The share is from trained models (`benchmarks.ne_calibration`), within a factor of about two.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from loka.model.inputs import mapped, tensors_in
from loka.numerics.enums import Gemm
from loka.numerics.recipe import OperandPair
from loka.probe.capture.live_sites import LiveModel
from loka.probe.estimate import interval
from loka.probe.gemm_errors import GemmErrors, Rounding, SiteRoundings, recipe_rounding
from loka.probe.profile.profile import Interval, NeEstimate

SiteRecipes = Mapping[str, Mapping[Gemm, Sequence[OperandPair]]]  # by the site's name
BETWEEN = 0.3  # of the change itself: between trainings, and between a short one and a whole one
OnSite = Callable[[int, int], None]  # (sites done, total sites)


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
    _outputs: list[Any] = field(default_factory=list)

    @torch.no_grad()
    def changes(self, rounding: Rounding, site: str) -> tuple[list[LossChange], VaryingError]:
        """The change of the loss on each batch by a site's rounding, and the error of its output.

        Of several heads the one whose loss may grow most.
        """
        given, varying = self.held_out, VaryingError()
        if not self._outputs:
            self._outputs.extend(given.run(inputs) for inputs, _ in given.batches)
        losses = given.head_losses or (given.loss,)
        found: list[list[LossChange]] = [[] for _ in losses]
        for (inputs, target), output in zip(given.batches, self._outputs, strict=True):
            with GemmErrors(given.live, {site: {Gemm.FPROP: rounding}}, varying.add):
                with_error = given.run(inputs)
            for changes, loss in zip(found, losses, strict=True):
                changes.append(loss_change(loss, output, with_error, target))
        return max(found, key=lambda changes: ne_change(changes)[0].high), varying

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
    progress: OnSite | None = None,
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


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out batches of a live model, how to call it, and its loss."""

    live: LiveModel
    batches: Sequence[tuple[Any, Any]]  # of inputs and a target; at least two
    run: Callable[[Any], Any]  # inputs -> output: a Tensor (samples, ...), or what holds some
    loss: LossFunction
    head_losses: tuple[LossFunction, ...] = ()  # of heads to judge alone; empty: `loss` is judged

    @torch.no_grad()
    def mean_loss(self) -> float:
        """The loss as the model is now, in evaluation mode: the mean over batches."""
        with evaluating(self.live.root):
            losses = [float(self.loss(self.run(inputs), target)) for inputs, target in self.batches]
        return math.fsum(losses) / len(losses)


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


LossFunction = Callable[[Any, Any], Tensor]  # (output, target) -> scalar


@dataclass(frozen=True, slots=True)
class LossChange:
    """The parts of a change of the loss on one batch, in per cent of the loss."""

    varying: float  # even, by the error without its mean over samples
    even: float  # by the whole error
    odd: float  # by the whole error


@torch.no_grad()
def loss_change(loss: LossFunction, output: Any, with_error: Any, target: Any) -> LossChange:
    """The change of `loss` from `output` to `with_error`, as they came out of the model.

    Both are a Tensor (samples, ...), or hold alike ones; those of whole numbers stay.
    """
    z, erroneous = (
        [tensor.float() for tensor in tensors_in(value) if tensor.is_floating_point()] for value in (output, with_error)
    )
    errors = [after - before for before, after in zip(z, erroneous, strict=True)]
    before = float(loss(output, target))

    def moved(errors: Sequence[Tensor], sign: int) -> float:
        values = iter([value + sign * error for value, error in zip(z, errors, strict=True)])
        shifted = mapped(output, lambda each: next(values).to(each.dtype) if each.is_floating_point() else each)
        return float(loss(shifted, target))

    def parts(errors: Sequence[Tensor]) -> tuple[float, float]:
        up, down = moved(errors, 1), moved(errors, -1)
        return 100 * ((up + down) / 2 - before) / before, 100 * (up - down) / 2 / before

    varying, _ = parts([error - error.mean(0, keepdim=True) for error in errors])
    return LossChange(varying, *parts(errors))


LOST = 0.15  # share of the gain that a small misalignment loses, for each 1 of it
UNSURE = 2.0  # the upper end of the interval, as a multiple of the mean
LARGEST = 1 << 24  # elements of a Parameter; larger ones, embedding tables, are left out

_Gradients = list[list[Tensor]]  # by Parameter, then by batch


class GradientBias:
    """The mean gradients of a model on held-out batches, against which those with an error are compared."""

    def __init__(self, held_out: HeldOut) -> None:
        self._held_out = held_out
        candidates = [
            each for each in held_out.live.root.parameters() if each.requires_grad and each.numel() <= LARGEST
        ]
        native = self._gradients(candidates, {})
        used = [place for place, found in enumerate(native) if all(each is not None for each in found)]
        self._parameters = [candidates[place] for place in used]
        self._native: _Gradients = [[each for each in native[place] if each is not None] for place in used]
        self._weights = [_weights(found) for found in self._native]

    def misalignment(self, roundings: Mapping[str, SiteRoundings]) -> float:
        """0 where the error leaves the direction as it is, to 2; inf where a gradient is not finite."""
        found = self._gradients(self._parameters, roundings)
        before = both = after = 0.0
        for native, errors, weights in zip(self._native, found, self._weights, strict=True):
            changed = [torch.zeros_like(native[0]) if each is None else each for each in errors]
            before += _between_batches(native, native, weights)
            both += _between_batches(native, changed, weights)
            after += _between_batches(changed, changed, weights)
        if not math.isfinite(after):
            return math.inf
        if before <= 0:  # no mean gradient stands out of the noise: nothing can be misaligned
            return 0.0
        return 1 - max(-1.0, min(1.0, both / math.sqrt(before * after))) if after > 0 else 1.0

    def _gradients(
        self, parameters: Sequence[Tensor], roundings: Mapping[str, SiteRoundings]
    ) -> list[list[Tensor | None]]:
        given = self._held_out
        rows: list[Sequence[Tensor | None]] = []
        for inputs, target in given.batches:
            with GemmErrors(given.live, roundings):
                loss = given.loss(given.run(inputs), target)
            rows.append(torch.autograd.grad(loss, parameters, allow_unused=True))
        return [[_dense(row[place]) for row in rows] for place in range(len(parameters))]


def change_by_misalignment(misalignment: float, gain_percent: float) -> Interval:
    """The change of NE in per cent; `gain_percent` is by how much training has lowered it so far, relative to now."""
    if not math.isfinite(misalignment):
        return Interval(math.inf, math.inf, math.inf)
    turned = min(1.0, max(0.0, misalignment))
    mean = max(0.0, gain_percent) * turned * max(LOST, turned)
    return Interval(mean, 0.0, UNSURE * mean)


def _dense(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return (grad.to_dense() if grad.is_sparse else grad).detach().float()


def _weights(gradients: Sequence[Tensor]) -> Tensor:
    """1 / rms over batches of each element, 0 where all are zero."""
    rms = torch.stack([each.square() for each in gradients]).mean(0).sqrt()
    return torch.where(rms > 0, 1 / rms.clamp(min=torch.finfo(torch.float32).tiny), 0.0)


def _between_batches(a: Sequence[Tensor], b: Sequence[Tensor], weights: Tensor) -> float:
    """The mean over pairs of different batches of the weighted inner product."""
    count = len(a)
    sums = (torch.stack(list(a)).sum(0) * torch.stack(list(b)).sum(0) * weights).double().sum()
    own = torch.stack([(x * y * weights).double().sum() for x, y in zip(a, b, strict=True)]).sum()
    return float(sums - own) / (count * (count - 1))
