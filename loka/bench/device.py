"""The device that is measured on: compiling, capturing, replaying, memory and the profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.profiler import ProfilerActivity, profile

from loka.errors import LokaError

MIB = 2**20
WARM_UPS = 3  # eager runs before a capture
WARM_UP_MS = 20  # of replays
FULL = 0.6  # share of the memory in use above which no further variant is kept alive
COMPILED_FORMS = 1024  # of one function: all variants' forwards share their code
LONGEST_FAILURE = 300  # characters
NO_KERNELS = ("Memcpy", "Memset")


class CaptureError(LokaError):
    """A step cannot be captured into a CUDA graph."""


@dataclass(frozen=True, slots=True)
class KernelSum:
    """The device's work in one step. `milliseconds` counts copies and fills of memory too, `launches` does not."""

    launches: int
    milliseconds: float


class BenchDevice:
    """The current CUDA device. Tests stand in for it with a subclass."""

    type = "cuda"  # torch's name

    @contextmanager
    def session(self) -> Iterator[None]:
        """Context of all measurements: TF32 for float32 products, and as many compiled forms as there are variants."""
        config: Any = torch._dynamo.config
        limits = {"recompile_limit": COMPILED_FORMS, "accumulated_recompile_limit": COMPILED_FORMS}
        with float32_products("high"), config.patch(limits):
            yield

    def compiled(self, model: nn.Module, mode: str | None) -> Callable[..., Any]:
        """The model under torch.compile."""
        found: Callable[..., Any] = torch.compile(model, mode=mode, dynamic=False)
        return found

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """The step as one CUDA graph, after eager runs on a side stream. Raises CaptureError."""
        stream = torch.cuda.current_stream()
        try:
            return _captured(step)
        except Exception as error:
            torch.cuda.set_stream(stream)  # a broken capture leaves its own
            cause = error.__context__ or error  # ending a broken capture raises again
            raise CaptureError(f"the step cannot be captured: {describe(cause)}") from error

    def replays(self, replay: Callable[[], object], measured: int) -> list[float]:
        """Milliseconds of each replay, for about `measured` milliseconds in all: between CUDA events around each, by
        Triton's do_bench, which overwrites the L2 cache between two.
        """
        from triton.testing import do_bench

        return [float(time) for time in do_bench(replay, warmup=WARM_UP_MS, rep=measured, return_mode="all")]

    def wait(self) -> None:
        """Wait until the queue is empty."""
        torch.cuda.synchronize()

    def kernels(self, step: Callable[[], object]) -> KernelSum | None:
        """The device's work in one step, counted and timed by CUPTI; None if it cannot be seen.

        The profiler may lose what runs while it starts, so the second of two runs counts. If it cannot be used at all
        (another tool has CUPTI, or the driver forbids it) the result is None: times are useful without these numbers.
        """
        try:
            activities(step)
            found = activities(step)
        except RuntimeError:
            return None
        launches = sum(not name.startswith(NO_KERNELS) for name, _ in found)
        return KernelSum(launches, sum(us for _, us in found) / 1e3) if launches else None

    def allocated(self) -> int:
        """Bytes in use."""
        return torch.cuda.memory_allocated()

    def restart_peak(self) -> None:
        """Count the peak of `peak_mib` from now on."""
        torch.cuda.reset_peak_memory_stats()

    def peak_mib(self, held: int) -> float | None:
        """The most memory in use since `restart_peak`, without `held` bytes; None if unknown."""
        return (torch.cuda.max_memory_allocated() - held) / MIB

    def free(self) -> int | None:
        """Bytes that other processes could use; None if unknown."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def is_full(self) -> bool:
        """True if no further variant should be kept alive."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return 1 - free / total > FULL

    def release_memory(self) -> None:
        """Free the memory that nobody holds any more."""
        gc.collect()
        torch.cuda.empty_cache()

    def release(self) -> None:
        """Free that memory, and all compiled code."""
        torch._dynamo.reset()
        self.release_memory()


@dataclass(frozen=True, slots=True)
class _Replay:
    """Replays a captured step. It keeps the step alive: a graph reads the step's tensors without owning them."""

    graph: torch.cuda.CUDAGraph
    step: Callable[[], object]

    def __call__(self) -> None:
        self.graph.replay()


def _captured(step: Callable[[], object]) -> _Replay:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return _Replay(graph, step)


def activities(step: Callable[[], object]) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel, copy and fill of memory in one step on the current CUDA device."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    return [
        (event.name, event.device_time_total)
        for event in found.events()
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)  # these are ranges
    ]


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Context that sets the precision of float32 products, `highest` or `high` (TF32), and restores it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def describe(error: BaseException) -> str:
    """Type and message of an error on one line of at most LONGEST_FAILURE characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= LONGEST_FAILURE else text[: LONGEST_FAILURE - 3] + "..."
