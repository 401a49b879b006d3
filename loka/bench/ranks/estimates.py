"""What a step would take on more ranks than were measured: brackets from what one rank computes and what it moves.

No model of a cluster: a bracket says what a link of a stated bandwidth leaves room for. Its lower end hides all
communication behind the computing, its upper end none. Latencies, other traffic and slow ranks come on top.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from loka.bench.ranks.collectives import CollectiveFigures

RANKS = (8, 64, 512)
LINK = 50.0  # GB/s: an adapter of 400 Gbit/s for each GPU
_PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}  # times that a ring moves the whole tensor


@dataclass(frozen=True, slots=True)
class Bracket:
    """Milliseconds of a step: `low` if all communication hides behind the computing, `high` if none does."""

    low: float
    high: float


def bracket(alone_ms: float, communication_ms: float) -> Bracket:
    """A step that computes and communicates for so long."""
    return Bracket(max(alone_ms, communication_ms), alone_ms + communication_ms)


def estimate(alone_ms: float, moved: Iterable[CollectiveFigures], ranks: int, link: float) -> Bracket:
    """A step on `ranks` ranks, each with the batch that took `alone_ms` without communication.

    `moved`: the collectives of a step, of which a rank of a ring sends and receives (ranks - 1) / ranks of the bytes,
    twice for an all-reduce (Thakur et al., 2005); `link`: GB/s of a rank, in each direction.
    """
    nbytes = sum(_PASSES[each.kind] * each.nbytes for each in moved) * (ranks - 1) / ranks
    return bracket(alone_ms, nbytes / (link * 1e6))
