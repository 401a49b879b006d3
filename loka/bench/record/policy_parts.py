"""The parts that a policy's sites need: all that planning would look up if every GEMM were safe in FP8."""

from __future__ import annotations

import os

from loka.kernels.measurements.parts import Part, PartTime, TimeSource
from loka.mods.policy_loader import load_policy
from loka.plan.examine import assumed_safe, examine
from loka.plan.plan_of import plan_of


class RequestedParts:
    """Part costs that record each requested part and answer one microsecond."""

    def __init__(self) -> None:
        """Start without requests."""
        self.name, self.sha256 = "requested", ""
        self._parts: dict[Part, None] = {}

    def time(self, part: Part) -> PartTime | None:
        """Record the part; always one microsecond."""
        self._parts[part] = None
        return PartTime(1.0, 0.0, TimeSource.MEASURED)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The requested parts, in the order of the first requests."""
        return tuple(self._parts)


def parts_of_policy(path: str | os.PathLike[str]) -> tuple[Part, ...]:
    """The parts of every execution option of a policy's sites, at its batch size; any profile is ignored.

    Raises the InputErrors of planning.
    """
    examined = examine(load_policy(os.fspath(path)))
    requested = RequestedParts()
    plan_of(examined, assumed_safe(examined), requested)
    return requested.parts
