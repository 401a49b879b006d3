"""Kernels of an FM interaction: the small products that combine a sample's embeddings with one another.

A sample is a matrix x of (n, d), n embeddings of dimension d. Wukong (arXiv 2403.02545, section 3) computes two things
from it: products of all pairs at low rank, x @ (x^T @ rank), and weighted sums, compress @ x. As separate GEMMs they
read x three times forward and six times backward, in shapes too small to fill a tensor core; in one kernel a sample
stays on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError

SMALLEST_SIDE = 16  # of an operand of tl.dot; smaller ones are padded with zeros
LARGEST_SAMPLE = 32768  # elements of x per sample, padded, at most: shared memory holds it twice
LARGEST_MATRICES = 32768  # elements of rank and compress together, padded: registers hold sums for their gradients
MOST_EMBEDDINGS = 256  # whose gradients shared memory holds between two layouts of registers


@dataclass(frozen=True, slots=True)
class FmSizes:
    """The sizes of one FM interaction."""

    embeddings: int  # n
    dim: int  # d
    rank: int  # r, columns of the projection for the pairwise products
    made: int  # c, weighted sums; 0 where there are none

    def __post_init__(self) -> None:
        refusal = unsupported_reason(self.embeddings, self.dim, self.rank, self.made)
        if refusal is not None:
            raise InputError(
                f"no kernel computes the FM interaction of {self.embeddings} embeddings of {self.dim}: {refusal}"
            )

    @property
    def name(self) -> str:
        """64x128_to_32_32: embeddings, dimension, rank, weighted sums."""
        return f"{self.embeddings}x{self.dim}_to_{self.rank}" + (f"_{self.made}" if self.made else "")


@dataclass(frozen=True, slots=True)
class FmForward:
    """products = x @ (x^T @ rank), and compressed = compress @ x.

    Parameters: x (B, n, d), rank (n, r) and, where `made` is not 0, compress (c, n), all of one dtype. Results:
    products (B, n, r) and compressed (B, c, d) of that dtype. x^T @ rank is rounded to that dtype, as torch does
    between its two products.
    """

    sizes: FmSizes

    @property
    def function(self) -> str:
        """The operator's name."""
        return f"fm_interaction_{self.sizes.name}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return ("x", "rank", "compress") if self.sizes.made else ("x", "rank")

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("products", "compressed") if self.sizes.made else ("products",)


@dataclass(frozen=True, slots=True)
class FmBackward:
    """The gradients of `FmForward`, with another gradient of x added if `passed`.

    Parameters: dproducts (B, n, r), dcompressed (B, c, d) where `made` is not 0, x, rank, compress as in the forward,
    and `passed` (B, n, d), the gradient to add. dcompressed and passed may be slices of wider tensors: only their last
    two dimensions have to be contiguous. Results: dx (B, n, d) in the dtype of passed, else of x; drank (P, n * r) and
    dcompress (P, c * n), partial sums in float32, which `Reduce` adds up.
    """

    sizes: FmSizes
    passed: bool

    @property
    def function(self) -> str:
        """The operator's name."""
        return f"fm_interaction_backward_{self.sizes.name}" + ("_passed" if self.passed else "")

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        names = ("dproducts", "dcompressed", "x", "rank", "compress")
        given = names if self.sizes.made else ("dproducts", "x", "rank")
        return (*given, "passed") if self.passed else given

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("dx", "drank", "dcompress") if self.sizes.made else ("dx", "drank")


def padded(side: int) -> int:
    """Size of a side in a kernel: a power of two."""
    return max(SMALLEST_SIDE, 1 << (side - 1).bit_length())


def unsupported_reason(embeddings: int, dim: int, rank: int, made: int) -> str | None:
    """Reason why there is no kernel for these sizes; None where there is one."""
    if min(embeddings, dim, rank) < 1 or made < 0:
        return "sizes are 1 or more, and the weighted sums 0 or more"
    if padded(embeddings) * padded(dim) > LARGEST_SAMPLE:
        return f"a sample may have {LARGEST_SAMPLE} elements, padded to powers of two"
    if max(padded(rank), padded(max(made, 1))) > padded(embeddings):
        return "the rank and the weighted sums must be no more than the embeddings, or nothing is saved"
    if embeddings > MOST_EMBEDDINGS:
        return f"a sample may have {MOST_EMBEDDINGS} embeddings"
    if padded(embeddings) * (padded(rank) + (padded(made) if made else 0)) > LARGEST_MATRICES:
        return f"both matrices together may have {LARGEST_MATRICES} elements, padded to powers of two"
    return None


@dataclass(frozen=True, slots=True)
class FmConfiguration:
    """Launch configuration."""

    chunk: int  # columns of a sample per step of the backward, a power of two
    stages: int  # steps being loaded into shared memory
    stages_wide: int  # the same where `passed` is float32, as it is under autocast
    warps: int  # of a program
    programs: int  # per multiprocessor, at most


def fm_configuration(spec: FmForward | FmBackward, device: DeviceSpec = DEFAULT) -> FmConfiguration:
    """The launch configuration for a spec: as many stages as were measured to be fast and shared memory holds.

    Raises InputError if the device's shared memory holds no step of it.
    """
    launch = device.launches.fm_interaction
    n, d = padded(spec.sizes.embeddings), padded(spec.sizes.dim)
    how = next(each for each in launch.sizes if n <= each.embeddings)
    if isinstance(spec, FmForward):
        stages = _stages(spec, d, 3 if n * d <= launch.fetched else 2, device)
        return FmConfiguration(d, stages, stages, *how.forward)
    chunk = min(d, how.chunk_passed if spec.passed else how.chunk)
    while chunk > SMALLEST_SIDE and shared_bytes(spec, chunk, 1, wide=True) > device.shared_bytes:
        chunk //= 2
    stages, stages_wide = (_stages(spec, chunk, launch.stages, device, wide) for wide in (False, True))
    return FmConfiguration(chunk, stages, stages_wide, *how.backward)


def shared_bytes(spec: FmForward | FmBackward, chunk: int, stages: int, wide: bool = False) -> int:
    """Upper bound of a kernel's shared memory, bytes: what is being loaded, both matrices, and small products."""
    sizes = spec.sizes
    n, r = padded(sizes.embeddings), padded(sizes.rank)
    c = padded(sizes.made) if sizes.made else 0
    loaded = n * chunk
    if isinstance(spec, FmBackward):
        loaded += n * r + c * chunk + (n * chunk * (2 if wide else 1) if spec.passed else 0)
    products = r * chunk * (1 if isinstance(spec, FmForward) else 2)
    return 2 * (stages * loaded + n * (r + c) + products)


def _stages(spec: FmForward | FmBackward, chunk: int, most: int, device: DeviceSpec, wide: bool = False) -> int:
    for stages in range(most, 0, -1):
        if shared_bytes(spec, chunk, stages, wide) <= device.shared_bytes:
            return stages
    raise InputError(
        f"no kernel computes the FM interaction {spec.sizes.name} on {device.name}: it takes "
        f"{shared_bytes(spec, chunk, 1, wide)} bytes of shared memory, and a block can have {device.shared_bytes}"
    )


def fm_title(spec: FmForward | FmBackward) -> str:
    """What a kernel computes."""
    sizes = spec.sizes
    products = f"pairwise products at rank {sizes.rank}"
    what = f"{products} and {sizes.made} weighted sums" if sizes.made else products
    return what[0].upper() + what[1:] if isinstance(spec, FmForward) else f"Gradients of {what}"
