"""Selects an execution option for each site of a chain: the least total time, subject to the budgets.

The sites of a chain are decided together, since the kernel between two linears can write FP8 for the second only if
both are in the chain: if a site leaves it, the next one has to quantise its own input. The sum of the times is
minimised by dynamic programming over the chain, one state for "this site is in it" and one for "it is not".

`min_speedup` is a handicap. The time of an option with more FP8 than the policy forces is multiplied by the site's
`min_speedup`, so that it wins only if (time of the least FP8) / (its own time) reaches that. In a chain this holds for
each run of neighbours in FP8 as a whole, so one site may lose a little if its neighbour gains more.

Among options that tie with the fastest (`Latency.ties_with`), the first in order is chosen: by the position of fprop's
kernel in the catalogue, then dgrad's, then wgrad's, native ones last. So the choice is reproducible, and does not
depend on the noise of a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka.numerics.enums import Gemm
from loka.plan.select.enumerate import Cost, ExecutionOption, Order, SiteOptions


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


def select(chain: Sequence[SelectionProblem]) -> tuple[Selection, ...]:
    """The options selected for the sites of a chain; a site without neighbours is a chain of one.

    Each problem's `allowed` must contain the option that runs all of `may` in FP8.
    """
    paths = {False: _Path(0.0)}
    for problem in chain:
        reached: dict[bool, _Path] = {}
        for joined, path in paths.items():
            for option, handicap in _options(problem, joined, alone=len(chain) == 1):
                us = path.us + handicap * option.cost(joined).total.us
                longer = _Path(us, (*path.picks, Selection(option, joined)))
                known = reached.get(option.chained)
                if known is None or longer.key < known.key:
                    reached[option.chained] = longer
        paths = reached
    return min(paths.values(), key=lambda path: path.key).picks


def _options(problem: SelectionProblem, joined: bool, alone: bool) -> list[tuple[ExecutionOption, float]]:
    """The options of a site, each with its handicap: the best in the chain, the best outside, the least FP8.

    Noise is considered only here: the sums of whole chains are compared directly.
    """
    least = problem.least
    others = [option for option in problem.allowed if option is not least]
    groups = [others] if alone else [[option for option in others if option.chained is kind] for kind in (True, False)]
    return [*((_best(group, joined), problem.min_speedup) for group in groups if group), (least, 1.0)]


def _best(options: Sequence[ExecutionOption], joined: bool) -> ExecutionOption:
    """The fastest; among ties with it, the first in order."""
    fastest = min((option.cost(joined).total for option in options), key=lambda latency: latency.us)
    return min(
        (option for option in options if option.cost(joined).total.ties_with(fastest)), key=lambda option: option.order
    )
