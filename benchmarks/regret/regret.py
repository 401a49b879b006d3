"""What deciding by one recording costs by another: two sets of measurements of the same machine, side by side.

Each problem is a piece of work with the candidates that could run it, each a sum of parts, in the order in which ties
are broken. The first set chooses: the fastest, or the first of those that its spreads do not tell from the fastest. The
second says what the choice takes over the best by its own times: the regret, 1 where nothing is lost. Where the second
would have chosen otherwise, the winner has flipped; a flip lies outside ties if both sets tell the two choices apart.
Only what both sets have measured themselves takes part.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from benchmarks.crossover.crossover import measured, total
from loka.bench.results import Table
from loka.errors import InputError
from loka.kernels.measurements.parts import Part, PartCosts, PartKind, PartTime

WORST, LISTED = 5, 1.005  # problems that are listed, and the regret above which they are

Size = tuple[int, int, int, str]  # rows, columns, contraction and dtype of a GEMM


@dataclass(frozen=True, slots=True)
class RegretProblem:
    """A piece of work, and for each way of running it the parts that it takes."""

    name: str
    candidates: Mapping[str, tuple[Part, ...]]  # in the order in which ties are broken


@dataclass(frozen=True, slots=True)
class RegretOutcome:
    """What came of one problem."""

    name: str
    chosen: str  # by the first set
    best: str  # what the second would have chosen
    regret: float  # the second set's time of `chosen`, over the least of its times
    outside: bool  # whether both sets tell `chosen` and `best` apart

    @property
    def flipped(self) -> bool:
        """Whether the second set would have chosen otherwise."""
        return self.chosen != self.best


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all problems of one kind."""

    title: str
    outcomes: tuple[RegretOutcome, ...]

    @property
    def mean(self) -> float:
        """Geometric mean of the regrets."""
        return math.exp(statistics.fmean(math.log(outcome.regret) for outcome in self.outcomes))

    @property
    def worst(self) -> float:
        """The largest regret."""
        return max(outcome.regret for outcome in self.outcomes)

    @property
    def flips(self) -> int:
        """How many winners flipped."""
        return sum(outcome.flipped for outcome in self.outcomes)

    @property
    def outside(self) -> int:
        """How many of them outside ties."""
        return sum(outcome.flipped and outcome.outside for outcome in self.outcomes)


def ties(first: PartTime, second: PartTime) -> bool:
    """Whether the spreads of two times hide which is less."""
    return abs(first.us - second.us) <= math.hypot(first.us * first.spread, second.us * second.spread)


def choose(times: Mapping[str, PartTime]) -> str:
    """The first candidate in order that cannot be told from the fastest."""
    fastest = min(times.values(), key=lambda timed: timed.us)
    return next(name for name, timed in times.items() if ties(timed, fastest))


def judge(problem: RegretProblem, first: PartCosts, second: PartCosts) -> RegretOutcome | None:
    """What `first` chooses, by `second`; None where fewer than two candidates were measured in both."""
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
    """All problems of a kind. Raises InputError where none of them was measured in both sets."""
    outcomes = [outcome for problem in problems if (outcome := judge(problem, first, second)) is not None]
    if not outcomes:
        raise InputError(f"{title}: the two sets have no measurements in common; record the same parts twice")
    return Summary(title, tuple(outcomes))


def gemm_problems(parts: Iterable[Part]) -> dict[str, tuple[RegretProblem, ...]]:
    """By recipe: for each size and dtype among measured parts every kernel that takes the recipe, and the model's own.

    This is what a plan decides of a GEMM: the recipe is the policy's.
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
    """How far the second set's time of each part is from the first's, as a share of it, sorted."""
    shares = []
    for part in parts:
        times = [measured(costs, part) for costs in (first, second)]
        if times[0] is not None and times[1] is not None:
            shares.append(abs(times[1].us / times[0].us - 1.0))
    return sorted(shares)


def to_text(summaries: Sequence[Summary], shares: Sequence[float]) -> str:
    """The outcome as text: a line for each kind, the worst problems, and how far the two sets are apart."""
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
    """Columns set apart by blanks, all but the first to the right, without a trailing blank."""
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
    """The same as JSON can hold it, with every problem that flipped."""
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
    """Median, 95th percentile and the most of sorted shares; nothing of none."""
    places = {"median": 0.5, "p95": 0.95, "most": 1.0} if shares else {}
    return {name: shares[min(int(share * len(shares)), len(shares) - 1)] for name, share in places.items()}
