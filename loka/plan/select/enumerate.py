"""Enumerates the execution options of a site: the GEMMs in FP8, each on its fastest kernel, and the cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import isfinite

from loka.kernels.gemm.catalogue import GEMM_KERNELS
from loka.numerics.enums import OPERANDS, Accumulation, Fuse, Gemm, Scaling
from loka.numerics.recipe import TRANSPOSED_FROM, OperandPair, Recipe
from loka.plan.format import format_kernel, format_recipe, format_us
from loka.plan.plan import NATIVE, KernelTime, Rejected, StepTime
from loka.plan.select.perf_model import HostModel, Latency, PerfModel, call_time
from loka.plan.select.workload import (
    SiteSizes,
    Surroundings,
    gemm_part,
    native_part,
    workload_of,
)

MERE_OF_FAST, DB_OF_FAST = 0.005, 0.25  # accepted loss of fast accumulation, measured on normal operands
LEAST_ROWS = 256  # smaller batches share a kernel
WORTH_A_TABLE = 1.05  # required speedup of another kernel over the planned one for other batches
ROWS_BEYOND = 8  # multiple of the planned M up to which a table of kernels by rows extends
_OF_LIBRARIES = frozenset(kernel.name for kernel in GEMM_KERNELS if kernel.library is not None)
_POSITIONS = {kernel.name: place for place, kernel in enumerate(GEMM_KERNELS)}
Order = tuple[tuple[bool, int, str], ...]
KernelRun = tuple[str, Accumulation]  # a kernel and its accumulation


@dataclass(frozen=True, slots=True)
class Offer:
    """A GEMM that could run in FP8: the kernels that can run it, each with its form of the operands."""

    kernels: Mapping[KernelRun, OperandPair]
    padding: bool = True  # if False, kernels depend on whether the batch's rows fit


@dataclass(frozen=True, slots=True, eq=False)
class ExecutionOption:
    """One choice of kernels for all GEMMs of a site."""

    kernels: tuple[str, ...]  # in the order of the site's GEMMs
    fp8: frozenset[Gemm]
    order: Order  # order for ties: position of fprop's kernel in the catalogue, then dgrad's, then wgrad's
    chained: bool  # its operands are made as in a chain
    fused: bool  # with its neighbours, in one kernel
    apart: StepTime
    joined: StepTime  # if the previous site is in the same chain
    error: tuple[float, float] | None  # MERE and SQNR (dB), the worst of its FP8 GEMMs; None if any is unknown

    def time(self, joined: bool) -> StepTime:
        """Its time, depending on whether the previous site is in the same chain."""
        return self.joined if joined else self.apart


@dataclass(frozen=True, slots=True, eq=False)
class KernelChoice:
    """The timed kernels of one GEMM: the chosen one, and reasons for the others."""

    kernel: str
    accumulation: Accumulation
    operands: OperandPair  # in the form for this kernel
    latency: Latency
    error: tuple[float, float] | None  # MERE and SQNR (dB) of the chosen kernel
    times: tuple[KernelTime, ...]  # the native one last
    rejected: tuple[Rejected, ...]
    m_buckets: tuple[tuple[int, str], ...] = ()  # as in a GemmPlan


@dataclass(frozen=True, slots=True, eq=False)
class SiteOptions:
    """All execution options of a site with a known time, in the order for ties.

    The last one or two have all GEMMs in the model's dtype: compiled, then fused with their neighbours.
    """

    gemms: tuple[Gemm, ...]
    choices: Mapping[Gemm, KernelChoice]  # for the GEMMs that could run in FP8
    own: Mapping[Gemm, KernelTime]  # native kernels
    options: tuple[ExecutionOption, ...]
    as_is: StepTime  # of the model as it is, compiled as a whole

    def with_fp8(self, fp8: frozenset[Gemm]) -> tuple[ExecutionOption, ...]:
        """The options with exactly these GEMMs in FP8: two at most where there are none, otherwise one at most."""
        return tuple(option for option in self.options if option.fp8 == fp8)

    def times(self, gemm: Gemm) -> tuple[KernelTime, ...]:
        """Times of all kernels measured for a GEMM."""
        return self.choices[gemm].times if gemm in self.choices else (self.own[gemm],)


def place_in_catalogue(kernel: str) -> tuple[bool, int, str]:
    """Sort key of a kernel for ties: order of the catalogue, then unknown kernels by name, the native one last."""
    return kernel == NATIVE, _POSITIONS.get(kernel, len(_POSITIONS)), kernel


def enumerate_options(
    sizes: SiteSizes,
    gemms: Sequence[Gemm],
    offers: Mapping[Gemm, Offer],
    around: Surroundings,
    fuse: Fuse,
    perf_model: PerfModel,
    host: HostModel | None = None,
    fuse_native: Fuse | None = None,
) -> SiteOptions | None:
    """The execution options of a site; None where not even its native GEMMs were measured.

    `around` is fused with FP8 GEMMs as `fuse` requires; with Fuse.AUTO, if that is faster by more than the noise. With
    native ones it is as `fuse_native` requires, `fuse` if that is None; with Fuse.AUTO, compiled and fused are two
    options. With `host`, times have the host's.
    """
    own = {gemm: perf_model.part(native_part(gemm, sizes)) for gemm in gemms}
    known = {gemm: latency for gemm, latency in own.items() if latency is not None}
    if len(known) < len(own):
        return None
    choices: dict[Gemm, KernelChoice] = {}
    for gemm, offer in offers.items():
        choice = _choice(gemm, sizes, offer, known[gemm], perf_model)
        if choice is not None:
            choices[gemm] = choice
    options = []
    for fp8 in filter(None, _valid_sets(gemms, choices)):
        option = _option(sizes, gemms, choices, known, fp8, around, fuse, perf_model, host)
        if option is not None:
            options.append(option)
    options.sort(key=lambda option: option.order)
    compiled, fused = (
        _option(sizes, gemms, choices, known, frozenset(), around, each, perf_model, host)
        for each in (Fuse.NEVER, Fuse.ALWAYS)
    )
    alone = replace(around, made_before=False)
    as_is = _option(sizes, gemms, choices, known, frozenset(), alone, Fuse.NEVER, perf_model, host)
    if compiled is None or fused is None or as_is is None:
        return None
    natives = {Fuse.NEVER: [compiled], Fuse.ALWAYS: [fused], Fuse.AUTO: [compiled, fused]}
    options += natives[fuse_native or fuse] if fused.fused else [compiled]
    own_times = {gemm: _kernel_time((NATIVE, None), latency, None) for gemm, latency in known.items()}
    return SiteOptions(tuple(gemms), choices, own_times, tuple(options), as_is.apart)


def _choice(gemm: Gemm, sizes: SiteSizes, offer: Offer, own: Latency, perf_model: PerfModel) -> KernelChoice | None:
    """The fastest kernel for a GEMM; among ties with it, the first in the catalogue."""
    latencies: dict[KernelRun, Latency] = {}
    errors: dict[KernelRun, tuple[float, float] | None] = {}
    times, rejected = [], []
    for run in sorted(offer.kernels, key=_place):
        part = gemm_part(gemm, sizes, run[0], offer.kernels[run], run[1])
        latency, errors[run] = perf_model.part(part), perf_model.costs.error(part)
        if latency is None:
            rejected.append(Rejected(format_kernel(*run), f"never measured with {part.recipe}"))
            continue
        times.append(_kernel_time(run, latency, errors[run]))
        unsupported_reason = _less_accurate(run, errors)
        if unsupported_reason:
            rejected.append(Rejected(format_kernel(*run), unsupported_reason))
        else:
            latencies[run] = latency
    if not latencies:
        return None
    fastest = min(latencies.values(), key=lambda latency: latency.us)
    chosen = next(run for run, latency in latencies.items() if latency.ties_with(fastest))
    for run, latency in latencies.items():
        if run != chosen:
            rejected.append(
                Rejected(format_kernel(*run), _rejection(latency, format_kernel(*chosen), latencies[chosen]))
            )
    operands = offer.kernels[chosen]
    like = tuple(
        run[0]
        for run in latencies
        if run[1] is chosen[1] and offer.kernels[run] == operands and (run == chosen or run[0] not in _OF_LIBRARIES)
    )
    m_buckets = _m_buckets(gemm, sizes, offer, chosen, like, perf_model) if offer.padding else ()
    times.append(_kernel_time((NATIVE, None), own, None))
    return KernelChoice(*chosen, operands, latencies[chosen], errors[chosen], tuple(times), tuple(rejected), m_buckets)


def _place(run: KernelRun) -> tuple[tuple[bool, int, str], bool]:
    """Sort key of a run: precise accumulation before fast of the same kernel."""
    return place_in_catalogue(run[0]), run[1] is Accumulation.FAST


def _less_accurate(run: KernelRun, errors: Mapping[KernelRun, tuple[float, float] | None]) -> str:
    """Reason why fast accumulation is not acceptable compared with precise on the same kernel, or ""."""
    kernel, accumulation = run
    precise = (kernel, Accumulation.PRECISE)
    if accumulation is Accumulation.PRECISE or precise not in errors:
        return ""
    found, base = errors[run], errors[precise]
    if found is None or base is None:
        return "the error of fast sums was never measured beside that of precise ones"
    if found[0] > base[0] + MERE_OF_FAST or found[1] < base[1] - DB_OF_FAST:
        return (
            f"fast sums err more: MERE {found[0]:.3g}, SQNR {found[1]:.1f} dB, with precise ones {base[0]:.3g} and "
            f"{base[1]:.1f} dB"
        )
    return ""


def _m_buckets(
    gemm: Gemm, sizes: SiteSizes, offer: Offer, chosen: KernelRun, kernels: Sequence[str], perf_model: PerfModel
) -> tuple[tuple[int, str], ...]:
    """The kernels for batches of other sizes, if another one gains enough there; otherwise ().

    Kernels are compared at powers of two of M, from 256 to 8 times the planned M; each is used for M up to the size
    where it is best, and the chosen one around the planned M. `kernels` take operands in the same form, and need no
    library that the chosen one does not need: batches that may never occur should not add a dependency.
    """
    limits = [LEAST_ROWS << place for place in range(64) if LEAST_ROWS << place <= ROWS_BEYOND * sizes.m]
    if len(kernels) < 2 or not limits:
        return ()
    table: list[tuple[int, str]] = []
    for limit in limits:
        kernel = chosen[0]
        if sizes.m > limit or (sizes.m <= limit // 2 and limit > LEAST_ROWS):
            kernel = _fastest_at(gemm, SiteSizes(limit, sizes.k, sizes.n), offer, chosen, kernels, perf_model)
        if table and table[-1][1] == kernel:
            table.pop()
        table.append((limit, kernel))
    return tuple(table) if len(table) > 1 or table[0][1] != chosen[0] else ()


def _fastest_at(
    gemm: Gemm, sizes: SiteSizes, offer: Offer, chosen: KernelRun, kernels: Sequence[str], perf_model: PerfModel
) -> str:
    """The kernel for a number of rows: the one chosen for the planned rows unless another gains enough over it."""
    latencies: dict[str, Latency] = {}
    for kernel in kernels:
        latency = perf_model.part(gemm_part(gemm, sizes, kernel, offer.kernels[kernel, chosen[1]], chosen[1]))
        if latency is not None:
            latencies[kernel] = latency
    if not latencies:
        return chosen[0]
    fastest = min(latencies.values(), key=lambda latency: latency.us)
    own = latencies.get(chosen[0])
    if own is not None and (own.us < WORTH_A_TABLE * fastest.us or own.ties_with(fastest)):
        return chosen[0]
    return next(kernel for kernel, latency in latencies.items() if latency.ties_with(fastest))


def _rejection(latency: Latency, chosen: str, best: Latency) -> str:
    figures = f"{format_us(latency.us)} against {format_us(best.us)} ({(latency + best).source.value})"
    if latency.ties_with(best):
        return f"no faster than {chosen} beyond the noise, which comes first in the catalogue: {figures}"
    return f"slower than {chosen}: {figures}"


def _kernel_time(
    run: tuple[str, Accumulation | None], latency: Latency, error: tuple[float, float] | None
) -> KernelTime:
    spread = round(latency.noise / latency.us, 4) if latency.us else 0.0
    mere, sqnr_db = error if error is not None and all(map(isfinite, error)) else (None, None)
    return KernelTime(run[0], round(latency.us, 3), spread, latency.source, mere, sqnr_db, run[1])


def _valid_sets(gemms: Sequence[Gemm], choices: Mapping[Gemm, KernelChoice]) -> Iterator[frozenset[Gemm]]:
    """The sets of GEMMs that can run in FP8 together: each transposed operand has its source in the set."""
    able = [gemm for gemm in gemms if gemm in choices]
    for count in range(len(able) + 1):
        for chosen in combinations(able, count):
            decided = {gemm: choices[gemm].operands if gemm in chosen else None for gemm in gemms}
            if all(unsupported_transpose(gemm, choices[gemm].operands, decided) is None for gemm in chosen):
                yield frozenset(chosen)


def _option(
    sizes: SiteSizes,
    gemms: Sequence[Gemm],
    choices: Mapping[Gemm, KernelChoice],
    own: Mapping[Gemm, Latency],
    fp8: frozenset[Gemm],
    around: Surroundings,
    fuse: Fuse,
    perf_model: PerfModel,
    host: HostModel | None,
) -> ExecutionOption | None:
    """An execution option with its times; None where an operation around the GEMMs was never measured."""
    kernels = tuple(choices[gemm].kernel if gemm in fp8 else NATIVE for gemm in gemms)
    recipe = Recipe.of({gemm: choices[gemm].operands if gemm in fp8 else None for gemm in gemms})
    products = {gemm: choices[gemm].latency if gemm in fp8 else own[gemm] for gemm in gemms}

    def time(fused: bool, joined: bool) -> StepTime | None:
        workload = workload_of(sizes, recipe, around, fused, joined)
        forward, backward = perf_model.sum(workload.forward), perf_model.sum(workload.backward)
        if forward is None or backward is None:
            return None
        for gemm, latency in products.items():
            if gemm is Gemm.FPROP:
                forward += latency
            else:
                backward += latency
        parts = (*workload.forward, *workload.backward)
        return call_time(
            forward, backward, host.us(len(gemms), parts, bool(fp8) or fused) if host is not None else None
        )

    form = sizes.fits and recipe.is_chain
    chained = form or (sizes.fits and recipe.keeps_wgrad and not around.any)
    fused = (form or (sizes.fits and not fp8)) and around.any and fuse is not Fuse.NEVER
    apart = time(fused, False)
    joined = time(fused, True) if fused else apart
    if fused and fuse is Fuse.AUTO:
        alone = time(False, False)
        if alone is not None and not _gains(apart, alone):
            fused, apart, joined = False, alone, alone
    if apart is None or joined is None:
        return None
    order = tuple(map(place_in_catalogue, kernels))
    return ExecutionOption(
        kernels, fp8, order, chained, fused, apart, joined, _worst([choices[gemm].error for gemm in fp8])
    )


def _worst(errors: Sequence[tuple[float, float] | None]) -> tuple[float, float] | None:
    """The largest MERE and the smallest SQNR; None if any is unknown."""
    known = [error for error in errors if error is not None and all(map(isfinite, error))]
    if not known or len(known) < len(errors):
        return None
    return max(mere for mere, _ in known), min(sqnr_db for _, sqnr_db in known)


def _gains(fused: StepTime | None, alone: StepTime) -> bool:
    """True if a site is faster when fused with its neighbours, beyond the noise."""
    if fused is None:
        return False
    return fused.us < alone.us and not fused.ties_with(alone)


def unsupported_transpose(gemm: Gemm, operands: OperandPair, decided: Mapping[Gemm, OperandPair | None]) -> str | None:
    """Reason why an operand of a GEMM cannot be transposed from another GEMM's; None where all can.

    `decided` has the operands of the site's GEMMs before this one, None for those that are not in FP8. A site whose
    input needs no gradient has no dgrad: its wgrad quantizes the output gradient along its rows itself, and transposes
    it.
    """
    # From the last: wgrad's input, whose source is not affected by other refusals, gives the cause.
    for operand, recipe in reversed(tuple(zip(OPERANDS[gemm], operands, strict=True))):
        if not recipe.transposed:
            continue
        if (gemm, operand) not in TRANSPOSED_FROM:
            return f"{operand} is read along its rows in {gemm}; there is nothing to transpose it from"
        source_gemm, source = TRANSPOSED_FROM[gemm, operand]
        if source_gemm not in decided:
            continue
        start, sources = f"{operand} is to be transposed from {source_gemm}'s, which", decided[source_gemm]
        if sources is None:
            return f"{start} stays as it is"
        found = sources[OPERANDS[source_gemm].index(source)]
        if not found.can_be_transposed:
            instead = ", or say nothing of requantize_transpose: under one scale, a copy made anew has the same values"
            return (
                f"{start} is {format_recipe(found)}; give {source_gemm} scaling: rowwise, range: dynamic and "
                f"power_of_two: true{instead if found.scaling is Scaling.TENSORWISE else ''}"
            )
    return None
