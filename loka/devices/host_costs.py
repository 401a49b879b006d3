"""What a training step costs the host, by how the model runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Execution(StrEnum):
    """How a training loop runs the model."""

    EAGER = "eager"
    COMPILED = "compiled"  # under torch.compile, without a CUDA graph
    GRAPH = "graph"  # captured or replayed in CUDA graphs: the host launches nothing by itself


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Host time of one launch, microseconds, with all that stands around it: autograd, allocations, the wrapper.

    A launch is a GEMM or a part of a workload (`loka.plan.select.workload`), the unit that plans count: smaller kernels
    beside them, as of residuals or bias gradients, are in the average.
    """

    measured_on: str
    torch: Mapping[Execution, float]  # of the model's own operations
    generated: Mapping[Execution, float]  # of generated kernels and FP8 GEMMs
