"""The frozen plan: for every GEMM its recipe, kernel and reason, and all bindings. No decisions are made after it."""

from __future__ import annotations

from enum import StrEnum
from math import hypot, isfinite
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, SkipValidation
from pydantic.dataclasses import dataclass

from loka.graph.ir import ForwardIR
from loka.graph.planned_model import PlannedModel
from loka.graph.sites.site import Opaque, Site
from loka.kernels.measurements.parts import PartKind, TimeSource
from loka.mods.adaptation import Adaptation, RewriteResult, Setting, Unchanged
from loka.numerics.enums import Accumulation, Gemm
from loka.numerics.recipe import OperandPair, Recipe
from loka.policy.communication import ExchangeSetting, Wire
from loka.policy.policy import ExecutionSpec
from loka.policy.settings import Assignment
from loka.probe.profile.profile import Interval, Verdict
from loka.probe.stats.site_stats import Finite

LITTLE = 0.02  # share of a site's time that is not worth a word, and that FP8 may cost it for its neighbours
NATIVE = "as-is"  # the kernel of a GEMM in the model's own dtype
NOTHING_AROUND = "no norm, activation or residual around it can be taken along"  # a region_note that is not a problem

MODEL = ConfigDict(extra="forbid", defer_build=True)  # of every part of a plan
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]  # of a measured step
_INFINITIES = {text: float(text) for text in ("inf", "-inf", "nan")}


def _read_interval(value: object) -> object:
    """The ends of an interval in a file: JSON has no infinity, which stands there as a text."""
    return {end: _INFINITIES.get(each, each) for end, each in value.items()} if isinstance(value, dict) else value


def _written_interval(value: Interval) -> dict[str, Any]:
    ends = {"mean": value.mean, "low": value.low, "high": value.high}
    return {end: each if isfinite(each) else str(each) for end, each in ends.items()}


AnyInterval = Annotated[Interval, BeforeValidator(_read_interval), PlainSerializer(_written_interval)]


@dataclass(frozen=True, slots=True, config=MODEL)
class Rejected:
    """A kernel that was rejected for a GEMM, and the reason."""

    kernel: str
    reason: str


@dataclass(frozen=True, slots=True, config=MODEL)
class Evidence:
    """Errors that the profile predicts for one GEMM with the requested recipe, and the verdict by its budget."""

    mere: AnyInterval  # floored (numerics.metrics)
    sqnr_db: AnyInterval
    draws: int  # sampled pairs of operands
    steps: int  # training steps of the profile
    samples: int  # number of these steps that were sampled
    verdict: Verdict
    figures: str  # those over or near the budget: "MERE 0.26 [0.25, 0.27] over the budget 0.2"; "" if safe
    ne_percent: AnyInterval | None = None  # the change of NE by this GEMM alone, in per cent; None if not measured


@dataclass(frozen=True, slots=True, config=MODEL)
class KernelTime:
    """Time of one GEMM on one kernel, without quantizing its operands, and its error relative to float64."""

    kernel: str
    us: Duration  # of one call, microseconds
    spread: Duration  # half the interquartile range, as a share of the time
    source: TimeSource
    mere: Finite | None = None  # as measured; None if it was not
    sqnr_db: Finite | None = None
    accumulation: Accumulation | None = None  # None for the model's own GEMM


@dataclass(frozen=True, slots=True, config=MODEL)
class StepTime:
    """Time of one call of a site in a training step, microseconds: its GEMMs and what a plan may change around them."""

    forward: Annotated[Duration, Field(gt=0)]
    backward: Duration
    source: TimeSource  # of its least certain part
    host_us: Duration | None = None  # of its launches, on the host; None where the policy says nothing of `execution`
    noise: Duration = 0.0  # half the interquartile range, while options are compared; a plan leaves it out

    @property
    def us(self) -> float:
        """Forward plus backward."""
        return self.forward + self.backward

    @property
    def extrapolated(self) -> bool:
        """True if any part of it was extrapolated beyond measured sizes."""
        return self.source is TimeSource.EXTRAPOLATED

    @property
    def rounded(self) -> StepTime:
        """Rounded to the nanosecond, as recorded in a plan."""
        host_us = None if self.host_us is None else round(self.host_us, 3)
        return StepTime(round(self.forward, 3), round(self.backward, 3), self.source, host_us)

    def ties_with(self, other: StepTime) -> bool:
        """True if the two cannot be distinguished: their difference is within the noise of both together."""
        return abs(self.us - other.us) <= hypot(self.noise, other.noise)


@dataclass(frozen=True, slots=True, config=MODEL)
class TimedOption:
    """One choice of kernels for all GEMMs of a site, and why it was taken or not."""

    kernels: tuple[str, ...]  # of each GEMM, in the order of `SitePlan.gemms`
    time: StepTime
    outcome: str
    mere: Finite | None = None  # the worst of its FP8 GEMMs, measured on normal operands; None if any is unknown
    sqnr_db: Finite | None = None
    fused: bool = False  # LoKA's kernels compute what is around the GEMMs; otherwise torch.compile does


@dataclass(frozen=True, slots=True, config=MODEL)
class SiteTiming:
    """Predicted times of one call of a site (`loka.plan.select.workload` lists what is counted)."""

    chosen: StepTime  # as planned
    without_fp8: StepTime  # with native GEMMs, fused or compiled as the policy leaves it
    as_is: StepTime  # the native model by torch.compile
    kept: bool = False  # less of it runs in FP8 than allowed, possibly nothing, because FP8 is not faster enough
    options: tuple[TimedOption, ...] = ()  # that were compared

    @property
    def speedup(self) -> float:
        """Speedup relative to the native model."""
        return self.as_is.us / self.chosen.us

    @property
    def by_fp8(self) -> float:
        """Speedup by FP8 itself: relative to native GEMMs with what LoKA fuses."""
        return self.without_fp8.us / self.chosen.us


@dataclass(frozen=True, slots=True, config=MODEL)
class GemmPlan:
    """Decision for one GEMM. `operands` and `accumulation` are None if it stays in the model's dtype."""

    gemm: Gemm
    kernel: str  # a name in `loka.kernels.gemm.catalogue`, "torch.scaled_mm"; NATIVE if it stays in the model's dtype
    operands: OperandPair | None
    accumulation: Accumulation | None
    reason: str  # "fp8 by policies/ranker.yaml:14", "kept: no evidence: run loka probe", ...
    rejected: tuple[Rejected, ...] = ()
    evidence: Evidence | None = None  # also for a GEMM that is kept: the error that FP8 would have
    times: tuple[KernelTime, ...] = ()  # of every measured kernel, including NATIVE
    m_buckets: tuple[tuple[int, str], ...] = ()  # (largest M, kernel), ascending, if M varies; larger M use the last

    @property
    def kernels(self) -> tuple[str, ...]:
        """All kernels that it may run on, starting with that of the planned batch size."""
        return tuple(dict.fromkeys((self.kernel, *(kernel for _, kernel in self.m_buckets))))

    @property
    def fp8(self) -> bool:
        """True if this GEMM runs in FP8."""
        return self.operands is not None

    @property
    def over_budget(self) -> bool:
        """True if this GEMM runs in FP8 although the evidence says that this is not safe."""
        return self.fp8 and self.evidence is not None and self.evidence.verdict is Verdict.UNSAFE


@dataclass(frozen=True, slots=True, config=MODEL)
class SitePlan:
    """Decision for one site. `gemms` are fprop, dgrad and wgrad, those that a training step needs (`Site.gemms`)."""

    site: Site
    # One object each for all sites that are decided alike: readers group them by identity.
    gemms: SkipValidation[tuple[GemmPlan, ...]]
    history: SkipValidation[dict[str, tuple[Assignment, ...]]]
    region: tuple[str, ...] = ()  # the operations of the region that is replaced around it, if any
    region_note: str = ""  # why its region is not replaced, or no longer, although the policy requests it, or ""
    timing: SiteTiming | None = None  # None if no measurement decided
    gains_by_fusing: bool = False  # `fuse: auto`, and by the measurements it is faster when fused with its neighbours

    @property
    def options(self) -> tuple[TimedOption, ...]:
        """The choices of kernels that were compared by their times."""
        return self.timing.options if self.timing is not None else ()

    @property
    def fp8(self) -> bool:
        """True if any of its GEMMs runs in FP8."""
        return any(gemm.fp8 for gemm in self.gemms)

    @property
    def recipe(self) -> Recipe:
        """The recipe of its GEMMs."""
        return Recipe.of({gemm.gemm: gemm.operands for gemm in self.gemms})

    @property
    def slowed_by_fp8(self) -> bool:
        """True if it is predicted slower in FP8 than with native GEMMs, by more than a little."""
        return self.fp8 and self.timing is not None and self.timing.by_fp8 * (1 + LITTLE) < 1


@dataclass(frozen=True, slots=True, config=MODEL)
class InteractionPlan:
    """An interaction that a mod computes in its own kernels."""

    work: PartKind  # the forward's kind: FM_INTERACTION, CONCAT_NORM or DOT
    owner: str  # the module whose forward contains it
    what: str  # description: "a mixing layer of 64 embeddings of 128, rank 32, 32 weighted sums"
    form: str  # of its gradients' part, in the words of `loka.kernels.measurements.interaction_forms`
    samples: int  # per call
    columns: int
    calls: int  # per training step
    sites: tuple[str, ...]  # whose GEMMs it computes
    chosen: StepTime | None = None  # one call with LoKA's kernels; None if no measurement decides
    as_is: StepTime | None = None  # one call with torch.compile; None if never measured

    @property
    def speedup(self) -> float | None:
        """Speedup relative to torch.compile; None where either time is unknown."""
        return self.as_is.us / self.chosen.us if self.chosen is not None and self.as_is is not None else None


class BindingKind(StrEnum):
    """Kind of a module's new forward."""

    LINEAR = "linear"  # a plain nn.Linear with its own forward
    FORWARD = "forward"  # a straight-line forward, with children inlined where a region contains them


@dataclass(frozen=True, slots=True, config=MODEL)
class PlannedBinding:
    """One generated class and the modules bound to it: same type, same shapes, same recipes."""

    name: str  # of the generated class, an identifier: "LayersFmb0"
    kind: BindingKind
    modules: tuple[str, ...]  # qualified names, in model order; "" is the model itself
    module_type: str  # "torch.nn.modules.linear.Linear"
    sites: tuple[tuple[str, ...], ...]  # for each module, the names of its sites, in the order of their calls
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # ("weight", (2048, 2048)), ...: checked by apply
    forward: ForwardIR | None = None  # for BindingKind.FORWARD, traced on the first module


@dataclass(frozen=True, slots=True, config=MODEL)
class Skipped:
    """A module whose forward could not be traced: `NOT PATCHED region 'tower': branch on ...`."""

    owner: str
    reason: str
    share: Finite  # of FLOPs that stay unpatched because of it


@dataclass(frozen=True, slots=True, config=MODEL)
class Gain:
    """Gain of one mod by the measurements: time of the model planned without it, less the time of this plan."""

    us: Finite  # of the sites in a training step; negative if the mod costs time
    share: Finite  # relative to the time without it


@dataclass(frozen=True, slots=True, config=MODEL)
class GatherPlan:
    """What FSDP2's all-gather of a weight carries (`communication.weights`)."""

    weight: str  # qualified name of the Parameter
    sites: tuple[str, ...]  # that read it
    wire: Wire
    reason: str  # "fp8 by policies/ranker.yaml:14", "its GEMMs stay in the model's dtype"
    nbytes: Annotated[int, Field(ge=0)]  # of the whole weight, scales counted, without padding for ranks
    nbytes_bf16: Annotated[int, Field(ge=0)]  # of the same in bfloat16


@dataclass(frozen=True, slots=True, config=MODEL)
class ModPlan:
    """Result of one entry of the policy's `mods`."""

    use: str
    source: str  # "mod 2: block_norm"
    place: str  # "ranker.yaml:14", with the file as in `Plan.policy_files`
    exact: bool  # the function stays the same, up to rounding; otherwise the model has to be retrained
    promise: str
    settings: tuple[tuple[str, Setting], ...] = ()
    adaptations: tuple[Adaptation, ...] = ()  # of the model's modules, before its sites are discovered
    rewritten: tuple[RewriteResult, ...] = ()  # in owners' forwards, which contain the sites
    unchanged: tuple[Unchanged, ...] = ()  # requested, and not changed
    note: str = ""  # the policy's note for the entry
    gain: Gain | None = None  # None if it was not requested, or measurements are missing


@dataclass(frozen=True, slots=True, config=MODEL)
class TunedStep:
    """The measured step that decided between candidate plans (`loka tune`). Times are of whole training steps."""

    file: str  # the record, relative to the policy's directory
    sha256: str  # of the record
    choice: str  # the winner, in words
    step_ms: Milliseconds
    bf16_ms: Milliseconds  # the model as it is, launched in the same way
    best_fp8_ms: Milliseconds | None  # the fastest candidate with FP8; None if none ran
    best_fp8_noise: Duration | None  # of its speed-up over BF16, as a share
    is_native: bool  # the winner is the model as it is
    execution: str  # how both were run, an `Execution`
    device: str  # "NVIDIA H200"
    date: str  # UTC, to the minute


@dataclass(frozen=True, slots=True, config=MODEL, kw_only=True)
class PlanHead:
    """A plan but for its sites."""

    name: str
    target: str
    batch_size: Annotated[int, Field(ge=1)]
    # (file as named, sha256 of its values but for `train`), the policy first and then its bases
    policy_files: tuple[tuple[str, str], ...]
    bindings: tuple[PlannedBinding, ...]
    model: PlannedModel | None = None  # its parts, with which `apply` compares those of a live one
    skipped: tuple[Skipped, ...] = ()
    loka_version: str = ""
    rule_notes: tuple[tuple[str, str], ...] = ()  # ("rule 2: layers.*.mlp.*", the rule's note)
    profile: tuple[str, str] | None = None  # (path relative to the policy's directory, sha256)
    measurements: tuple[str, str] | None = None  # (name of the set, sha256)
    mods: tuple[ModPlan, ...] = ()  # in the policy's order
    interactions: tuple[InteractionPlan, ...] = ()  # computed in their own kernels
    execution: ExecutionSpec | None = None  # as the policy says; None: the host was not considered
    ne_budget: Finite | None = None  # the policy's budget.ne_percent, in per cent; None: no limit
    tuned: TunedStep | None = None  # the measured step that confirms it; None: predicted times decided
    opaque: tuple[Opaque, ...] = ()  # products that are no sites, which count in all shares
    gathers: tuple[GatherPlan, ...] = ()  # of the weights of all sites; () where the policy says nothing of them
    exchange: ExchangeSetting | None = None  # what TorchRec's ranks send each other; None: as TorchRec has it

    @property
    def adaptations(self) -> tuple[Adaptation, ...]:
        """Adaptations of modules before sites are discovered, in order."""
        return tuple(adaptation for mod in self.mods for adaptation in mod.adaptations)


@dataclass(frozen=True, slots=True, config=MODEL, kw_only=True)
class Plan(PlanHead):
    """Complete input of code generation. Serialises to the same bytes on every machine (`loka.plan.serialize`)."""

    sites: tuple[SitePlan, ...]  # in model order

    @property
    def called(self) -> tuple[SitePlan, ...]:
        """The sites that are GEMMs of the model: the others are linears that no forward calls."""
        return tuple(plan for plan in self.sites if plan.site.called)

    @property
    def share_fp8(self) -> float:
        """Share of the model's training GEMM FLOPs (three GEMMs, each counted where it exists) that run in FP8."""
        total, fp8 = self.opaque_gemms, 0.0
        for plan in self.sites:
            for gemm in plan.gemms:
                total += plan.site.share
                fp8 += plan.site.share * gemm.fp8
        return fp8 / total if total else 0.0

    @property
    def opaque_gemms(self) -> float:
        """FLOPs of opaque products in a training step, in the unit of shares: three products for each, as for sites."""
        return 3 * sum(each.share for each in self.opaque)
