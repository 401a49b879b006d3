"""The frozen decision: for every GEMM what it runs in and why, and what is bound where. Nothing is decided after it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka.devices.targets import TargetDevice
from loka.graph.ir import ForwardIR
from loka.kernels.measurements.parts import PartKind, TimeSource
from loka.mods.adaptation import Adaptation, RewriteResult, Setting, Unchanged
from loka.numerics.enums import Accumulation, Gemm
from loka.numerics.recipe import OperandPair, Recipe
from loka.policy.cascade.settings import Assignment
from loka.probe.profile.profile import Interval, Verdict
from loka.sites.site import Site

NATIVE = "as-is"  # the kernel of a GEMM that stays as the model has it
NOTHING_AROUND = "no norm, activation or residual around it can be taken along"  # a region_note that is no refusal


@dataclass(frozen=True, slots=True)
class Rejected:
    """A kernel that was turned down for a GEMM, and why."""

    kernel: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the profile predicts of one GEMM under the recipe that the policy asks for, and what its budget says."""

    mere: Interval  # floored (numerics.metrics)
    sqnr_db: Interval
    draws: int  # sampled pairs of operands
    steps: int  # training steps of the profile
    samples: int  # of these steps, those that were sampled
    verdict: Verdict
    figures: str  # those over or about the budget: "MERE 0.26 [0.25, 0.27] over the budget 0.2"; "" where it is safe


@dataclass(frozen=True, slots=True)
class KernelTime:
    """What one GEMM takes on one kernel, its operands being there, and how far it is from the product in float64."""

    kernel: str
    us: float  # of one call
    spread: float  # half of the distance between the quartiles, as a share of the time
    source: TimeSource
    mere: float | None = None  # as measured; None where the measurements do not say
    sqnr_db: float | None = None
    accumulation: Accumulation | None = None  # None of the model's own


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one call of a site in a training step, microseconds: its GEMMs and what a plan may change around."""

    forward: float
    backward: float
    source: TimeSource  # that of its least certain part

    @property
    def us(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True, slots=True)
class SiteTiming:
    """What the decision for a site gains by the measurements (`loka.plan.select.workload` says what is counted)."""

    chosen: StepTime
    as_is: StepTime
    kept: bool = False  # it stays as it is, or less of it runs in FP8 than may, because that is not faster enough

    @property
    def speedup(self) -> float:
        """Over the model as it is."""
        return self.as_is.us / self.chosen.us


@dataclass(frozen=True, slots=True)
class Candidate:
    """One execution option of all GEMMs of a site, and why it is the chosen one, or is not."""

    kernels: tuple[str, ...]  # of each GEMM, in the order of `SitePlan.gemms`
    time: StepTime
    outcome: str
    mere: float | None = None  # the worst of its GEMMs in FP8, as measured on normal operands; None where one is not
    sqnr_db: float | None = None


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """One GEMM's decision. `operands` and `accumulation` are None where it stays as the model has it."""

    gemm: Gemm
    kernel: str  # a name of `loka.kernels.gemm.catalogue`, "torch.scaled_mm"; NATIVE where it stays
    operands: OperandPair | None
    accumulation: Accumulation | None
    reason: str  # "fp8 by policies/ranker.yaml:14", "kept: no evidence: run loka probe", ...
    rejected: tuple[Rejected, ...] = ()
    evidence: Evidence | None = None  # also of a GEMM that is kept: what FP8 would cost
    times: tuple[KernelTime, ...] = ()  # of every kernel that was measured, NATIVE among them
    m_buckets: tuple[tuple[int, str], ...] = ()  # (largest M, kernel), ascending, where M varies; above all, the last

    @property
    def kernels(self) -> tuple[str, ...]:
        """Every kernel that it may run on, the planned batch size's first."""
        return tuple(dict.fromkeys((self.kernel, *(kernel for _, kernel in self.m_buckets))))

    @property
    def fp8(self) -> bool:
        """Whether this GEMM runs in FP8."""
        return self.operands is not None

    @property
    def over_budget(self) -> bool:
        """Whether this GEMM runs in FP8 although the evidence says that this is not safe."""
        return self.fp8 and self.evidence is not None and self.evidence.verdict is Verdict.UNSAFE


@dataclass(frozen=True, slots=True)
class SitePlan:
    """One site's decision. `gemms` holds fprop, dgrad (left out where the input needs no gradient) and wgrad."""

    site: Site
    gemms: tuple[GemmPlan, ...]
    history: dict[str, tuple[Assignment, ...]]
    region: tuple[str, ...] = ()  # the operations of the region that is replaced around it, if one is
    region_note: str = ""  # why its region is not replaced although the policy asks, or ""
    timing: SiteTiming | None = None  # None where no measurement decided
    candidates: tuple[Candidate, ...] = ()  # the execution options that were compared
    gains_by_fusing: bool = False  # `fuse: auto`, and the measurements say that it is faster with its neighbours

    @property
    def fp8(self) -> bool:
        """Whether any of its GEMMs runs in FP8."""
        return any(gemm.fp8 for gemm in self.gemms)

    @property
    def recipe(self) -> Recipe:
        """What its GEMMs run in."""
        return Recipe.of({gemm.gemm: gemm.operands for gemm in self.gemms})


@dataclass(frozen=True, slots=True)
class InteractionPlan:
    """An interaction that kernels of its own compute, where a mod asks for that."""

    work: PartKind  # MIX, JOIN or CROSS
    owner: str  # the module whose forward writes it
    what: str  # for people: "a mixing layer of 64 embeddings of 128, rank 32, 32 weighted sums"
    form: str  # of its gradients' part, in the words of `loka.kernels.measurements.interaction_forms`
    samples: int  # of one call: of a cross layer, rows
    columns: int
    calls: int  # in a training step
    sites: tuple[str, ...]  # that a mixing layer takes along; of a cross layer the GEMM before it
    chosen: StepTime | None = None  # one call by our kernels; None where no measurement decides
    as_is: StepTime | None = None  # one call by torch.compile; None where that was never measured

    @property
    def takes(self) -> tuple[str, ...]:
        """The sites whose GEMMs it computes."""
        return self.sites if self.work is PartKind.FM_INTERACTION else ()

    @property
    def speedup(self) -> float | None:
        """Over torch.compile; None where either time is not known."""
        return self.as_is.us / self.chosen.us if self.chosen is not None and self.as_is is not None else None


class BindingKind(StrEnum):
    """How a module gets its new forward."""

    LINEAR = "linear"  # a plain nn.Linear: its own forward
    FORWARD = "forward"  # a straight-line forward, with children inlined where a region crosses them


@dataclass(frozen=True, slots=True)
class PlannedBinding:
    """One generated class and the modules that become it: same type, same shapes, same recipes."""

    name: str  # of the generated class, an identifier: "LayersFmb0"
    kind: BindingKind
    modules: tuple[str, ...]  # qualified names, in model order; "" is the model itself
    module_type: str  # "torch.nn.modules.linear.Linear"
    sites: tuple[tuple[str, ...], ...]  # for each module, the names of its sites, in the order of their calls
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # ("weight", (2048, 2048)), ...: what apply checks
    forward: ForwardIR | None = None  # for BindingKind.FORWARD, traced on the first module


@dataclass(frozen=True, slots=True)
class Skipped:
    """A module whose straight-line forward was refused: `NOT PATCHED region 'tower': branch on ...`."""

    owner: str
    reason: str
    share: float  # of FLOPs that stay unpatched by it


@dataclass(frozen=True, slots=True)
class Gain:
    """What one mod gains by the measurements: the model planned without it, less the model as it is planned."""

    us: float  # of the sites in a training step; negative where the mod costs
    share: float  # of the time without it


@dataclass(frozen=True, slots=True)
class ModPlan:
    """What one entry of the policy's `mods` does."""

    use: str
    source: str  # "mod 2: block_norm"
    place: str  # "ranker.yaml:14", the file as `Plan.policy_files` has it
    exact: bool  # the function stays the same, up to rounding; else the model has to be trained anew
    promise: str
    settings: tuple[tuple[str, Setting], ...] = ()
    adaptations: tuple[Adaptation, ...] = ()  # of the model's modules, before its sites are found
    rewritten: tuple[RewriteResult, ...] = ()  # of owners' forwards, in which the sites stand
    unchanged: tuple[Unchanged, ...] = ()  # what it was asked for and leaves as it is
    note: str = ""  # why it is there, as the policy says
    gain: Gain | None = None  # None where it was not asked for, or measurements do not say


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that code generation needs. Serialises to the same bytes on every machine (`loka.plan.serialize`)."""

    name: str
    target: TargetDevice
    batch_size: int
    policy_files: tuple[tuple[str, str], ...]  # (file as named, sha256), the policy first and then what it extends
    sites: tuple[SitePlan, ...]  # in model order
    bindings: tuple[PlannedBinding, ...]
    skipped: tuple[Skipped, ...] = ()
    loka_version: str = ""
    rule_notes: tuple[tuple[str, str], ...] = ()  # ("rule 2: layers.*.mlp.*", why the rule is there)
    profile: tuple[str, str] | None = None  # (file from the policy's directory, sha256)
    measurements: tuple[str, str] | None = None  # (the set's name, sha256)
    mods: tuple[ModPlan, ...] = ()  # as the policy has them
    interactions: tuple[InteractionPlan, ...] = ()  # that kernels of their own compute

    @property
    def adaptations(self) -> tuple[Adaptation, ...]:
        """What mods change in the model before its sites are found, in order."""
        return tuple(adaptation for mod in self.mods for adaptation in mod.adaptations)

    @property
    def share_fp8(self) -> float:
        """Share of the model's training GEMM FLOPs (three GEMMs, each counted where it exists) that run in FP8."""
        total = fp8 = 0.0
        for plan in self.sites:
            for gemm in plan.gemms:
                total += plan.site.share
                fp8 += plan.site.share * gemm.fp8
        return fp8 / total if total else 0.0
