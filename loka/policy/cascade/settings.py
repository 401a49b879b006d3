"""What a policy says about one site, once its cascade of rules has been applied: frozen, complete, with provenance."""

from __future__ import annotations

from dataclasses import dataclass, field

from loka.numerics.enums import Accumulation, Compute, Format, Fuse, Gemm, Operand, Range, Scaling

ANY_KERNEL = "auto"  # what `kernel` says where measurements are to decide

TRANSPOSED_FROM: dict[tuple[Gemm, Operand], tuple[Gemm, Operand]] = {
    (Gemm.DGRAD, Operand.WEIGHT): (Gemm.FPROP, Operand.WEIGHT),
    (Gemm.WGRAD, Operand.GRAD_OUTPUT): (Gemm.DGRAD, Operand.GRAD_OUTPUT),
    (Gemm.WGRAD, Operand.INPUT): (Gemm.FPROP, Operand.INPUT),
}  # the operands that are read along their other dimension, and where the same matrix is read along its rows


@dataclass(frozen=True, slots=True)
class OperandRecipe:
    """How one operand of one GEMM becomes FP8.

    A transposed operand (`requantize_transpose`) is the transposed copy of what another GEMM of its site reads: wgrad's
    grad_output of dgrad's, wgrad's input of fprop's input, dgrad's weight of fprop's weight (TRANSPOSED_FROM). Its
    source is quantised rowwise with power-of-two scales; it takes over the source's format, and all of it has one
    scale, the largest of the source's. That fits a GEMM as a tensorwise scale or, repeated, as a rowwise one:
    `scaling` says which its GEMM takes, tensorwise where both operands are transposed and rowwise beside a rowwise one.
    `range` is dynamic and `power_of_two` true by definition.
    """

    format: Format = Format.E4M3
    scaling: Scaling = Scaling.ROWWISE
    range: Range = Range.DYNAMIC
    amax: float | None = None  # the known maximum of |x|, for Range.STATIC
    power_of_two: bool = False  # round the scale up to a power of two, so that scaling is exact
    transposed: bool = False  # made from the FP8 copy that another GEMM of the site reads


@dataclass(frozen=True, slots=True)
class GemmSettings:
    """What a policy asks of one GEMM of a site. `operands` are in the order of `names.OPERANDS[gemm]`."""

    compute: Compute
    operands: tuple[OperandRecipe, OperandRecipe]
    accumulation: Accumulation = Accumulation.PRECISE
    padding: bool = True  # zero-pad sizes that the kernel cannot take
    kernel: str = ANY_KERNEL  # a name of `loka.kernels.gemm.catalogue`, or whichever is fastest
    may_be_fast: bool = (
        False  # `accumulation: auto`: precise, or fast where measurements say that it gains and errs alike
    )


@dataclass(frozen=True, slots=True)
class Budget:
    """The error and the gain that a GEMM must keep to run in FP8 under `compute: auto`."""

    mere: float = 0.2  # mean element-wise relative error, floored (numerics.metrics)
    sqnr_db: float = 24.0  # signal to quantisation noise, dB
    min_speedup: float = 1.05  # over the model as it is


@dataclass(frozen=True, slots=True)
class Assignment:
    """One field that one rule set: `fprop.input.format = e4m3 (policies/ranker.yaml:14, rule 2)`."""

    path: str  # "compute", "budget.mere", "fprop.compute", "dgrad.grad_output.format", ...
    value: str  # as written
    source: str  # "defaults", or "rule 2: layers.*.mlp.*"
    file: str  # as the user named it
    line: int  # 1-based; 0 where the value is built in
    names_one_site: bool = False  # the rule's pattern names exactly one site: then being unable is an error


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """The outcome of the cascade for one site.

    `history[path]` lists every assignment of a field in order; the last one holds, those before it were overridden.
    """

    gemms: dict[Gemm, GemmSettings]
    budget: Budget = Budget()
    fuse: Fuse = Fuse.AUTO
    history: dict[str, tuple[Assignment, ...]] = field(default_factory=dict)

    def compute_set_by(self, gemm: Gemm) -> Assignment | None:
        """The assignment that set a GEMM's `compute`: the GEMM's own or the site-wide one, whichever holds."""
        value = self.gemms[gemm].compute.value
        for path in (f"{gemm.value}.compute", "compute"):
            assignments = self.history.get(path)
            if assignments and assignments[-1].value == value:
                return assignments[-1]
        return None


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """What a rule's `match` may ask about a site. `loka.sites.Site` provides it; the policy room needs no more.

    Shapes are those of y = x @ weight.T: x is M x K, weight is N x K; `m` is at the policy's batch size.
    """

    name: str
    kind: str  # linear | functional_linear | matmul | addmm | einsum | bmm | attention
    m: int
    k: int
    n: int
    share: float  # of the model's GEMM FLOPs, 0 to 1
