"""Host time of a site's launches, for steps that are not replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loka.devices.spec import Execution, HostCosts
from loka.kernels.measurements.parts import Part, PartKind


@dataclass(frozen=True, slots=True)
class HostModel:
    """Prices launches by how the model runs."""

    costs: HostCosts
    execution: Execution

    def us(self, gemms: int, parts: Iterable[Part], generated: bool) -> float:
        """Host time of a site's GEMMs and of the parts around them in one step, microseconds.

        `generated`: by a generated class with FP8 GEMMs; otherwise by the model's own operations. The transposed copies
        of a site are one launch.
        """
        works = [part.work for part in parts]
        copies = works.count(PartKind.REQUANTIZE_TRANSPOSE)
        launches = gemms + len(works) - max(0, copies - 1)
        return launches * (self.costs.generated if generated else self.costs.torch)[self.execution]
