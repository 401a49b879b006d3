"""The kernel that quantizes several weights in one launch: its spec, launch and template values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.kernel_values import LARGEST_HELD, KernelValues, padded_width
from loka.kernels.fused.matrix_kernels import endings, numbered
from loka.kernels.fused.norm.norm_spec import NormForward
from loka.kernels.fused.quantization import ROWWISE

MOST_WEIGHTS = 8  # in one launch


@dataclass(frozen=True, slots=True)
class QuantizeWeights:
    """Several weights in e4m3, each with one power-of-two scale a row: the bits of `quantizers`, in one launch.

    Parameters: weight_0 (M_0, K_0), weight_1, ..., of any floating dtypes; results: values_0 (M_0, K_0) e4m3, or with
    more, `aligned`, columns; scale_0 (M_0, 1); scale_max_0 (P_0,), the largest scale that each of the weight's programs
    wrote; then those of weight_1, ... Raises InputError for anything but two to eight plain quantizers of rows that a
    program holds.
    """

    quantizers: tuple[NormForward, ...]  # one for each weight, which quantizes it alone

    def __post_init__(self) -> None:
        if not 2 <= len(self.quantizers) <= MOST_WEIGHTS:
            raise InputError(f"a launch quantizes 2 to {MOST_WEIGHTS} weights, not {len(self.quantizers)}")
        for each in self.quantizers:
            if not fits(each):
                raise InputError(f"{each.function} is no plain quantizer of rows of up to {LARGEST_HELD} elements")

    @property
    def function(self) -> str:
        """The host function's name, with the weights' widths: quantize_weights_479_to_480_1024."""
        sizes = [f"{each.width}_to_{each.aligned}" if each.aligned else str(each.width) for each in self.quantizers]
        return "_".join(["quantize_weights", *sizes])

    @property
    def parameters(self) -> tuple[str, ...]:
        """The host function's parameters, all tensors."""
        return numbered(("weight",), len(self.quantizers))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the host function's results."""
        return numbered(ROWWISE.results, len(self.quantizers))


def fits(spec: NormForward) -> bool:
    """True if a weight that `spec` quantizes can share a launch with others."""
    plain = NormForward(spec.width, None, False, False, spec.eps, None, False, True, spec.save, aligned=spec.aligned)
    return spec == plain and spec.columns <= LARGEST_HELD


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """What a program takes of a weight at a step: whole rows."""

    end: str  # of the weight's names: "_0"
    width: int  # columns of the weight
    columns: int  # of its values
    padded: int  # columns of a step, a power of two
    rows: int  # of a step, a power of two

    @property
    def masked(self) -> bool:
        """True if a step has more columns than there are."""
        return self.width != self.padded

    @property
    def aligned(self) -> bool:
        """True if zeros are written behind the weight's columns."""
        return self.columns != self.width


@dataclass(frozen=True, slots=True)
class WeightsConfiguration:
    """Launch configuration: each weight has programs of its own, with a grid-stride loop over blocks of rows."""

    blocks: tuple[WeightBlock, ...]  # one for each weight
    warps: int  # of a program
    programs: int  # of a weight on each multiprocessor, at most


def weights_configuration(spec: QuantizeWeights, device: DeviceSpec = DEFAULT) -> WeightsConfiguration:
    """The launch for a spec: as many warps as a row of the widest weight needs, and blocks of equal size."""
    launch = device.launches.weights
    padded = [padded_width(each.columns) for each in spec.quantizers]
    warps = min(max(1, max(padded) // launch.warp_elements), launch.most_warps)
    elements = max(warps * launch.warp_elements, *padded)
    blocks = [
        WeightBlock(end, each.width, each.columns, columns, elements // max(columns, launch.least_columns))
        for end, each, columns in zip(endings(len(padded)), spec.quantizers, padded, strict=True)
    ]
    return WeightsConfiguration(tuple(blocks), warps, max(1, launch.warps // warps))


def weights_values(spec: QuantizeWeights, launch: WeightsConfiguration) -> KernelValues:
    """Template values of a launch for several weights."""
    shapes: dict[str, str] = {}
    for block in launch.blocks:
        m = f"M{block.end}"
        shapes |= {f"weight{block.end}": f"({m}, {block.width})", f"values{block.end}": f"({m}, {block.columns})"}
        shapes |= {f"scale{block.end}": f"({m}, 1)", f"scale_max{block.end}": f"(P{block.end},)"}
    return KernelValues(
        family="weights/quantize_weights",
        spec=spec,
        launch=launch,
        title=f"{len(launch.blocks)} weights to {ROWWISE.description}",
        shapes=shapes,
    )


def grouped(quantizers: Iterable[NormForward]) -> list[list[int]]:
    """Positions of the quantizers that share a launch; a weight without company has a launch of its own."""
    places = [place for place, spec in enumerate(quantizers) if fits(spec)]
    groups = [places[start : start + MOST_WEIGHTS] for start in range(0, len(places), MOST_WEIGHTS)]
    return [group for group in groups if len(group) > 1]
