"""Timing of one step of a model in each variant: training (forward, backward to inputs and parameters) or inference.

Each variant is independent: a deep copy of one base model, a reset compiler, the memory of the variant before freed.
All run under torch.compile, generated packages with fullgraph, and from CUDA graphs. Weights are quantized inside a
training step, but before an inference.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from loka.bench.results import Errors
from loka.bench.speed.timing import WARM_UPS, Timing, time_step
from loka.bench.subjects import peers
from loka.bench.subjects.variants import Variant

SEED = 0
MIB = 2**20

Step = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The common work of all variants. Tensors are on the device, in float32, with values exact in BF16."""

    name: str
    base: nn.Module
    inputs: tuple[Tensor, ...]
    reference: dict[bool, list[Tensor]]  # True: output and gradients of training in float32; False: inference output
    leaves: tuple[str, ...]  # names of the tensors with gradients: "x", then the parameters
    milliseconds: int  # of timed replays


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Measurements of one variant."""

    timing: Timing
    peak_mib: float | None
    errors: Errors | None


def make_work(
    name: str, base: nn.Module, inputs: tuple[Tensor, ...], modes: Sequence[bool], milliseconds: int
) -> StepWork:
    """Round the model and its inputs to BF16, and compute the reference of each mode (True: training)."""
    base = base.bfloat16().float()
    inputs = tuple(value.bfloat16().float() for value in inputs)
    names = ("x",) if len(inputs) == 1 else tuple(f"x{index}" for index in range(len(inputs)))
    leaves = (*names, *(name for name, _ in base.named_parameters()))
    work = StepWork(name, base, inputs, {}, leaves, milliseconds)
    with float32_products("highest"):
        for training in modes:
            model = copy.deepcopy(base).train(training)
            step = step_of(model, fresh_inputs(work, torch.float32, training), training)
            work.reference[training] = list(step())
    return work


def measure(
    work: StepWork, variant: Variant, training: bool, package: ModuleType | None, compiled: bool = True
) -> MeasuredStep:
    """Prepare one variant on a GPU, compile it, measure memory and errors, capture it and time it.

    Without `compiled` the model is captured without torch.compile, which is equivalent if generated kernels run all of
    it. Errors propagate; raises VerifyError if a planned FP8 GEMM did not run.
    """
    with _alone() as held, float32_products("high"):
        ready = peers.prepare(variant, copy.deepcopy(work.base), training, package)
        inputs = fresh_inputs(work, peers.dtype_of(variant), training)
        called: nn.Module = ready.model
        if compiled:
            called = torch.compile(ready.model, fullgraph=variant.generated)  # type: ignore[assignment]
        step = step_of(called, inputs, training, ready.model)
        for _ in range(WARM_UPS):
            step()
        peak = _peak_mib(step, held) if training else None
        errors = errors_of(step(), work.reference[training], work.leaves)
        timing = time_step(step, work.milliseconds)
        ready.verify(training)
        return MeasuredStep(timing, peak, errors)


def fresh_inputs(work: StepWork, dtype: torch.dtype, training: bool) -> tuple[Tensor, ...]:
    """Copies of the inputs in `dtype`; in training they are leaves that require gradients."""
    return tuple(value.detach().to(dtype, copy=True).requires_grad_(training) for value in work.inputs)


def step_of(
    called: Callable[..., Tensor], inputs: tuple[Tensor, ...], training: bool, owner: nn.Module | None = None
) -> Step:
    """The step of a model that runs as `called`; `owner` has the parameters if `called` is not the model itself.

    Training returns the output and the gradients of the inputs and all parameters for a random output gradient, the
    same in every variant; inference returns the output.
    """
    if not training:

        @torch.no_grad()
        def inference() -> Sequence[Tensor]:
            return (called(*inputs),)

        return inference
    module = owner if owner is not None else called
    if not isinstance(module, nn.Module):
        raise TypeError(f"a {type(module).__name__} has no parameters; give the model as owner")
    leaves = [*inputs, *module.parameters()]
    grad = output_gradient(called(*inputs))

    def training_step() -> Sequence[Tensor]:
        output = called(*inputs)
        return (output.detach(), *torch.autograd.grad(output, leaves, grad))

    return training_step


def output_gradient(output: Tensor) -> Tensor:
    """A standard normal gradient in the dtype of `output`, with values exact in BF16."""
    generator = torch.Generator(output.device).manual_seed(SEED + 1)
    drawn = torch.randn(output.shape, generator=generator, device=output.device, dtype=torch.float32)
    return drawn.bfloat16().to(output.dtype)


def errors_of(found: Sequence[Tensor], reference: Sequence[Tensor], leaves: Sequence[str]) -> Errors:
    """Signal to error in dB of the output and of the worst gradient."""
    output = decibels(found[0], reference[0])
    gradients = [
        (value, name)
        for name, one, other in zip(leaves, found[1:], reference[1:], strict=False)
        if (value := decibels(one, other)) is not None
    ]
    if not gradients:
        return Errors(output, None, "")
    worst, name = min(gradients)
    return Errors(output, worst, name)


def decibels(found: Tensor, expected: Tensor) -> float | None:
    """10 log10 of the energy of `expected` over that of the difference; None if not finite or without signal."""
    signal = float(expected.double().square().sum())
    noise = float((found.double() - expected.double()).square().sum())
    if not signal or not math.isfinite(signal) or not math.isfinite(noise):
        return None
    return 10 * math.log10(signal / max(noise, 1e-30 * signal))


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Context that sets the precision of float32 products, `highest` or `high` (TF32), and restores it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _alone() -> Iterator[int]:
    """Context for one variant, with memory of others freed; yields the bytes that remain allocated."""
    _forget()
    try:
        yield torch.cuda.memory_allocated()
    finally:
        _forget()


def _forget() -> None:
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _peak_mib(step: Step, held: int) -> float:
    """Peak memory of one step in MiB, without the bytes that were `held` before the variant was built."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / MIB
