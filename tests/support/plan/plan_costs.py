"""Made-up measurements: bounds from bytes and FLOPs, by a factor for each kernel; and kernels that take anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loka.kernels.measurements.lookup import Measurement, Recording, Versions
from loka.kernels.measurements.part_bounds import bound_us
from loka.kernels.measurements.parts import Part, PartKind, PartTime, TimeSource
from loka.numerics.enums import Gemm, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.plan import NATIVE
from loka.probe.profile.profile import Estimate, Interval

SCALED_MM = "torch.scaled_mm"
HOPPER = Versions("NVIDIA H100 80GB HBM3", "9.0", "575.57.08", "13.0", "13.0.2", "2.11.0", "3.6.0", "")
ROWS = OperandRecipe(power_of_two=True)
TRANSPOSED = OperandRecipe(power_of_two=True, transposed=True)
TRANSPOSED_TENSORWISE = OperandRecipe(scaling=Scaling.TENSORWISE, power_of_two=True, transposed=True)
CHAIN = {
    Gemm.FPROP: (ROWS, ROWS),
    Gemm.DGRAD: (ROWS, TRANSPOSED),
    Gemm.WGRAD: (TRANSPOSED_TENSORWISE, TRANSPOSED_TENSORWISE),
}
SAFE_CHAIN = tuple(Estimate(gemm, CHAIN[gemm], Interval(0.02, 0.02, 0.02), Interval(30, 29, 31), 16) for gemm in Gemm)

Factor = Callable[[Part], float | None]


@dataclass
class MadeUp:
    """Costs: each part takes its bound times a factor; a kernel that is not in `kernels` was never measured."""

    kernels: Mapping[str, float] = field(default_factory=lambda: {NATIVE: 1.0, SCALED_MM: 1.0})
    factor: Factor = lambda part: 1.0  # None: never measured
    spread: float = 0.0
    source: TimeSource = TimeSource.MEASURED
    wrong: Mapping[str, str] = field(default_factory=dict)  # kernel -> why its numbers were refused
    fast_error: tuple[float, float] | None = (0.12, 31.4)  # of GEMMs with fast accumulation
    scale: float = 1.0
    name: str = "made-up.jsonl"
    sha256: str = "c" * 64
    asked: int = 0

    def time(self, part: Part) -> PartTime | None:
        self.asked += 1
        factor = self.factor(part)
        if factor is None or (part.work is PartKind.GEMM and part.kernel not in self.kernels):
            return None
        if part.work is PartKind.GEMM:
            factor *= self.kernels[part.kernel]
        return PartTime(self.scale * factor * bound_us(part), self.spread, self.source)

    def error(self, part: Part) -> tuple[float, float] | None:
        if part.recipe.endswith("fast"):
            return self.fast_error
        return (0.12, 31.5) if part.recipe else None

    def wrong_reason(self, part: Part) -> str:
        return self.wrong.get(part.kernel, "")


@dataclass(frozen=True)
class AnyGemm:
    """A kernel that takes every GEMM, or refuses every one."""

    name: str
    refusal: str | None = None

    def unsupported_reason(self, wanted: object) -> str | None:
        return self.refusal


class Remembering(MadeUp):
    """Costs that remember what was asked."""

    def __init__(self, **changes: object) -> None:
        super().__init__(**changes)
        self.parts: dict[Part, None] = {}

    def time(self, part: Part) -> PartTime | None:
        self.parts[part] = None
        return super().time(part)

    def record(self, path: Path, machine: Versions = HOPPER) -> None:
        """Write down the time of every part that was asked for, as if it had been measured."""
        with Recording(path, machine) as recording:
            for part in list(self.parts):
                timed = self.time(part)
                if timed is not None:
                    error = self.error(part) if part.work is PartKind.GEMM else None
                    recording.add(Measurement(part, timed.us, 0.005, 20, *(error or (None, None))))
