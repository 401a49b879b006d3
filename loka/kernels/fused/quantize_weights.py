"""The kernel that quantizes several weights in one launch: its spec, launch and template values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loka.errors import InputError
from loka.kernels.fused.kernel_values import LARGEST_HELD
from loka.kernels.fused.matrix_kernels import numbered
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
        """The operator's name."""
        return "quantize_weights"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        return numbered(("weight",), len(self.quantizers))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return numbered(ROWWISE.results, len(self.quantizers))


def fits(spec: NormForward) -> bool:
    """True if a weight that `spec` quantizes can share a launch with others."""
    plain = NormForward(spec.width, None, False, False, spec.eps, None, False, True, spec.save, aligned=spec.aligned)
    return spec == plain and spec.columns <= LARGEST_HELD


def grouped(quantizers: Iterable[NormForward]) -> list[list[int]]:
    """Positions of the quantizers that share a launch; a weight without company has a launch of its own."""
    places = [place for place, spec in enumerate(quantizers) if fits(spec)]
    groups = [places[start : start + MOST_WEIGHTS] for start in range(0, len(places), MOST_WEIGHTS)]
    return [group for group in groups if len(group) > 1]
