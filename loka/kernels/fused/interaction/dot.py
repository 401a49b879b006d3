"""Kernels of a dot interaction: the products of all pairs of a sample's embeddings, x @ x^T.

A sample is a matrix x of (n, d), n embeddings of dimension d, as a DLRM (arXiv 1906.00091) combines them. As a batched
GEMM the products are n x n for each sample, whose rows are rarely aligned to 16 bytes: cuBLAS then reads single
elements, forward and twice backward. In a kernel of its own a sample is read once forward and once backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.interaction.fm import padded

LARGEST_SAMPLE = 16384  # elements of x per sample, padded: shared memory holds those that are prefetched
MOST_EMBEDDINGS = 128  # whose products registers hold


@dataclass(frozen=True, slots=True)
class DotSpec:
    """products = x @ x^T, or `backward` the gradient, dx = (dproducts + dproducts^T) @ x.

    x and dx are (B, n, d), products and dproducts (B, n, n). A result has the dtype of x. Raises InputError for sizes
    without a kernel.
    """

    embeddings: int  # n
    dim: int  # d
    backward: bool = False

    def __post_init__(self) -> None:
        reason = unsupported_reason(self.embeddings, self.dim)
        if reason is not None:
            raise InputError(
                f"no kernel computes the dot interaction of {self.embeddings} embeddings of {self.dim}: {reason}"
            )

    @property
    def function(self) -> str:
        """The operator's name."""
        return f"dot_interaction{'_backward' if self.backward else ''}_{self.embeddings}x{self.dim}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return ("dproducts", "x") if self.backward else ("x",)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("dx",) if self.backward else ("products",)


def unsupported_reason(embeddings: int, dim: int) -> str | None:
    """Reason why there is no kernel for these sizes; None where there is one."""
    if min(embeddings, dim) < 1:
        return "sizes are 1 or more"
    if embeddings > MOST_EMBEDDINGS:
        return f"a sample may have {MOST_EMBEDDINGS} embeddings"
    if padded(embeddings) * padded(dim) > LARGEST_SAMPLE:
        return f"a sample may have {LARGEST_SAMPLE} elements, padded to powers of two"
    return None


@dataclass(frozen=True, slots=True)
class DotConfiguration:
    """Launch configuration."""

    stages: int  # samples being loaded into shared memory
    warps: int  # of a program
    programs: int  # per multiprocessor, at most


def dot_configuration(spec: DotSpec, device: DeviceSpec = DEFAULT) -> DotConfiguration:
    """The launch configuration for a spec: warps by the larger of a sample and its products."""
    launch = device.launches.dot
    n = padded(spec.embeddings)
    held = n * max(n, padded(spec.dim))
    warps = next(warps for elements, warps in launch.warps if held >= elements)
    return DotConfiguration(launch.stages, warps, launch.programs)


def dot_title(spec: DotSpec) -> str:
    """What a kernel computes."""
    return f"{'Gradient of products' if spec.backward else 'Products'} of all pairs of a sample's rows"
