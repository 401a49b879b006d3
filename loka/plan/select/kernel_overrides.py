"""Kernels that a policy names: the only candidates for their GEMMs, and errors of rules for one site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loka.errors import InputError
from loka.kernels.gemm.catalogue import Kernel, kernel_named
from loka.numerics.enums import Compute, Gemm
from loka.numerics.recipe import OperandPair, transposed_form
from loka.plan.plan import GemmPlan
from loka.policy.cascade.settings import ANY_KERNEL, Assignment, GemmSettings, SiteSettings
from loka.sites.site import Site

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
