"""Real rows of the watched steps, recombined as if independent: the limit of samplers that draw row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.held_out.held_out_capture import CapturedOperands
from loka.graph.sites.site import Site

KEPT = 256  # most rows kept of a call


class RowPool:
    """Pairs of corresponding rows of input and output gradient, over several steps."""

    def __init__(self, sites: Sequence[Site], batch_size: int, seed: int) -> None:
        self.sites = tuple(site for site in sites if site.calls and site.blocked is None and site.weight is not None)
        self._batch_size = batch_size
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, found: Mapping[str, Sequence[CapturedOperands]]) -> None:
        """Add at most KEPT random rows of each call."""
        for name, calls in found.items():
            for one in calls:
                chosen = torch.randperm(one.input.shape[0], generator=self._generator)[:KEPT]
                self._rows.setdefault(name, []).append((one.input[chosen], one.grad_output[chosen]))

    def draws(self, weights: Mapping[str, Tensor], count: int) -> Iterator[dict[str, CapturedOperands]]:
        """`count` draws of M rows of each site, with replacement from all kept rows."""
        pooled = {
            name: (torch.cat([x for x, _ in calls]), torch.cat([dy for _, dy in calls]))
            for name, calls in self._rows.items()
        }
        rows = {site.name: site.rows.at(self._batch_size) for site in self.sites}
        for _ in range(count):
            drawn = {}
            for name, (x, dy) in pooled.items():
                chosen = torch.randint(len(x), (rows[name],), generator=self._generator)
                drawn[name] = CapturedOperands(x[chosen], weights[name], dy[chosen])
            yield drawn
