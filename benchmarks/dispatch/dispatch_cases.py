"""Regions of the Dispatch study, and the plans that are compared on each.

A region is LayerNorm -> Linear without bias -> LayerNorm -> sigmoid, forward and backward. Plans are made as for users,
from a policy with `compute: auto` and from measurements; since only speed is compared, FP8 is assumed to be safe, and
`min_speedup` is 1. Every plan keeps a GEMM in BF16 if the measurements say that FP8 is slower:

- `fused-bf16`: no GEMM in FP8;
- `torchao-RECIPE`: torchao's Float8Linear for the whole linear, under torch.compile; if it is slower, BF16 counts;
- `LIBRARY-ACCUMULATION`: only one library and one accumulation;
- `dispatch`: the fastest of all of these, with the accumulation and the library selected for each GEMM.

The recipe is that of generated chains: rowwise with power-of-two scales, transposed copies for the GEMMs that contract
over the other dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.packages import StudyWorkshop
from benchmarks.region.region import Form, Shape, subject
from loka.bench.record.gemm_parts import FBGEMM, NATIVE, SCALED_MM
from loka.kernels.fused.kernel_values import LARGEST_WIDTH
from loka.kernels.gemm.catalogue import gemm_sizes
from loka.kernels.measurements.lookup import Measurements
from loka.kernels.measurements.parts import Part, PartCosts, PartKind, PartTime
from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Accumulation, Gemm
from loka.plan.decide import Situation
from loka.plan.examine import Examined, assumed_safe, examine
from loka.plan.plan import Plan, SitePlan
from loka.plan.plan_of import plan_of
from loka.plan.resolve import resolve

SHAPES = tuple(
    Shape(m, n, k)
    for m, k, n in (
        (2048, 256, 768), (2048, 512, 512), (2048, 512, 3456), (2048, 3456, 512), (2048, 1024, 1024),
        (2048, 2048, 2048), (2048, 4096, 4096), (2048, 8192, 1024), (2048, 16384, 1024), (2048, 123200, 1024),
        (4096, 512, 512), (4096, 1024, 2048), (4096, 2048, 2048), (4096, 4096, 1024), (4096, 8192, 2048),
        (8192, 512, 512), (8192, 1024, 1024), (8192, 3456, 512), (8192, 512, 3456), (8192, 2048, 2048),
        (8192, 4096, 4096), (16384, 512, 512), (16384, 1024, 1024), (16384, 2048, 512), (16384, 2048, 2048),
        (32768, 512, 512), (32768, 1024, 1024),
    )
)  # fmt: skip
COMPILED, FUSED, DISPATCH = "bf16", "fused-bf16", "dispatch"
TORCHAO = {
    "torchao-tensorwise": "tensorwise",
    "torchao-rowwise": "rowwise",
}  # under torch.compile; measured only if requested
LIBRARIES = {"cublas": SCALED_MM, "fbgemm": FBGEMM, "mslk": "mslk.rowwise"}
HOWS = (Accumulation.PRECISE, Accumulation.FAST)
SINGLES = tuple(f"{library}-{how.value}" for library in LIBRARIES for how in HOWS)
GEMMS = tuple(Gemm)
FOREVER = 1e9  # microseconds

POLICY = """\
version: 1
name: {name}
model: {{factory: "{factory}", inputs: "{inputs}", batch_size: {batch}}}
defaults:
  compute: auto
  scaling: rowwise
  power_of_two: true
  requantize_transpose: true
  fuse: always
  budget: {{min_speedup: 1.0}}
  fprop: {{accumulation: {fprop}}}
  dgrad: {{accumulation: {dgrad}}}
  wgrad: {{accumulation: {wgrad}}}
"""


class Only(PartCosts):
    """Measurements in which GEMMs take FOREVER except on some kernels and natively."""

    def __init__(self, costs: Measurements, kernels: frozenset[str]) -> None:
        """`kernels`: names in the catalogue."""
        self.name, self.sha256 = costs.name, costs.sha256
        self._costs, self._kernels = costs, kernels

    def time(self, part: Part) -> PartTime | None:
        """The measured time, or FOREVER for a GEMM on another kernel."""
        timed = self._costs.time(part)
        if timed is not None and part.work is PartKind.GEMM and part.kernel not in (*self._kernels, NATIVE):
            return replace(timed, us=FOREVER)
        return timed


Accumulations = Mapping[Gemm, Accumulation]


@dataclass(frozen=True, slots=True)
class DecidedRegion:
    """Decisions for a region before its forward is traced, which takes most of the planning time."""

    examined: Examined
    costs: Only
    sites: tuple[SitePlan, ...]

    @property
    def runs(self) -> str:
        """Its GEMMs in words; equal decisions share a package."""
        return format_gemm(self.sites)

    @property
    def predicted_us(self) -> float:
        """Predicted microseconds of a step; infinite if unknown."""
        return sum(site.timing.chosen.us if site.timing is not None else float("inf") for site in self.sites)

    def plan(self) -> Plan:
        """The plan, as made by `loka plan`."""
        return plan_of(self.examined, assumed_safe(self.examined), self.costs)


def recorded_variants(costs: Measurements) -> tuple[str, ...]:
    """The variants that these measurements cover: single libraries only if they were measured."""
    known = {part.kernel for part in costs.parts if part.work is PartKind.GEMM}
    singles = (name for name in SINGLES if LIBRARIES[name.partition("-")[0]] in known)
    return (COMPILED, *TORCHAO, FUSED, *singles, DISPATCH)


def decisions(shape: Shape, workshop: StudyWorkshop, costs: Measurements) -> dict[str, DecidedRegion]:
    """The decisions of each planned variant on a region. Raises InputError if planning fails."""
    examined = {how: examined_region(shape, workshop, dict.fromkeys(GEMMS, how), how.value) for how in HOWS}
    known = {part.kernel for part in costs.parts if part.work is PartKind.GEMM}
    found = {FUSED: _decided(examined[Accumulation.PRECISE], costs, frozenset())}
    for library, kernel in LIBRARIES.items():
        if kernel in known:
            for how in HOWS:
                found[f"{library}-{how.value}"] = _decided(examined[how], costs, frozenset({kernel}))
    kernels = frozenset(LIBRARIES.values()) & known
    mixed = examined_region(shape, workshop, fastest(shape, costs, kernels), "mixed")
    # Ties are broken by this order: single libraries with precise accumulation come early.
    candidates = [*found.values(), _decided(mixed, costs, kernels)]
    candidates += [_decided(examined[how], costs, kernels) for how in HOWS]
    found[DISPATCH] = min(candidates, key=lambda each: each.predicted_us)
    return found


def fastest(shape: Shape, costs: Measurements, kernels: frozenset[str]) -> Accumulations:
    """The accumulation of the fastest kernel for each GEMM; precise if none was measured."""
    found = {}
    for gemm in GEMMS:
        scalings = ("tensorwise", "rowwise") if gemm is Gemm.WGRAD else ("rowwise",)  # one scale suits both
        times = {
            how: min(
                _fastest(shape, gemm, f"e4m3 {each}, e4m3 {each}, {how.value}", costs, kernels) for each in scalings
            )
            for how in HOWS
        }
        found[gemm] = min(times, key=lambda how: times[how])
    return found


def _fastest(shape: Shape, gemm: Gemm, recipe: str, costs: Measurements, kernels: frozenset[str]) -> float:
    times = (costs.time(gemm_part(shape, gemm, kernel, recipe)) for kernel in sorted(kernels))
    return min((timed.us for timed in times if timed is not None), default=float("inf"))


def gemm_part(shape: Shape, gemm: Gemm, kernel: str, recipe: str = "") -> Part:
    """The part of one of a region's GEMMs on a kernel."""
    sizes = gemm_sizes(gemm, shape.m, shape.k, shape.n)
    return Part(PartKind.GEMM, kernel, sizes.rows, sizes.columns, sizes.contraction, recipe=recipe)


def examined_region(shape: Shape, workshop: StudyWorkshop, accumulations: Accumulations, label: str) -> Examined:
    """Examine the region's model and sites under the policy with these accumulations."""
    region = subject(Form.LAYER_NORM, shape)
    factory, inputs = workshop.add(region)
    name = f"dispatch_{region.name}_{label}"
    hows = {gemm.value: how.value for gemm, how in accumulations.items()}
    text = POLICY.format(name=name, factory=factory, inputs=inputs, batch=shape.m, **hows)
    return examine(load_policy(str(workshop.write(f"{name}.yaml", text))))


def _decided(examined: Examined, costs: Measurements, kernels: frozenset[str]) -> DecidedRegion:
    only, policy = Only(costs, kernels), examined.policy
    known = assumed_safe(examined)
    situation = Situation(policy.target, policy.model.batch_size, known=known, costs=only)
    return DecidedRegion(examined, only, resolve(examined.sites, examined.settings, situation, {}))


def format_gemm(sites: Sequence[SitePlan]) -> str:
    """The GEMMs of sites in words: kernel, scaling and accumulation of each."""
    words = []
    for site in sites:
        for gemm in site.gemms:
            scaling = gemm.operands[0].scaling.value if gemm.operands is not None else ""
            how = gemm.accumulation.value if gemm.accumulation is not None else ""
            words.append(" ".join(filter(None, (gemm.gemm.value, gemm.kernel, scaling, how))))
    return ", ".join(words)


def is_rendered(plan: Plan) -> bool:
    """True if generated kernels run all of a region's plan, so that torch.compile has nothing to fuse."""
    return all(
        bool(site.region)
        and max(site.site.k, site.site.n) <= LARGEST_WIDTH
        and len({gemm.fp8 for gemm in site.gemms}) == 1
        for site in plan.sites
    )
