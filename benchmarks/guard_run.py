"""A guard in a training run: what it costs, false alarms, and planted faults.

    python -m benchmarks.guard_run [--policy policies/wukong_mods.yaml] [--every 1000] [--steps 20000]
                                   [--checked 100] [--faults 20] [--device cuda] [--eager] [--json]

The policy's model is built, its package generated, and it learns by Adam, under torch.compile and autocast to bfloat16,
to tell samples whose mean is positive; each step has a batch of its own, drawn on the device. First a step and a check
are timed: the overhead is that of one check in `every` steps. Then it trains for `steps`, one in `checked` being
checked; every event is a false alarm. At last faults are planted one by one, in the generated forward of one module
after the other, with each step checked: each has to be found at its module within 100 checks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.study import run_study, tell
from loka.bench.packages import Workshop
from loka.dispatch.guard.guard import Guard
from loka.dispatch.patch import Patch
from loka.errors import InputError
from loka.model.callables import current_directory_importable, find_callable
from loka.mods.policy_loader import load_policy
from loka.plan.planner import make_plan

TIMED = 20  # steps, and checks, that are timed
MOST_CHECKS = 100  # for a planted fault
CLIP = 8  # a clipped operand ends at its largest value over this

Batch = tuple[tuple[Tensor, ...], Tensor]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class GuardRun:
    """What was measured. Times in milliseconds, memory in MiB (0 on the CPU)."""

    device: str
    torch: str
    policy: str
    batch: int
    every: int
    step: float  # a training step, median
    check: float  # a check, median
    overhead_percent: float  # of one check in `every` steps
    peak_step: float
    peak_check: float
    steps: int
    checks: int
    false_alarms: tuple[str, ...]
    planted: int
    found: int  # at their modules
    missed: tuple[str, ...]


class TrainingRun:
    """A model, its package and its data."""

    def __init__(self, workshop: Workshop, policy_file: str, batch: int | None, device: str, eager: bool) -> None:
        policy = load_policy(policy_file)
        if policy.model.inputs is None:
            raise InputError(f"{policy_file}: model.inputs must name a function: the batches are made like them")
        torch.manual_seed(0)
        with current_directory_importable():
            model: Any = find_callable(policy.model.factory, "model.factory")[0]()
            self.batch = batch or policy.model.batch_size
            inputs: Any = find_callable(policy.model.inputs, "model.inputs")[0](self.batch)
            package = workshop.package(make_plan(policy_file))
        self.model: nn.Module = model.to(device)
        self.patch: Patch = package.apply(self.model)
        self.device = device
        self._inputs = tuple(value.detach().to(device) for value in inputs)
        self._compiled: Any = self.model if eager else torch.compile(self.model)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)

    def batches(self) -> Iterator[Batch]:
        """Batches without end: floating-point inputs are drawn anew."""
        generator = torch.Generator(self.device).manual_seed(1)
        while True:
            inputs = tuple(
                torch.empty_like(value).normal_(generator=generator) if value.is_floating_point() else value
                for value in self._inputs
            )
            first = next(value for value in inputs if value.is_floating_point())
            yield inputs, (first.flatten(1).mean(1) > 0).float()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss, under autocast; inputs need gradients, as embeddings do."""
        inputs, target = batch
        given = [value.detach().requires_grad_(value.is_floating_point()) for value in inputs]
        with torch.autocast(self.device, torch.bfloat16):
            out = model(*given)
        return nn.functional.binary_cross_entropy_with_logits(out.float().reshape(-1), target)

    def step(self, batch: Batch) -> None:
        """Forward, backward, update."""
        self._optimizer.zero_grad(set_to_none=True)
        self.loss(self._compiled, batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def timed(self, work: Callable[[Batch], object]) -> tuple[float, float]:
        """Median milliseconds of some work on a batch, and the peak of device memory in MiB."""
        batches, times, cuda = self.batches(), [], self.device == "cuda"
        for number in range(TIMED + 3):
            batch = next(batches)
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            work(batch)
            if cuda:
                torch.cuda.synchronize()
            if number >= 3:  # the first ones compile
                times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times), torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0


def measure(
    policy: str, batch: int | None, *, every: int, steps: int, checked: int, faults: int, device: str, eager: bool
) -> GuardRun:
    """Measure everything. Raises InputError if the policy or a number cannot be used."""
    if min(every, checked) < 1 or min(steps, faults) < 0:
        raise InputError("--every and --checked must be 1 or more, --steps and --faults not negative")
    with Workshop() as workshop:
        run = TrainingRun(workshop, policy, batch, device, eager)
        step, peak_step = run.timed(run.step)
        timed = Guard(run.model, run.patch, loss=run.loss, every=1)
        check, peak_check = run.timed(timed.step)
        tell(
            f"a step {step:.2f} ms, a check {check:.2f} ms: {100 * check / (every * step):.3f} % at every {every} steps"
        )
        alarms = [str(event) for event in timed.events] + _healthy(run, steps, checked)
        missed = _missed(run, faults)
    return GuardRun(
        device=torch.cuda.get_device_name() if device == "cuda" else "CPU",
        torch=torch.__version__,
        policy=policy,
        batch=run.batch,
        every=every,
        step=step,
        check=check,
        overhead_percent=100 * check / (every * step),
        peak_step=peak_step,
        peak_check=peak_check,
        steps=steps,
        checks=steps // checked,
        false_alarms=tuple(alarms),
        planted=faults,
        found=faults - len(missed),
        missed=tuple(missed),
    )


def _healthy(run: TrainingRun, steps: int, checked: int) -> list[str]:
    """Train without a fault; the events."""
    guard = Guard(run.model, run.patch, loss=run.loss, every=checked)
    for number, batch in zip(range(steps), run.batches(), strict=False):
        guard.step(batch)
        run.step(batch)
        if (number + 1) % 1000 == 0:
            tell(f"{number + 1} steps, {len(guard.events)} false alarms")
    return [str(event) for event in guard.events]


def _missed(run: TrainingRun, faults: int) -> list[str]:
    """Plant faults, one after the other; those that were not found at their modules."""
    missed = []
    with run.patch.trial(None) as modules:
        bound = [each for each in modules if any(map(each.counters.planned, range(len(each.counters.sites))))]
    for number in range(faults):
        module, kinds = bound[number % len(bound)], _faults()
        name, change_input, change_output = kinds[(number + number // len(bound)) % len(kinds)]  # another each round
        guard = Guard(run.model, run.patch, loss=run.loss, every=1, return_after=None)
        generated = type(module.module)
        right = generated.forward
        generated.forward = _faulty(right, change_input, change_output)
        try:
            for _, batch in zip(range(MOST_CHECKS), run.batches(), strict=False):
                if guard.step(batch):
                    break
        finally:
            generated.forward = right
        if guard.fallen != (module.name,):
            missed.append(f"{name} in '{module.name}': {[str(event) for event in guard.events] or 'nothing found'}")
        for fallen in guard.fallen:
            run.patch.restore(*next(each.counters.sites for each in bound if each.name == fallen))
        tell(f"{number + 1} faults, {len(missed)} missed: {name} in '{module.name}'")
    return missed


def _faults() -> tuple[tuple[str, Change, Change], ...]:
    """Faults: a name, and what becomes of the input and of the output."""
    stuck: list[Tensor] = []

    def stuck_scale(x: Tensor) -> Tensor:
        if not stuck:
            stuck.append(x.detach().abs().amax() / 4)  # of a first batch with small numbers
        return x.clamp(-stuck[0], stuck[0])

    return (
        ("a scale that is stuck", stuck_scale, _same),
        (
            "a clipped operand",
            lambda x: x.clamp(-x.detach().abs().amax() / CLIP, x.detach().abs().amax() / CLIP),
            _same,
        ),
        (
            "NaN in the output",
            _same,
            lambda y: torch.where(torch.arange(len(y), device=y.device) == 1, torch.nan, y.T).T,
        ),
        ("rows exchanged", _same, lambda y: y.flip(0)),
        ("a gradient twice as large", _same, lambda y: 2 * y - y.detach()),
    )


def _same(x: Tensor) -> Tensor:
    return x


def _faulty(right: Callable[..., Any], change_input: Change, change_output: Change) -> Callable[..., Any]:
    def forward(module: nn.Module, x: Tensor, *others: Any) -> Any:
        return change_output(right(module, change_input(x), *others))

    return forward


def table(found: GuardRun) -> str:
    """The figures as text."""
    lines = (
        f"{found.policy}, batch {found.batch}; {found.device}, torch {found.torch}",
        f"a training step, ms          {found.step:9.3f}, peak memory {found.peak_step:.0f} MiB",
        f"a check, ms                  {found.check:9.3f}, peak memory {found.peak_check:.0f} MiB",
        f"overhead, percent            {found.overhead_percent:9.3f}, one step in {found.every} being checked",
        f"false alarms                 {len(found.false_alarms):9d} in {found.steps} steps, {found.checks} checks",
        *(f"  {alarm}" for alarm in found.false_alarms),
        f"faults found                 {found.found:9d} of {found.planted}, each within {MOST_CHECKS} checks",
        *(f"  missed: {missed}" for missed in found.missed),
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guard_run", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--policy", default="policies/wukong_mods.yaml", help="policy of the model")
    parser.add_argument("--batch", type=int, default=None, help="samples in a step; the policy's otherwise")
    parser.add_argument("--every", type=int, default=1000, help="the overhead is that of one check in so many steps")
    parser.add_argument("--steps", type=int, default=20_000, help="steps without a fault")
    parser.add_argument("--checked", type=int, default=100, help="one of these in so many is checked")
    parser.add_argument("--faults", type=int, default=20, help="planted faults")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    def study() -> str:
        found = measure(
            options.policy,
            options.batch,
            every=options.every,
            steps=options.steps,
            checked=options.checked,
            faults=options.faults,
            device=options.device,
            eager=options.eager,
        )
        return json.dumps(asdict(found), indent=2) if options.json else table(found)

    return run_study(study)


if __name__ == "__main__":
    sys.exit(main())
