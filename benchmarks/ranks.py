"""Training on several GPUs: what gathers of FP8 weights gain, beside DDP, BF16 and bare collectives.

    python -m benchmarks.ranks --generate    # once, on any machine: writes build/ranks, to be carried along
    torchrun --nproc_per_node 2 -m benchmarks.ranks --out ranks.json [--kinds fsdp2,ddp,alone] [--modes eager,compiled]

A tower of LayerNorm -> Linear -> SiLU -> Linear blocks with residuals, in bfloat16; a step is forward, loss, backward
and fused Adam. Kinds: FSDP2 with a unit for each block, DDP, and each rank alone, without communication. Variants:
`bf16` (unbound), `loka` (bound; FSDP2 gathers the weights in bfloat16) and `gather` (bound, with `gather_fp8`).

Each row has the median step, the host's part of it, bytes of all-gathers and reduce-scatters of a step, the time of
the same collectives without anything beside them, that of NCCL's kernels in a step, peak memory, and losses. It is
written as soon as it is there. Sizes: WIDTH, LAYERS and BATCH in the environment, the same for both commands. For a
slower link set NCCL's own variables: NCCL_MAX_NCHANNELS=1, or NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 for sockets.
Without a GPU it runs with gloo, to be tried out.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = int(os.environ.get("WIDTH", "4096"))
LAYERS = int(os.environ.get("LAYERS", "6"))
BATCH = int(os.environ.get("BATCH", "4096"))
FOLDER = Path("build/ranks")
POLICY = """\
version: 1
name: tower
model: {{factory: "benchmarks.ranks:build", inputs: "benchmarks.ranks:inputs", batch_size: {batch}}}
target: h200
defaults: {{compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}}
rules: [{{match: {{max_n: 16}}, compute: keep}}]
"""
VARIANTS = {"fsdp2": ("bf16", "loka", "gather"), "ddp": ("bf16", "loka"), "alone": ("bf16", "loka")}
FIRST, TIMED, PROFILED = 5, 20, 2  # steps


class Block(nn.Module):
    """A residual block of two linears."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()
        self.down = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


def build() -> nn.Module:
    """The tower."""
    torch.manual_seed(0)
    return nn.Sequential(*[Block(WIDTH) for _ in range(LAYERS)], nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))


def inputs(batch: int) -> tuple[Tensor]:
    """Its example inputs."""
    return (torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1)),)


def generate() -> None:
    """Write the package into FOLDER."""
    import loka

    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "tower.yaml").write_text(POLICY.format(batch=BATCH))
    print(loka.generate(FOLDER / "tower.yaml", FOLDER / "tower", force=True).folder)


class Collectives:
    """Sizes of the collectives that FSDP starts, by kind, and their time without anything beside them."""

    names = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")

    def __init__(self) -> None:
        self.seen: list[tuple[Callable[..., Any], int, int, torch.dtype]] = []

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Notes what is started inside."""
        own = {name: getattr(dist, name) for name in self.names if hasattr(dist, name)}

        def noting(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                tensors = [*args, *kwargs.values()]
                first, second = [each for each in tensors if isinstance(each, Tensor)][:2]
                self.seen.append((function, first.numel(), second.numel(), first.dtype))
                return function(*args, **kwargs)

            return call

        for name, function in own.items():
            setattr(dist, name, noting(function))
        try:
            yield
        finally:
            for name, function in own.items():
                setattr(dist, name, function)

    def summary(self, device: torch.device) -> dict[str, Any]:
        """Bytes of a step and milliseconds, by kind."""
        found: dict[str, Any] = {}
        for kind in ("all_gather", "reduce_scatter"):
            calls = [each for each in self.seen if each[0].__name__.startswith(kind)]
            found[f"{kind}_bytes"] = sum(max(out, given) * dtype.itemsize for _, out, given, dtype in calls)
            found[f"{kind}_calls"] = len(calls)
            tensors = [
                (function, torch.zeros(out, dtype=dtype, device=device), torch.zeros(given, dtype=dtype, device=device))
                for function, out, given, dtype in calls
            ]

            def run(tensors: list[tuple[Callable[..., Any], Tensor, Tensor]] = tensors) -> None:
                for function, out, given in tensors:
                    function(out, given)

            found[f"bare_{kind}_ms"] = timed(run, device, 10)[0] if calls else 0.0
        return found


def timed(step: Callable[[], object], device: torch.device, count: int) -> tuple[float, float]:
    """Median milliseconds of a step, and of the host in it."""
    for _ in range(3):
        step()
    dist.barrier()
    if device.type != "cuda":
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
        return round(statistics.median(times), 3), round(statistics.median(times), 3)
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    host = []
    for mark in marks[1:]:
        start = time.perf_counter()
        step()
        host.append((time.perf_counter() - start) * 1e3)
        mark.record()
    torch.cuda.synchronize()
    steps = [one.elapsed_time(other) for one, other in pairwise(marks)]
    return round(statistics.median(steps), 3), round(statistics.median(host), 3)


def nccl_kernels(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds of a step that NCCL's kernels last, waiting included, by name."""
    if device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in seen.events():
        if str(event.device_type).endswith("CUDA") and "nccl" in event.name.lower():
            found[event.name[:50]] = found.get(event.name[:50], 0.0) + event.device_time_total / 1e3 / PROFILED
    return {name: round(spent, 3) for name, spent in found.items()}


def made(kind: str, variant: str, device: torch.device) -> tuple[nn.Module, Any, str]:
    """A model of a kind, its patch, and the report of gather_fp8."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks import ranks  # not __main__: the package knows the classes by this name

    model: Any = ranks.build().to(device=device, dtype=torch.bfloat16)
    patch = importlib.import_module("tower").apply(model) if variant != "bf16" else None
    if kind == "fsdp2":
        for block in model:
            if isinstance(block, ranks.Block):
                fully_shard(block)
        fully_shard(model)
    elif kind == "ddp":
        model = DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    report = str(patch.gather_fp8()) if patch is not None and variant == "gather" else ""
    return model, patch, report


def measure(kind: str, variant: str, compiled: bool, device: torch.device) -> dict[str, Any]:
    """One row."""
    torch.compiler.reset()
    model, patch, report = made(kind, variant, device)
    run = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    x = torch.randn(BATCH, WIDTH, generator=generator).to(device=device, dtype=torch.bfloat16)
    y = (torch.rand(BATCH, 1, generator=generator) < 0.3).float().to(device)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.binary_cross_entropy_with_logits(run(x).float(), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    started = time.perf_counter()
    losses = [step().item() for _ in range(FIRST)]
    first = time.perf_counter() - started
    if patch is not None:
        patch.verify(backward=False)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    collectives = Collectives()
    with collectives.counted():
        step()
    ms, host = timed(step, device, TIMED)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    row = {"ms": ms, "host_ms": host, "peak_gib": round(peak, 3), "first_s": round(first, 1), "losses": losses}
    row |= {"nccl_ms": nccl_kernels(step, device), "report": report}
    if kind == "fsdp2":
        row |= collectives.summary(device)
    elif kind == "ddp":
        sizes = [each.numel() for each in model.parameters()]
        grads = [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in sizes]
        row["all_reduce_bytes"] = 2 * sum(sizes)
        row["bare_all_reduce_ms"] = timed(lambda: [dist.all_reduce(each) for each in grads], device, 10)[0]
    return row


def main(given: Sequence[str] | None = None) -> int:
    """Generate the package, or measure and write the rows; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generate", action="store_true", help="write the package and stop")
    parser.add_argument("--out", help="JSON file of all rows")
    parser.add_argument("--kinds", default="fsdp2,ddp,alone")
    parser.add_argument("--modes", default="eager,compiled")
    arguments = parser.parse_args(given)
    if arguments.generate:
        generate()
        return 0
    sys.path.insert(0, str(FOLDER))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=240))
    name = torch.cuda.get_device_name() if cuda else "cpu"
    about = {"device": name, "torch": torch.__version__, "world": dist.get_world_size()}
    about |= {"width": WIDTH, "layers": LAYERS, "batch": BATCH}
    about |= {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
    rows: list[dict[str, Any]] = []
    for mode in arguments.modes.split(","):
        for kind in arguments.kinds.split(","):
            for variant in VARIANTS[kind]:
                row = {"kind": kind, "mode": mode, "variant": variant}
                row |= measure(kind, variant, mode == "compiled", device)
                gc.collect()
                if cuda:
                    torch.cuda.empty_cache()
                rows.append(row)
                if dist.get_rank() == 0:
                    print(json.dumps(row), flush=True)
                    if arguments.out:
                        Path(arguments.out).write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
