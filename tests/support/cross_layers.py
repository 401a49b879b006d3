"""Cross layers as chains see them."""

from __future__ import annotations

from loka.graph.ir import ForwardIR
from loka.graph.patterns.linear_chain import StaticOperands, find_chains
from loka.graph.patterns.region import find_regions


def cross_layers(forward: ForwardIR) -> int:
    """Number of GEMMs whose product a chain multiplies by a matrix and adds another to."""
    sites = {step.call.site for step in forward.statements if step.call is not None}
    chains = find_chains(forward, find_regions(forward, sites), StaticOperands(frozenset(), frozenset()))
    return sum(None not in (stage.times, stage.residual) for chain in chains for stage in chain.stages)
