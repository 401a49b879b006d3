"""What LoKA knows of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loka.devices.launches import LaunchTables


@dataclass(frozen=True, slots=True)
class ScaledMMLimits:
    """What `torch.nn.functional.scaled_mm` takes on a device; scalings by their names in policies."""

    pairs: frozenset[tuple[str, str]]  # scalings of the two operands
    precise_e4m3: frozenset[str]  # scalings that take e4m3 operands only, and have no fast accumulation
    alignment: int = 16  # of the contraction and of the result's columns, elements
    row_alignment: Mapping[str, int] = field(default_factory=dict)  # of the first operand's rows, by its scaling

    def row_multiple(self, scaling: str) -> int:
        """What the first operand's rows must be a multiple of."""
        return self.row_alignment.get(scaling, 1)


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One target device. Rates are what was measured on `measured_on`, not what its makers promise."""

    name: str  # as policies name it: "h100"
    architecture: str  # "Hopper"
    capability: tuple[int, int]  # compute capability
    multiprocessors: int
    shared_bytes: int  # of shared memory that a block can have
    l2_bytes: int
    measured_on: str  # the device's name as CUDA has it; "" where the rates are those of a device that is like it
    bandwidth: float  # bytes a second that a copy of 1 GiB reads and writes
    interaction_bandwidth: float  # bytes a second that kernels of mixing layers and joins read and write
    flops: Mapping[str, float]  # a second, by the operands' dtype; "e4m3 fast" with fast accumulation
    scaled_mm: ScaledMMLimits
    launches: LaunchTables
    is_reference: bool = False  # nothing need run on a GPU: the reference path takes every recipe
