"""What a policy says about one site, once its cascade of rules has been applied: frozen, complete, with provenance."""

from __future__ import annotations

from dataclasses import dataclass, field

from loka.numerics.enums import Accumulation, Compute, Fuse, Gemm
from loka.numerics.recipe import OperandPair

ANY_KERNEL = "auto"  # what `kernel` says where measurements are to decide


@dataclass(frozen=True, slots=True)
class GemmSettings:
    """What a policy asks of one GEMM of a site."""

    compute: Compute
    operands: OperandPair
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
