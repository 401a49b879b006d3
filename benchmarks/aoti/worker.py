"""The process of one job: `python -X faulthandler -m benchmarks.aoti.worker JOB`; the last line of stdout is JSON.

A process that only runs a package refuses to import LoKA, so it must not be imported here at the top.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._inductor
from torch import Tensor, nn

from benchmarks.aoti.jobs import PACKAGE, Action, AotiModel, Job, ModelForm

WARM_UPS = 3
ROWS = 1000  # of an embedding bag
WIDTH = 64  # of the model that is one linear layer

Run = Callable[..., Any]


class RefusingLoka:
    """A finder of modules that has no LoKA."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise ImportError for LoKA and its generated packages."""
        if name.partition(".")[0] in ("loka", PACKAGE):
            raise ImportError(f"{name} is refused here")


class WithBags(nn.Module):
    """A model whose first input is looked up in an embedding bag, by indices of its shape but the last dimension."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.bag = nn.EmbeddingBag(ROWS, width, mode="sum")

    def forward(self, indices: Tensor, *others: Tensor) -> Any:
        """Indices (B, ...), and the model's other inputs."""
        rows = self.bag(indices.flatten().unsqueeze(1))
        return self.model(rows.view(*indices.shape, -1), *others)


def made(subject: AotiModel, form: ModelForm) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its inputs on the device, as the form has them. The same in every process."""
    torch.manual_seed(0)
    if form.linear:
        rows = torch.randn(subject.batch, WIDTH, device=subject.device, dtype=torch.bfloat16)
        return nn.Linear(WIDTH, WIDTH, device=subject.device, dtype=torch.bfloat16), (rows,)
    model: nn.Module = _function(subject.factory)().eval()
    inputs = tuple(value.detach() for value in _function(subject.inputs)(subject.batch))
    first = inputs[0]
    dtype = torch.float32 if form.autocast else torch.bfloat16
    model.to(subject.device, dtype)
    if form.fp8:
        sys.path.insert(0, subject.folder)
        importlib.import_module(PACKAGE).apply(model, mode="infer")
    if form.bags:
        model = WithBags(model, first.shape[-1]).to(subject.device, dtype)
        inputs = (torch.randint(0, ROWS, first.shape[:-1]), *inputs[1:])
    cast = (value.to(subject.device, dtype if value.is_floating_point() else None) for value in inputs)
    return model, tuple(cast)


def casting(subject: AotiModel, form: ModelForm) -> AbstractContextManager[object]:
    """Autocast, or nothing."""
    return torch.autocast(subject.device, torch.bfloat16) if form.autocast else nullcontext()


def compile_package(job: Job) -> None:
    """Write the package, and inputs and outputs beside it."""
    subject, form = job.subject, job.form
    model, inputs = made(subject, form)
    with casting(subject, form):
        torch.save((inputs, model(*inputs)), subject.path(f"{form.name}.pt"))
        rows = torch.export.Dim("rows", min=2, max=2 * subject.batch)
        shapes = tuple({0: rows} for _ in inputs) if form.dynamic else None
        program = torch.export.export(model, inputs, dynamic_shapes=shapes)
    if form.fp8:
        import loka

        program = loka.portable(program)
    path = str(subject.path(f"{form.name}.pt2"))
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=dict(form.options))


def loaded(job: Job) -> tuple[Run, tuple[Tensor, ...], Any]:
    """The package as a function, its inputs, and the outputs of the model."""
    inputs, expected = torch.load(job.subject.path(f"{job.form.name}.pt"))
    package: Any = torch._inductor.aoti_load_package(str(job.subject.path(f"{job.form.name}.pt2")))
    return package, inputs, expected


def run_package(job: Job) -> dict[str, float]:
    """Load and run the package, and compare."""
    package, inputs, expected = loaded(job)
    return _far(package(*inputs), expected)


def timed(job: Job) -> dict[str, float]:
    """Median milliseconds of a run; nothing but the first runs with 0 rounds."""
    if job.action is Action.TIME_PACKAGE:
        package, inputs, _ = loaded(job)
        return _median(package, inputs, job)
    model, inputs = made(job.subject, job.form)
    compiled: Run = torch.compile(model, dynamic=False)
    if job.action is Action.TIME_COMPILED:
        return _median(compiled, inputs, job)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            compiled(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled(*inputs)
    return _median(lambda *same: graph.replay(), inputs, job)


def _median(run: Run, inputs: tuple[Tensor, ...], job: Job) -> dict[str, float]:
    for _ in range(WARM_UPS):
        run(*inputs)
    if not job.rounds:
        return {}
    clock = _by_events if job.subject.device == "cuda" else _by_clock
    return {"ms": statistics.median(clock(lambda: run(*inputs)) for _ in range(job.rounds))}


def _by_events(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def _by_clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _far(found: Any, expected: Any) -> dict[str, float]:
    return {
        "largest_error": float((found.float() - expected.float()).abs().max()),
        "scale": float(expected.float().abs().max()),
    }


def _function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def main() -> None:
    """Do the job of the command line."""
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # C++ frames; those of Python are by faulthandler
    job = Job.from_json(sys.argv[1])
    if job.action in (Action.RUN, Action.TIME_PACKAGE):
        sys.meta_path.insert(0, RefusingLoka())
    found: dict[str, float] = {}
    with torch.inference_mode() if job.inference_mode else torch.no_grad():
        if job.action in (Action.COMPILE, Action.COMPILE_AND_RUN):
            compile_package(job)
        if job.action in (Action.RUN, Action.COMPILE_AND_RUN):
            found = run_package(job)
        elif job.action is not Action.COMPILE:
            found = timed(job)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
