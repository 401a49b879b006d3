"""Selects an execution option for each site of a chain: the least total time, subject to the budgets.

The sites of a chain are decided together, since the kernel between two linears can write FP8 for the second only if
both are in the chain: if a site leaves it, the next one has to quantize its own input. The sum of the times is
minimised by dynamic programming over the chain, one state for "this site is in it" and one for "it is not".

`min_speedup` is a handicap. The time of an option with more FP8 than the policy forces is multiplied by the site's
`min_speedup`, so that it wins only if (time of the least FP8) / (its own time) reaches that. In a chain this holds for
each run of neighbours in FP8 as a whole, so one site may lose a little if its neighbour gains more.

Among options that tie with the fastest (`Latency.ties_with`), the first in order is chosen: by the position of fprop's
kernel in the catalogue, then dgrad's, then wgrad's, native ones last. So the choice is reproducible, and does not
depend on the noise of a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loka.errors import InputError
from loka.kernels.gemm.catalogue import Kernel, kernel_named
from loka.numerics.enums import Compute, Gemm
from loka.numerics.recipe import OperandPair, transposed_form
from loka.plan.plan import GemmPlan
from loka.plan.select.enumerate import Cost, ExecutionOption, Order, SiteOptions
from loka.policy.settings import ANY_KERNEL, Assignment, GemmSettings, SiteSettings
from loka.sites.site import Site


@dataclass(frozen=True, slots=True)
class SelectionProblem:
    """A site and its possible options: every GEMM of `must` runs in FP8, and none outside `may`."""

    site_options: SiteOptions
    must: frozenset[Gemm]
    may: frozenset[Gemm]
    min_speedup: float

    @property
    def allowed(self) -> tuple[ExecutionOption, ...]:
        """The options within the policy and the error budget."""
        return tuple(option for option in self.site_options.options if self.must <= option.fp8 <= self.may)

    @property
    def least(self) -> ExecutionOption:
        """The option with the least FP8: forced GEMMs and the sources of their operands. Others must be faster."""
        return min(self.allowed, key=lambda option: (len(option.fp8), option.order))


@dataclass(frozen=True, slots=True)
class Selection:
    """A site's option; `joined` if its input comes from the kernel of the site before."""

    option: ExecutionOption
    joined: bool

    @property
    def cost(self) -> Cost:
        """Its cost."""
        return self.option.cost(self.joined)


@dataclass(frozen=True, slots=True)
class _Path:
    """The best options up to some site."""

    us: float  # including handicaps
    picks: tuple[Selection, ...] = ()

    @property
    def key(self) -> tuple[float, tuple[Order, ...]]:
        """Less time first; for equal times the first in order, which has more FP8."""
        return self.us, tuple(pick.option.order for pick in self.picks)


def select(chain: Sequence[SelectionProblem], host_weight: float = 0.0) -> tuple[Selection, ...]:
    """The options selected for the sites of a chain; a site without neighbours is a chain of one.

    `host_weight` is the share of the host's time in what is minimised, the rest being the GPU's.

    Each problem's `allowed` must contain the option that runs all of `may` in FP8.
    """
    paths = {False: _Path(0.0)}
    for problem in chain:
        reached: dict[bool, _Path] = {}
        for joined, path in paths.items():
            for option, handicap in _options(problem, joined, len(chain) == 1, host_weight):
                us = path.us + handicap * option.cost(joined).weighed(host_weight).us
                longer = _Path(us, (*path.picks, Selection(option, joined)))
                known = reached.get(option.chained)
                if known is None or longer.key < known.key:
                    reached[option.chained] = longer
        paths = reached
    return min(paths.values(), key=lambda path: path.key).picks


def _options(
    problem: SelectionProblem, joined: bool, alone: bool, host_weight: float
) -> list[tuple[ExecutionOption, float]]:
    """The options of a site, each with its handicap: the best in the chain, the best outside, the least FP8.

    Noise is considered only here: the sums of whole chains are compared directly.
    """
    least = problem.least
    others = [option for option in problem.allowed if option is not least]
    groups = [others] if alone else [[option for option in others if option.chained is kind] for kind in (True, False)]
    return [*((_best(group, joined, host_weight), problem.min_speedup) for group in groups if group), (least, 1.0)]


def _best(options: Sequence[ExecutionOption], joined: bool, host_weight: float) -> ExecutionOption:
    """The fastest; among ties with it, the first in order."""
    times = [(option.cost(joined).weighed(host_weight), option) for option in options]
    fastest = min((time for time, _ in times), key=lambda time: time.us)
    return min((option for time, option in times if time.ties_with(fastest)), key=lambda option: option.order)


Sizes = tuple[int, int, int]


def candidates(requested: GemmSettings, usual: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """The kernels that a GEMM may run on: the one that the policy names, or the usual ones."""
    return tuple(usual) if requested.kernel == ANY_KERNEL else (kernel_named(requested.kernel),)


def accepted_operands(kernel: Kernel, gemm: Gemm, requested: GemmSettings, sizes: Sizes, target: str) -> OperandPair:
    """The operands in the form that a kernel supports, if any; sizes are M, K and N.

    Two transposed operands have one scale each, which can be passed as a tensorwise or a rowwise scale: a kernel
    without support for tensorwise scales takes them rowwise.
    """

    def able(operands: OperandPair) -> bool:
        return (
            kernel.unsupported_reason(gemm, operands, requested.accumulation, requested.padding, *sizes, target) is None
        )

    if able(requested.operands) or not all(each.reads_first_scale for each in requested.operands):
        return requested.operands
    rows = transposed_form(requested.operands)
    return rows if rows is not None and able(rows) else requested.operands


def overridden_operands(site: Site, gemm: Gemm, requested: GemmSettings, batch_size: int, target: str) -> OperandPair:
    """`accepted_operands` of the kernel that the policy names; without one, the policy's operands."""
    if requested.kernel == ANY_KERNEL:
        return requested.operands
    sizes = (site.rows.at(batch_size), site.k, site.n)
    return accepted_operands(kernel_named(requested.kernel), gemm, requested, sizes, target)


def unknown_kernels(wanted: SiteSettings, files: Mapping[str, str]) -> list[str]:
    """A message for each kernel name in a rule that does not exist."""
    problems = []
    for gemm, requested in wanted.gemms.items():
        if requested.kernel == ANY_KERNEL:
            continue
        try:
            kernel_named(requested.kernel)
        except InputError as error:
            by = _assigned(wanted, gemm)
            problems.append(f"{_place(by, files)}: {error}" if by is not None else str(error))
    return problems


def impossible_overrides(
    site: Site,
    wanted: SiteSettings,
    gemms: Sequence[GemmPlan],
    files: Mapping[str, str],
    batch_size: int,
    target: str,
) -> dict[Gemm, str]:
    """A message for each GEMM that is kept because the kernel named by a rule for this one site rejects it."""
    problems = {}
    for plan in gemms:
        requested, by = wanted.gemms[plan.gemm], _assigned(wanted, plan.gemm)
        if by is None or not by.names_one_site or plan.fp8:
            continue
        if requested.compute is Compute.KEEP or requested.kernel == ANY_KERNEL:
            continue
        operands = overridden_operands(site, plan.gemm, requested, batch_size, target)
        sizes = (site.rows.at(batch_size), site.k, site.n)
        reason = kernel_named(requested.kernel).unsupported_reason(
            plan.gemm, operands, requested.accumulation, requested.padding, *sizes, target
        )
        if reason is not None and reason == plan.reason:
            problems[plan.gemm] = (
                f"{_place(by, files)}: {by.source} wants {plan.gemm.value} of {site.name!r} on {requested.kernel}, "
                f"which cannot be: {reason}; write another kernel there, or leave it out"
            )
    return problems


def _assigned(wanted: SiteSettings, gemm: Gemm) -> Assignment | None:
    history = wanted.history.get(f"{gemm.value}.kernel")
    return history[-1] if history else None


def _place(by: Assignment, files: Mapping[str, str]) -> str:
    return f"{files.get(by.file, by.file)}:{by.line}"
