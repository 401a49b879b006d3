"""Settings of one site after the cascade of rules: frozen, complete, with the source of each field."""

from __future__ import annotations

from dataclasses import dataclass, field

from loka.numerics.enums import Accumulation, Compute, Fuse, Gemm
from loka.numerics.recipe import OperandPair

ANY_KERNEL = "auto"  # value of `kernel` that leaves the choice to measurements


@dataclass(frozen=True, slots=True)
class GemmSettings:
    """A policy's settings for one GEMM of a site."""

    compute: Compute
    operands: OperandPair
    accumulation: Accumulation = Accumulation.PRECISE
    padding: bool = True  # zero-pad sizes that the kernel does not support
    kernel: str = ANY_KERNEL  # a name in `loka.kernels.gemm.catalogue`, or ANY_KERNEL for the fastest
    may_be_fast: bool = False  # `accumulation: auto`: fast where measurements show that it is faster and as accurate
    by_time: bool = True  # `compute: auto`: FP8 where it is safe and faster; False: where it is safe


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of error and speedup for a GEMM to run in FP8 under `compute: auto`."""

    mere: float = 0.2  # mean element-wise relative error, floored (numerics.metrics)
    sqnr_db: float = 24.0  # signal to quantization noise, dB
    min_speedup: float = 1.05  # relative to the native model


@dataclass(frozen=True, slots=True)
class Assignment:
    """One field that one rule set: `fprop.input.format = e4m3 (policies/ranker.yaml:14, rule 2)`."""

    path: str  # "compute", "budget.mere", "fprop.compute", "dgrad.grad_output.format", ...
    value: str  # as written
    source: str  # "defaults", or "rule 2: layers.*.mlp.*"
    file: str  # as named by the user
    line: int  # 1-based; 0 for built-in values
    names_one_site: bool = False  # the rule's pattern matches exactly one site: then a failure is an error


@dataclass(frozen=True, slots=True)
class SiteSettings:
    """The outcome of the cascade for one site.

    `history[path]` has all assignments of a field in order; the last one is in effect, the others were overridden.
    """

    gemms: dict[Gemm, GemmSettings]
    budget: Budget = Budget()
    fuse: Fuse = Fuse.AUTO
    history: dict[str, tuple[Assignment, ...]] = field(default_factory=dict)
    recipe: str = ""  # of `scaling: auto`, in words; "" where rules give it
    alternatives: tuple[SiteSettings, ...] = ()  # the same with each other recipe that `scaling: auto` leaves open

    def compute_set_by(self, gemm: Gemm) -> Assignment | None:
        """The assignment that set a GEMM's `compute`: the GEMM's own or the site-wide one, whichever is in effect."""
        value = self.gemms[gemm].compute.value
        for path in (f"{gemm.value}.compute", "compute"):
            assignments = self.history.get(path)
            if assignments and assignments[-1].value == value:
                return assignments[-1]
        return None


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """Properties of a site that a rule's `match` can test. `loka.graph.sites.site.Site` provides them.

    Shapes are those of y = x @ weight.T: x is M x K, weight is N x K; `m` is at the policy's batch size.
    """

    name: str
    kind: str  # linear | functional_linear | matmul | addmm | einsum | bmm | attention | convolution
    m: int
    k: int
    n: int
    share: float  # of the model's GEMM FLOPs, 0 to 1
