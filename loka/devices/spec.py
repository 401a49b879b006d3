"""Specification of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loka.devices.host_costs import HostCosts
from loka.devices.launches import LaunchTables


@dataclass(frozen=True, slots=True)
class ScaledMMLimits:
    """Limits of `torch.nn.functional.scaled_mm` on a device; scalings by their names in policies."""

    pairs: frozenset[tuple[str, str]]  # scalings of the two operands
    precise_e4m3: frozenset[str]  # scalings with e4m3 operands only, and without fast accumulation
    alignment: int = 16  # of the contraction and of the result's columns, in elements
    row_alignment: Mapping[str, int] = field(default_factory=dict)  # scaling -> alignment of the first operand's rows

    def row_multiple(self, scaling: str) -> int:
        """The number that the first operand's rows must be a multiple of."""
        return self.row_alignment.get(scaling, 1)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One target device. Rates were measured on `measured_on`; they are not data-sheet values."""

    name: str  # in policies: "h100"
    architecture: str  # "Hopper"
    capability: tuple[int, int]  # compute capability
    multiprocessors: int
    shared_bytes: int  # most shared memory of a block
    l2_bytes: int
    measured_on: str  # CUDA's name of the device; "" if the rates are those of a similar device
    bandwidth: float  # bytes a second, read plus written, of a copy of 1 GiB
    interaction_bandwidth: float  # the same of kernels of FM interactions and concat norms
    flops: Mapping[str, float]  # per second, by dtype of the operands; "e4m3 fast" with fast accumulation
    scaled_mm: ScaledMMLimits
    launches: LaunchTables
    host: HostCosts
    is_reference: bool = False  # plans use the reference path, which runs every recipe without a GPU
