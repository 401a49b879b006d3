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
class DotForward:
    """products = x @ x^T. Parameter: x (B, n, d). Result: products (B, n, n) in its dtype."""

    embeddings: int  # n
    dim: int  # d

    def __post_init__(self) -> None:
        _check(self)

    @property
    def function(self) -> str:
        """The operator's name."""
        return f"dot_interaction_{self.embeddings}x{self.dim}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return ("x",)

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("products",)


@dataclass(frozen=True, slots=True)
class DotBackward:
    """The gradient of `DotForward`: (dproducts + dproducts^T) @ x.

    Parameters: dproducts (B, n, n) and x (B, n, d). Result: dx (B, n, d) in the dtype of x.
    """

    embeddings: int  # n
    dim: int  # d

    def __post_init__(self) -> None:
        _check(self)

    @property
    def function(self) -> str:
        """The operator's name."""
        return f"dot_interaction_backward_{self.embeddings}x{self.dim}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return ("dproducts", "x")

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("dx",)


def unsupported_reason(embeddings: int, dim: int) -> str | None:
    """Reason why there is no kernel for these sizes; None where there is one."""
    if min(embeddings, dim) < 1:
        return "sizes are 1 or more"
    if embeddings > MOST_EMBEDDINGS:
        return f"a sample may have {MOST_EMBEDDINGS} embeddings"
    if padded(embeddings) * padded(dim) > LARGEST_SAMPLE:
        return f"a sample may have {LARGEST_SAMPLE} elements, padded to powers of two"
    return None


def _check(spec: DotForward | DotBackward) -> None:
    reason = unsupported_reason(spec.embeddings, spec.dim)
    if reason is not None:
        raise InputError(
            f"no kernel computes the dot interaction of {spec.embeddings} embeddings of {spec.dim}: {reason}"
        )


@dataclass(frozen=True, slots=True)
class DotConfiguration:
    """Launch configuration."""

    stages: int  # samples being loaded into shared memory
    warps: int  # of a program
    programs: int  # per multiprocessor, at most


def dot_configuration(spec: DotForward | DotBackward, device: DeviceSpec = DEFAULT) -> DotConfiguration:
    """The launch configuration for a spec: warps by the larger of a sample and its products."""
    launch = device.launches.dot
    n = padded(spec.embeddings)
    warps = min(max(n * max(n, padded(spec.dim)) // launch.warp_elements, 1), launch.most_warps)
    stages = launch.stages_forward if isinstance(spec, DotForward) else launch.stages_backward
    return DotConfiguration(stages, warps, launch.programs)


def dot_title(spec: DotForward | DotBackward) -> str:
    """What a kernel computes."""
    what = "products of all pairs of a sample's rows"
    return what[0].upper() + what[1:] if isinstance(spec, DotForward) else f"Gradient of {what}"
