"""The device that steps run on: compiling, capturing, memory and the profiler."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch._dynamo
from torch import nn

from loka.bench.speed.comparison import describe
from loka.bench.speed.device_kernels import KernelSum, kernel_sum_of
from loka.bench.speed.steps import float32_products
from loka.bench.speed.timing import GRAPHS
from loka.errors import LokaError

FULL = 0.6  # share of the memory in use above which no further variant is kept alive
COMPILED_FORMS = 1024  # of one function: all variants' forwards share their code


class CaptureError(LokaError):
    """A step cannot be captured into a CUDA graph."""


class BenchDevice(Protocol):
    """What measuring needs of a device."""

    @property
    def type(self) -> str:
        """torch's name: cuda or cpu."""
        ...

    def session(self) -> AbstractContextManager[None]:
        """Context of all measurements: TF32 for float32 products, and as many compiled forms as there are variants."""
        ...

    def compiled(self, model: nn.Module, mode: str | None) -> Callable[..., Any]:
        """The model under torch.compile."""
        ...

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        """The step as one CUDA graph. Raises CaptureError."""
        ...

    def wait(self) -> None:
        """Wait until the queue is empty."""
        ...

    def kernels(self, step: Callable[[], object]) -> KernelSum | None:
        """The device's work in one step; None if it cannot be seen."""
        ...

    def allocated(self) -> int:
        """Bytes in use."""
        ...

    def restart_peak(self) -> None:
        """Count the peak of `peak` from now on."""
        ...

    def peak(self) -> int | None:
        """The most bytes in use since `restart_peak`; None if unknown."""
        ...

    def free(self) -> int | None:
        """Bytes that other processes could use; None if unknown."""
        ...

    def is_full(self) -> bool:
        """True if no further variant should be kept alive."""
        ...

    def release_memory(self) -> None:
        """Free the memory that nobody holds any more."""
        ...

    def release(self) -> None:
        """Free that memory, and all compiled code."""
        ...


class CudaDevice:
    """The current CUDA device."""

    type = "cuda"

    @contextmanager
    def session(self) -> Iterator[None]:
        config: Any = torch._dynamo.config
        limits = {"recompile_limit": COMPILED_FORMS, "accumulated_recompile_limit": COMPILED_FORMS}
        with float32_products("high"), config.patch(limits):
            yield

    def compiled(self, model: nn.Module, mode: str | None) -> Callable[..., Any]:
        found: Callable[..., Any] = torch.compile(model, mode=mode, dynamic=False)
        return found

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        stream = torch.cuda.current_stream()
        try:
            return GRAPHS.capture(step)
        except Exception as error:
            torch.cuda.set_stream(stream)  # a broken capture leaves its own
            cause = error.__context__ or error  # ending a broken capture raises again
            raise CaptureError(f"the step cannot be captured: {describe(cause)}") from error

    def wait(self) -> None:
        torch.cuda.synchronize()

    def kernels(self, step: Callable[[], object]) -> KernelSum | None:
        return kernel_sum_of(step)

    def allocated(self) -> int:
        return torch.cuda.memory_allocated()

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated()

    def free(self) -> int | None:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def is_full(self) -> bool:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return 1 - free / total > FULL

    def release_memory(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()

    def release(self) -> None:
        torch._dynamo.reset()
        self.release_memory()
