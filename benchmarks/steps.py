"""Timing of one step of a model in each variant: training (forward, backward to inputs and parameters) or inference.

Each variant is independent: a deep copy of one base model, a reset compiler, the memory of the variant before freed.
All run under torch.compile, generated packages with fullgraph, and from CUDA graphs. Weights are quantized inside a
training step, but before an inference.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from benchmarks.cells import Errors, MeasuredStep, decibels
from benchmarks.replays import time_step
from benchmarks.variants import Variant, prepare
from loka.bench.device import WARM_UPS, BenchDevice, float32_products
from loka.bench.model.whole_step import Example
from loka.bench.timing import SEED
from loka.errors import InputError
from loka.model.inputs import tensors_in
from loka.probe.probe import Probe
from loka.probe.profile.profile import Profile

Step = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class StepWork:
    """The common work of all variants. Tensors are in float32, with values exact in BF16; inputs need a gradient."""

    name: str
    base: nn.Module
    inputs: tuple[Tensor, ...]
    reference: dict[bool, list[Tensor]]  # True: output and gradients of training in float32; False: inference output
    leaves: tuple[str, ...]  # names of the tensors with gradients: "x", then the parameters
    milliseconds: int  # of timed replays

    def example(self, dtype: torch.dtype, training: bool) -> Example:
        """Copies of the inputs in `dtype`; in training they are leaves that require gradients."""
        return Example(self.inputs, {}).fresh(str(self.inputs[0].device), dtype, training)


def make_work(
    name: str, base: nn.Module, inputs: tuple[Tensor, ...], modes: Sequence[bool], milliseconds: int
) -> StepWork:
    """Round the model and its inputs to BF16, and compute the reference of each mode (True: training)."""
    base = base.bfloat16().float()
    inputs = tuple(value.bfloat16().float().requires_grad_() for value in inputs)
    names = ("x",) if len(inputs) == 1 else tuple(f"x{index}" for index in range(len(inputs)))
    leaves = (*names, *(name for name, _ in base.named_parameters()))
    work = StepWork(name, base, inputs, {}, leaves, milliseconds)
    with float32_products("highest"):
        for training in modes:
            model = copy.deepcopy(base).train(training)
            step = user_step(model, work.example(torch.float32, training), training, model)
            work.reference[training] = list(step())
    return work


def measure(
    work: StepWork,
    variant: Variant,
    training: bool,
    package: ModuleType | None,
    compiled: bool = True,
    device: BenchDevice | None = None,
) -> MeasuredStep:
    """Prepare one variant on a GPU, compile it, measure memory and errors, capture it and time it.

    Without `compiled` the model is captured without torch.compile, which is equivalent if generated kernels run all of
    it. Errors propagate; raises VerifyError if a planned FP8 GEMM did not run.
    """
    device = device or BenchDevice()
    with _alone(device) as held, float32_products("high"):
        ready = prepare(variant, copy.deepcopy(work.base), training, package)
        called: nn.Module = ready.model
        if compiled:
            called = torch.compile(ready.model, fullgraph=variant.generated)  # type: ignore[assignment]
        step = user_step(called, work.example(variant.dtype, training), training, ready.model)
        for _ in range(WARM_UPS):
            step()
        peak = peak_mib(step, held, device) if training else None
        errors = errors_of(step(), work.reference[training], work.leaves)
        timing = time_step(step, work.milliseconds, device)
        ready.verify(training)
        return MeasuredStep(timing, peak, errors)


def learned(work: StepWork, policy: Path) -> Profile:
    """The profile of one training step in bfloat16, on the device of `work`, without estimates: for static scales.

    `policy` must name the model of `work`. Raises InputError otherwise.
    """
    model = copy.deepcopy(work.base).bfloat16().train()
    step = user_step(model, work.example(torch.bfloat16, training=True), True, model)
    with Probe(model, policy, every=1) as probe:
        step()
        probe.step()
        return probe.recorded().profile


def user_step(called: Callable[..., object], example: Example, training: bool, owner: nn.Module) -> Step:
    """The step of a model that runs as `called`; `owner` has its parameters.

    Training returns the outputs, then the gradients of tensors that some output depends on, for the same random output
    gradients in every variant; inference returns the outputs. Raises InputError in training if no output requires a
    gradient.
    """

    def outputs() -> list[Tensor]:
        return tensors_in(called(*example.args, **example.kwargs))

    if not training:

        @torch.no_grad()
        def inference() -> Sequence[Tensor]:
            return outputs()

        return inference
    leaves = [*example.leaves, *(value for value in owner.parameters() if value.requires_grad)]
    grads = [output_gradient(value) for value in outputs() if value.requires_grad]
    if not grads:
        raise InputError("no output of the model depends on its parameters; there is no training step to measure")

    def training_step() -> Sequence[Tensor]:
        made = outputs()
        differentiable = [value for value in made if value.requires_grad]
        found = torch.autograd.grad(differentiable, leaves, grads, allow_unused=True)
        return [*(value.detach() for value in made), *(value for value in found if value is not None)]

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


@contextmanager
def _alone(device: BenchDevice) -> Iterator[int]:
    """Context for one variant, with memory of others freed; yields the bytes that remain allocated."""
    device.release()
    try:
        yield device.allocated()
    finally:
        device.release()


def peak_mib(step: Step, held: int, device: BenchDevice) -> float | None:
    """Peak memory of one step in MiB, without the bytes that were `held` before the variant was built."""
    device.wait()
    device.restart_peak()
    step()
    device.wait()
    return device.peak_mib(held)
