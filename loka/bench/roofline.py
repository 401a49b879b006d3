"""Lower bound of the time of a piece of work on a device, assuming no gaps between kernels.

A GEMM takes the longer of two times: its FLOPs at the device's peak, and its operands and result at the bandwidth of a
copy. Between GEMMs there is one elementwise pass, whatever it computes, which takes the bytes it must read and write at
that bandwidth. This bounds kernels that each make one pass over their tensors and keep nothing from the kernel before.
Vectors (parameters of norms, biases, scales) count nothing. If tensors stay in the L2 cache between two kernels, the
bound can be beaten, and the share reached is above 100 %.

In FP8 the pass before a GEMM writes its operand with one byte an element; in training also the transposed copy that
wgrad reads, since Hopper's FP8 tensor cores take only K-major operands. An operand that no pass writes is quantized by
a separate pass, and so are the weights in each training step; in inference they are frozen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from loka.bench.model.model_variants import ModelVariant
from loka.bench.peers import takes_fp8
from loka.devices.targets import DEVICES
from loka.graph.sites.site import GemmKind, Site
from loka.plan.plan import Plan

PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")  # as Site.fed_by names them
LINEARS = (GemmKind.LINEAR, GemmKind.FUNCTIONAL_LINEAR)

# Passes over the parameters' bytes: gradient and value read, value written, and each state read and written.
OPTIMIZER_PASSES: Mapping[str, int] = {"sgd": 3, "adagrad": 5, "adam": 7}


class GemmMath(StrEnum):
    """Arithmetic of a variant's GEMMs."""

    TF32 = "tf32"
    BF16 = "bf16"
    FP8 = "fp8"  # precise accumulation
    FP8_FAST = "fp8-fast"  # fast accumulation

    @property
    def is_fp8(self) -> bool:
        """True if operands are FP8."""
        return self in (GemmMath.FP8, GemmMath.FP8_FAST)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks of a device: bandwidth in bytes a second, reads plus writes, and FLOPs a second by precision."""

    bandwidth: float
    flops: dict[GemmMath, float]


# Precisions with a peak measured on large square products, and its name in a `DeviceSpec`. TF32's is of smaller ones.
_FLOPS = {GemmMath.BF16: "bfloat16", GemmMath.FP8: "e4m3", GemmMath.FP8_FAST: "e4m3 fast"}


def peaks_of(device: str) -> Peaks | None:
    """The peaks of the device of this name; None if they were not measured."""
    found = next((spec for spec in DEVICES.values() if spec.measured_on and spec.measured_on == device), None)
    if found is None:
        return None
    return Peaks(found.bandwidth, {precision: found.flops[name] for precision, name in _FLOPS.items()})


def product_us(rows: int, columns: int, contraction: int, precision: GemmMath, peaks: Peaks) -> float:
    """Microseconds of the product (rows x contraction) by (contraction x columns), with a BF16 or float32 result.

    Raises KeyError if there is no peak for the precision.
    """
    flops = 2 * rows * columns * contraction / peaks.flops[precision]
    element, operand = sizes_of(precision)
    moved = operand * contraction * (rows + columns) + element * rows * columns
    return 1e6 * max(flops, moved / peaks.bandwidth)


def bytes_us(moved: float, peaks: Peaks) -> float:
    """Microseconds to move `moved` bytes, read plus written."""
    return 1e6 * moved / peaks.bandwidth


def three_products(rows: int, k: int, n: int, precision: GemmMath, training: bool, peaks: Peaks) -> float:
    """Microseconds of fprop, in training also of dgrad and wgrad."""
    total = product_us(rows, n, k, precision, peaks)
    if training:
        total += product_us(rows, k, n, precision, peaks) + product_us(n, k, rows, precision, peaks)
    return total


def sizes_of(precision: GemmMath) -> tuple[int, int]:
    """Bytes of an element of a tensor, and of an element of a GEMM's operand."""
    if precision is GemmMath.TF32:
        return 4, 4
    return 2, 1 if precision.is_fp8 else 2


def written_bytes(precision: GemmMath, training: bool) -> int:
    """Bytes per element that a pass writes for the GEMM after it; FP8 training includes the transposed copy."""
    operand = sizes_of(precision)[1]
    return 2 * operand if precision.is_fp8 and training else operand


@dataclass(frozen=True, slots=True)
class ModelBound:
    """What the bounds of all variants have in common."""

    batch: int
    training: bool
    peaks: Peaks
    optimizer: str
    parameter_bytes: int  # of those that are trained

    def of_plan(self, plan: Plan) -> float | None:
        """Milliseconds of a generated package."""
        fp8 = frozenset(each.site.name for each in plan.sites if each.fp8)
        fast = {gemm.accumulation == "fast" for each in plan.sites for gemm in each.gemms if gemm.fp8}
        precision = GemmMath.BF16 if not fp8 else GemmMath.FP8_FAST if fast == {True} else GemmMath.FP8
        return self.milliseconds([each.site for each in plan.sites], fp8, precision)

    def of_variant(self, variant: ModelVariant, sites: Sequence[Site]) -> float | None:
        """Milliseconds of a variant without a package."""
        if variant.float32:
            return self.milliseconds(sites, frozenset(), GemmMath.TF32)
        if not variant.torchao:
            return self.milliseconds(sites, frozenset(), GemmMath.BF16)
        return self.milliseconds(sites, torchao_sites(sites), GemmMath.FP8_FAST)

    def milliseconds(self, sites: Sequence[Site], fp8: frozenset[str], precision: GemmMath) -> float | None:
        """Of the sites' GEMMs, of one elementwise pass before each that is fed by one, and of the optimiser.

        Sites outside `fp8`, which are names, count in BF16, or in TF32 if that is `precision`. Not counted, which makes
        the bound lower than a model of every operation would be: operands of a pass beyond the first (residuals, the
        parts of a concatenation), copies and transposes, operations after the last GEMM, and parts without GEMMs
        (embeddings, loss). None if a precision has no peak.
        """
        rest = GemmMath.TF32 if precision is GemmMath.TF32 else GemmMath.BF16
        if precision not in self.peaks.flops or rest not in self.peaks.flops:
            return None
        total, moved = 0.0, OPTIMIZER_PASSES[self.optimizer] * self.parameter_bytes if self.training else 0
        passed = passed_sites(sites, self.batch)
        for site in sites:
            used = precision if site.name in fp8 and precision.is_fp8 else rest
            rows, (element, operand) = site.rows.at(self.batch), sizes_of(used)
            total += site.calls * three_products(rows, site.k, site.n, used, self.training, self.peaks)
            if site.name in passed:
                written = written_bytes(used, self.training)
                moved += rows * site.k * (element + written + (2 * element + written if self.training else 0))
            if self.training and used.is_fp8:
                moved += site.n * site.k * (element + 2 * operand)
        return (total + bytes_us(moved, self.peaks)) / 1e3


def torchao_sites(sites: Iterable[Site]) -> frozenset[str]:
    """Names of the sites that torchao's filter runs in FP8."""
    return frozenset(site.name for site in sites if site.kind is GemmKind.LINEAR and takes_fp8(site.k, site.n))


def passed_sites(sites: Iterable[Site], batch: int) -> frozenset[str]:
    """Names of the sites whose input an elementwise pass writes.

    Of a linear fed by an elementwise operation it does. The other products of one module are assumed to read one
    tensor: only the largest fed one has a pass, so that a shared tensor counts once. A product that runs once for each
    sample counts as one with all rows.
    """
    largest: dict[str, Site] = {}  # by the site's own name, or by the module of products
    for site in filter(_is_fed, sites):
        key = site.name if site.kind in LINEARS else f"products of {site.owner}"
        known = largest.get(key)
        if known is None or site.rows.at(batch) * site.k > known.rows.at(batch) * known.k:
            largest[key] = site
    return frozenset(site.name for site in largest.values())


def _is_fed(site: Site) -> bool:
    """True if an elementwise operation stands between this GEMM and the one before."""
    return any(True for _ in takewhile(lambda operation: operation not in PRODUCTS, site.fed_by))
