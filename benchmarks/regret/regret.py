"""Regret of decisions between two sets of measurements of the same machine.

Each problem is a piece of work with candidates that could run it, each a sum of parts, in tie-breaking order. The first
set chooses the first candidate that its spreads do not distinguish from the fastest. The regret is the second set's
time of that choice over its own least time: 1 if nothing is lost. If the second set would have chosen another
candidate, the winner has flipped; the flip is outside ties if both sets distinguish the two choices. Only parts that
both sets have measured are used.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.crossover.crossover import measured, total
from loka.bench.markdown import Table
from loka.errors import InputError
from loka.kernels.measurements.parts import Part, PartCosts, PartKind, PartTime

WORST, LISTED = 5, 1.005  # most problems listed, and the least regret of a listed one

Size = tuple[int, int, int, str]  # rows, columns, contraction and dtype of a GEMM


@dataclass(frozen=True, slots=True)
class RegretProblem:
    """A piece of work, and the parts of each way of running it."""

    name: str
    candidates: Mapping[str, tuple[Part, ...]]  # in tie-breaking order


@dataclass(frozen=True, slots=True)
class RegretOutcome:
    """The result of one problem."""

    name: str
    chosen: str  # by the first set
    best: str  # chosen by the second set
    regret: float  # the second set's time of `chosen` over its least time
    outside: bool  # both sets distinguish `chosen` and `best`

    @property
    def flipped(self) -> bool:
        """True if the second set would have chosen another candidate."""
        return self.chosen != self.best


@dataclass(frozen=True, slots=True)
class Summary:
    """The results of all problems of one kind."""

    title: str
    outcomes: tuple[RegretOutcome, ...]

    @property
    def mean(self) -> float:
        """Geometric mean of the regrets."""
        return math.exp(statistics.fmean(math.log(outcome.regret) for outcome in self.outcomes))

    @property
    def worst(self) -> float:
        """Largest regret."""
        return max(outcome.regret for outcome in self.outcomes)

    @property
    def flips(self) -> int:
        """Number of flipped winners."""
        return sum(outcome.flipped for outcome in self.outcomes)

    @property
    def outside(self) -> int:
        """Number of flips outside ties."""
        return sum(outcome.flipped and outcome.outside for outcome in self.outcomes)


def ties(first: PartTime, second: PartTime) -> bool:
    """True if two times differ by no more than their spreads."""
    return abs(first.us - second.us) <= math.hypot(first.us * first.spread, second.us * second.spread)


def choose(times: Mapping[str, PartTime]) -> str:
    """The first candidate, in order, that ties with the fastest."""
    fastest = min(times.values(), key=lambda timed: timed.us)
    return next(name for name, timed in times.items() if ties(timed, fastest))


def judge(problem: RegretProblem, first: PartCosts, second: PartCosts) -> RegretOutcome | None:
    """Judge the choice of `first` by `second`; None if fewer than two candidates were measured in both."""
    both = {}
    for name, parts in problem.candidates.items():
        sums = [total(measured(costs, part) for part in parts) for costs in (first, second)]
        if sums[0] is not None and sums[1] is not None:
            both[name] = (sums[0], sums[1])
    if len(both) < 2:
        return None
    chosen = choose({name: pair[0] for name, pair in both.items()})
    best = choose({name: pair[1] for name, pair in both.items()})
    least = min(pair[1].us for pair in both.values())
    outside = not any(ties(both[chosen][side], both[best][side]) for side in (0, 1))
    return RegretOutcome(problem.name, chosen, best, both[chosen][1].us / least, outside)


def summarise(title: str, problems: Iterable[RegretProblem], first: PartCosts, second: PartCosts) -> Summary:
    """Judge all problems of a kind. Raises InputError if none was measured in both sets."""
    outcomes = [outcome for problem in problems if (outcome := judge(problem, first, second)) is not None]
    if not outcomes:
        raise InputError(f"{title}: the two sets have no measurements in common; record the same parts twice")
    return Summary(title, tuple(outcomes))


def gemm_problems(parts: Iterable[Part]) -> dict[str, tuple[RegretProblem, ...]]:
    """Problems by recipe: for each measured size and dtype, the kernels measured with the recipe, and native.

    This is a plan's decision about a GEMM, whose recipe is given by the policy.
    """
    gemms = sorted(part for part in parts if part.work is PartKind.GEMM)
    own = {_size(part): part for part in gemms if not part.recipe}
    found: dict[str, dict[Size, dict[str, tuple[Part, ...]]]] = {}
    for part in gemms:
        if part.recipe:
            found.setdefault(part.recipe, {}).setdefault(_size(part), {})[part.kernel] = (part,)
    for sizes in found.values():
        for size, candidates in sizes.items():
            if size in own:
                candidates[own[size].kernel] = (own[size],)
    return {
        recipe: tuple(RegretProblem(_words(size), candidates) for size, candidates in sorted(sizes.items()))
        for recipe, sizes in sorted(found.items())
    }


def _size(part: Part) -> Size:
    return part.rows, part.columns, part.contraction, part.dtype


def _words(size: Size) -> str:
    rows, columns, contraction, dtype = size
    return f"{rows} x {columns} x {contraction} {dtype}"


def drift(parts: Iterable[Part], first: PartCosts, second: PartCosts) -> list[float]:
    """Relative difference of the second set's time of each part from the first's, sorted."""
    shares = []
    for part in parts:
        times = [measured(costs, part) for costs in (first, second)]
        if times[0] is not None and times[1] is not None:
            shares.append(abs(times[1].us / times[0].us - 1.0))
    return sorted(shares)


def to_text(summaries: Sequence[Summary], shares: Sequence[float]) -> str:
    """The results as text: a line for each kind, the worst problems, and the drift between the sets."""
    table: Table = (
        ("problems", "count", "regret, mean", "worst", "flips", "outside ties"),
        [
            (
                each.title,
                str(len(each.outcomes)),
                f"{100 * (each.mean - 1):.2f} %",
                f"{100 * (each.worst - 1):.1f} %",
                f"{each.flips} ({100 * each.flips / len(each.outcomes):.1f} %)",
                str(each.outside),
            )
            for each in summaries
        ],
    )
    parts = [plain_table(table)]
    if shares:
        words = ", ".join(f"{100 * share:.2f} %" for share in _drifts(shares).values())
        parts.append(f"{len(shares)} parts differ between the sets by (median, 95th percentile, most): {words}")
    for each in summaries:
        worst = sorted(each.outcomes, key=lambda outcome: (-outcome.regret, outcome.name))[:WORST]
        lines: list[tuple[str, ...]] = [
            (out.name, out.chosen, out.best, f"{100 * (out.regret - 1):.1f} %") for out in worst if out.regret > LISTED
        ]
        if lines:
            parts.append(f"{each.title}, the worst:\n" + plain_table((("problem", "chosen", "best", "regret"), lines)))
    return "\n\n".join(parts)


def plain_table(table: Table) -> str:
    """A table of columns separated by spaces, right-aligned except the first, without trailing spaces."""
    columns, rows = table
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if index else text.ljust(width)
            for index, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def to_plain(summaries: Sequence[Summary], shares: Sequence[float]) -> dict[str, object]:
    """The results as a dict for JSON, with every flipped problem."""
    return {
        "problems": [
            {
                "title": each.title,
                "count": len(each.outcomes),
                "mean": each.mean,
                "worst": each.worst,
                "flips": each.flips,
                "outside": each.outside,
                "flipped": [asdict(outcome) for outcome in each.outcomes if outcome.flipped],
            }
            for each in summaries
        ],
        "parts": len(shares),
        "drift": _drifts(shares),
    }


def _drifts(shares: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and maximum of sorted shares; {} if there are none."""
    places = {"median": 0.5, "p95": 0.95, "most": 1.0} if shares else {}
    return {name: shares[min(int(share * len(shares)), len(shares) - 1)] for name, share in places.items()}
