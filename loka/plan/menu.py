"""The ways of running a site: which of its GEMMs are in FP8, each on its fastest kernel, and what the whole costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite

from loka.kernels.catalogue import KERNELS
from loka.numerics.names import Accumulation, Fuse, Gemm
from loka.plan.costs import Pair, Sizes, Surroundings, as_is_part, gemm_part, has_form_of_chain, sheet_of
from loka.plan.plan import AS_IS, GemmPlan, KernelTime, Rejected, StepTime
from loka.plan.pricing import Price, Pricer
from loka.plan.turning import why_not_turned
from loka.plan.words import time_words

LEAST_ROWS = 256  # smaller batches share a kernel
ROWS_BEYOND = 8  # times the planned M: how far a table of kernels by rows goes
_POSITIONS = {kernel.name: place for place, kernel in enumerate(KERNELS)}
Order = tuple[tuple[bool, int, str], ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """A GEMM that could run in FP8: its recipe and the kernels that take it."""

    operands: Pair
    accumulation: Accumulation
    kernels: tuple[str, ...]
    padding: bool = True  # without it, what runs depends on whether the batch's rows fit


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step of a site takes."""

    forward: Price
    backward: Price

    @property
    def total(self) -> Price:
        """Both together."""
        return self.forward + self.backward

    def rounded(self) -> StepTime:
        """As a plan records it: to the nanosecond."""
        return StepTime(round(self.forward.us, 3), round(self.backward.us, 3), self.total.source)


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way of running all GEMMs of a site."""

    kernels: tuple[str, ...]  # in the order of the site's GEMMs
    fp8: frozenset[Gemm]
    order: Order  # that in which ties are broken: by fprop's place in the catalogue, then dgrad's, then wgrad's
    chained: bool  # its operands are made as in a chain
    fused: bool  # with its neighbours taken along
    apart: Cost
    joined: Cost  # where the site before is in the same chain

    def cost(self, joined: bool) -> Cost:
        """What it takes beside such a neighbour."""
        return self.joined if joined else self.apart


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The kernels of one GEMM, timed: the one that is taken, and why not the others."""

    kernel: str
    price: Price
    times: tuple[KernelTime, ...]  # the model's own last
    lost: tuple[Rejected, ...]
    by_rows: tuple[tuple[int, str], ...] = ()  # as in a GemmPlan


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """All ways of a site that measurements tell the time of, in the order in which ties are broken."""

    gemms: tuple[Gemm, ...]
    choices: Mapping[Gemm, Choice]  # of the GEMMs that could run in FP8
    own: Mapping[Gemm, KernelTime]  # the model's own
    ways: tuple[Way, ...]

    @property
    def as_is(self) -> Way:
        """The model as it is: the last, whatever else there is."""
        return self.ways[-1]

    def way(self, fp8: frozenset[Gemm]) -> Way | None:
        """The one with exactly these GEMMs in FP8."""
        return next((way for way in self.ways if way.fp8 == fp8), None)

    def times(self, gemm: Gemm) -> tuple[KernelTime, ...]:
        """Every kernel that was measured for a GEMM."""
        return self.choices[gemm].times if gemm in self.choices else (self.own[gemm],)


def place_in_catalogue(kernel: str) -> tuple[bool, int, str]:
    """Where a kernel comes in ties: as in the catalogue, then those that it lacks by name, the model's own last."""
    return kernel == AS_IS, _POSITIONS.get(kernel, len(_POSITIONS)), kernel


def menu_of(
    sizes: Sizes, gemms: Sequence[Gemm], offers: Mapping[Gemm, Offer], around: Surroundings, fuse: Fuse, pricer: Pricer
) -> Menu | None:
    """The menu of a site; None where not even the model's own GEMMs were measured.

    `around` is taken along where `fuse` says so; under Fuse.AUTO where that is faster by more than the noise.
    """
    own = {gemm: pricer.part(as_is_part(gemm, sizes)) for gemm in gemms}
    known = {gemm: price for gemm, price in own.items() if price is not None}
    if len(known) < len(own):
        return None
    choices: dict[Gemm, Choice] = {}
    for gemm, offer in offers.items():
        choice = _choice(gemm, sizes, offer, known[gemm], pricer)
        if choice is not None:
            choices[gemm] = choice
    ways = []
    for fp8 in _valid_sets(gemms, {gemm: offers[gemm] for gemm in choices}):
        way = _way(sizes, gemms, offers, choices, known, fp8, around, fuse, pricer)
        if way is not None:
            ways.append(way)
    if not any(not way.fp8 for way in ways):
        return None
    ways.sort(key=lambda way: way.order)
    own_times = {gemm: _kernel_time(AS_IS, price, None) for gemm, price in known.items()}
    return Menu(tuple(gemms), choices, own_times, tuple(ways))


def _choice(gemm: Gemm, sizes: Sizes, offer: Offer, own: Price, pricer: Pricer) -> Choice | None:
    """The fastest kernel for a GEMM; of those that cannot be told apart from it, the first in the catalogue."""
    prices: dict[str, Price] = {}
    times, lost = [], []
    for kernel in sorted(offer.kernels, key=place_in_catalogue):
        part = gemm_part(gemm, sizes, kernel, offer.operands, offer.accumulation)
        price = pricer.part(part)
        if price is None:
            lost.append(Rejected(kernel, f"never measured with {part.recipe}"))
            continue
        prices[kernel] = price
        times.append(_kernel_time(kernel, price, pricer.error(part)))
    if not prices:
        return None
    fastest = min(prices.values(), key=lambda price: price.us)
    taken = next(kernel for kernel, price in prices.items() if price.ties_with(fastest))
    for kernel, price in prices.items():
        if kernel != taken:
            lost.append(Rejected(kernel, _why_lost(kernel, price, taken, prices[taken])))
    by_rows = _by_rows(gemm, sizes, offer, taken, tuple(prices), pricer) if offer.padding else ()
    return Choice(taken, prices[taken], (*times, _kernel_time(AS_IS, own, None)), tuple(lost), by_rows)


def _by_rows(
    gemm: Gemm, sizes: Sizes, offer: Offer, taken: str, kernels: Sequence[str], pricer: Pricer
) -> tuple[tuple[int, str], ...]:
    """The kernels for batches of other sizes, where another is faster there beyond the noise; () where none ever is.

    Looked at where M is a power of two, from 256 to 8 times the planned one; up to each of them the kernel holds that
    is fastest at it, about the planned M the one that was taken.
    """
    limits = [LEAST_ROWS << place for place in range(64) if LEAST_ROWS << place <= ROWS_BEYOND * sizes.m]
    if len(kernels) < 2 or not limits:
        return ()
    table: list[tuple[int, str]] = []
    for limit in limits:
        kernel = taken
        if sizes.m > limit or (sizes.m <= limit // 2 and limit > LEAST_ROWS):
            kernel = _fastest_at(gemm, Sizes(limit, sizes.k, sizes.n), offer, taken, kernels, pricer)
        if table and table[-1][1] == kernel:
            table.pop()
        table.append((limit, kernel))
    return tuple(table) if len(table) > 1 or table[0][1] != taken else ()


def _fastest_at(gemm: Gemm, sizes: Sizes, offer: Offer, taken: str, kernels: Sequence[str], pricer: Pricer) -> str:
    """The kernel for some rows: the one that is taken at the planned rows unless another is faster beyond the noise."""
    prices: dict[str, Price] = {}
    for kernel in kernels:
        price = pricer.part(gemm_part(gemm, sizes, kernel, offer.operands, offer.accumulation))
        if price is not None:
            prices[kernel] = price
    if not prices:
        return taken
    fastest = min(prices.values(), key=lambda price: price.us)
    if taken in prices and prices[taken].ties_with(fastest):
        return taken
    return next(kernel for kernel, price in prices.items() if price.ties_with(fastest))


def _why_lost(kernel: str, price: Price, taken: str, best: Price) -> str:
    figures = f"{time_words(price.us)} against {time_words(best.us)} ({(price + best).source.value})"
    if price.ties_with(best):
        return f"no faster than {taken} beyond the noise, which comes first in the catalogue: {figures}"
    return f"slower than {taken}: {figures}"


def _kernel_time(kernel: str, price: Price, error: tuple[float, float] | None) -> KernelTime:
    spread = round(price.noise / price.us, 4) if price.us else 0.0
    mere, sqnr_db = error if error is not None and all(map(isfinite, error)) else (None, None)
    return KernelTime(kernel, round(price.us, 3), spread, price.source, mere, sqnr_db)


def _valid_sets(gemms: Sequence[Gemm], offers: Mapping[Gemm, Offer]) -> Iterator[frozenset[Gemm]]:
    """The sets of GEMMs that can run in FP8 together: what is turned has its source among them."""
    able = [gemm for gemm in gemms if gemm in offers]
    for count in range(len(able) + 1):
        for chosen in combinations(able, count):
            decided = {gemm: _draft(gemm, offers[gemm] if gemm in chosen else None) for gemm in gemms}
            if all(why_not_turned(gemm, offers[gemm].operands, decided) is None for gemm in chosen):
                yield frozenset(chosen)


def _draft(gemm: Gemm, offer: Offer | None) -> GemmPlan:
    if offer is None:
        return GemmPlan(gemm, AS_IS, None, None, "")
    return GemmPlan(gemm, offer.kernels[0], offer.operands, offer.accumulation, "")


def _way(
    sizes: Sizes,
    gemms: Sequence[Gemm],
    offers: Mapping[Gemm, Offer],
    choices: Mapping[Gemm, Choice],
    own: Mapping[Gemm, Price],
    fp8: frozenset[Gemm],
    around: Surroundings,
    fuse: Fuse,
    pricer: Pricer,
) -> Way | None:
    """A way with its costs; None where something around the GEMMs was never measured."""
    kernels = tuple(choices[gemm].kernel if gemm in fp8 else AS_IS for gemm in gemms)
    pairs = {gemm: offers[gemm].operands if gemm in fp8 else None for gemm in gemms}
    products = {gemm: choices[gemm].price if gemm in fp8 else own[gemm] for gemm in gemms}

    def cost(taken: bool, joined: bool) -> Cost | None:
        sheet = sheet_of(sizes, pairs, around, taken, joined)
        forward, backward = pricer.sum(sheet.forward), pricer.sum(sheet.backward)
        if forward is None or backward is None:
            return None
        for gemm, price in products.items():
            if gemm is Gemm.FPROP:
                forward += price
            else:
                backward += price
        return Cost(forward, backward)

    chained = sizes.fits and has_form_of_chain(pairs)
    taken = chained and around.any and fuse is not Fuse.NEVER
    apart, joined = cost(taken, False), cost(taken, True)
    if taken and fuse is Fuse.AUTO:
        alone = cost(False, False)
        if alone is not None and not _gains(apart, alone):
            taken, apart, joined = False, alone, alone
    if apart is None or joined is None:
        return None
    return Way(kernels, fp8, tuple(map(place_in_catalogue, kernels)), chained, taken, apart, joined)


def _gains(fused: Cost | None, alone: Cost) -> bool:
    """Whether a site is faster with its neighbours, beyond the noise."""
    if fused is None:
        return False
    return fused.total.us < alone.total.us and not fused.total.ties_with(alone.total)
