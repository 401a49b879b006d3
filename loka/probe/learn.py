"""Completes recorded statistics for planning: the error of each candidate recipe, and the findings."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch

from loka.errors import InputError
from loka.graph.sites.site import Site
from loka.mods.suggestions import Suggestions
from loka.numerics.enums import OPERANDS, Compute, Gemm, Operand
from loka.numerics.recipe import OperandPair
from loka.policy.settings import SiteSettings
from loka.probe.estimate import candidates, estimate_site, full_precision
from loka.probe.finding_evidence import BiasTrack
from loka.probe.findings import find
from loka.probe.profile.profile import Estimate, Finding, RecordedStats, SiteProfile, with_ranges
from loka.probe.profile.summarise import summarise
from loka.probe.sensitivity import HeldOut, OnSite, measure_ne
from loka.probe.stats.site_stats import SiteStats

LIMIT = 16  # sampled pairs of operands for each GEMM, at most
MOST_WORKERS = 8  # sites at a time: each holds its drawn operands


def finish(
    recorded: RecordedStats,
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    *,
    batch_size: int,
    limit: int = LIMIT,
    seed: int = 0,
    bias_norms: Mapping[str, BiasTrack] | None = None,
    suggestible: Mapping[str, Suggestions] | None = None,
    progress: OnSite | None = None,
) -> RecordedStats:
    """`recorded` with an estimate for each GEMM and candidate recipe, and with its findings.

    `sites` and `settings` are those of the policy, in the same order; the candidates are the standard ones and the
    policy's own, each judged against the site's own budget. A GEMM that the policy keeps gets none. Changes of NE stay
    those of `recorded` (`with_ne`). `batch_size` gives M, `limit` the most sampled pairs of operands for a GEMM.
    `bias_norms`: from `track_biases`; `suggestible`: possible mods by site. Equal arguments give equal
    results, whatever the number of CPUs, on which sites are estimated side by side.

    Raises InputError if `recorded` has a site that the model lacks or that has another shape there.
    """
    known = {site.name: (site, wanted) for site, wanted in zip(sites, settings, strict=True)}
    check_sites(recorded, sites)
    profiles, findings, suggested = [], list[Finding](), suggestible or {}

    def estimated(stats: SiteStats) -> tuple[SiteProfile, tuple[Estimate, ...]]:
        site, wanted = known[stats.name]
        summary = summarise(stats, (), site.rows.at(batch_size))
        # A weight that is not finite makes every error infinite.
        broken = stats.weight is not None and stats.weight.nonfinite
        judged = {
            gemm: recipes
            for gemm, recipes in recipes_of(site, wanted, summary).items()
            if not (broken and Operand.WEIGHT in OPERANDS[gemm])
        }
        return summary, estimate_site(stats, judged, wanted.budget, summary.rows, seed, limit)

    with full_precision(), _workers(len(recorded.stats)) as workers:
        for stats, (summary, estimates) in zip(recorded.stats, workers.map(estimated, recorded.stats), strict=True):
            site, wanted = known[stats.name]
            before = recorded.profile.site(stats.name)
            summary = replace(summary, estimates=estimates, ne=before.ne if before is not None else ())
            profiles.append(summary)
            bias = (bias_norms or {}).get(site.name)
            findings.extend(find(site, stats, summary, wanted, bias, suggested.get(site.name)))
            if progress is not None:
                progress(len(profiles), len(recorded.stats))
    profile = replace(recorded.profile, sites=tuple(profiles), findings=tuple(findings))
    return replace(recorded, profile=profile)


@contextmanager
def _workers(sites: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads, each of which computes alone: its work is many small operations, for which several threads
    wait for one another more than they compute, and their number would change the last digits of sums.
    """
    threads = torch.get_num_threads()
    count = max(1, min(sites, os.cpu_count() or 1, MOST_WORKERS))
    pool = ThreadPoolExecutor(count, "loka-estimate", initializer=lambda: torch.set_num_threads(1))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # the workers' number is the default of every thread to come


def check_sites(recorded: RecordedStats, sites: Sequence[Site]) -> None:
    """Raises InputError, with both shapes, if the record is of another model than that with `sites`."""
    shapes = {site.name: (site.k, site.n) for site in sites}
    for stats in recorded.stats:
        shape = shapes.get(stats.name)
        if shape is None:
            raise InputError(
                f"site {stats.name!r} of the profile is not in the model; the model changed: probe it again"
            )
        if shape != (stats.k, stats.n):
            raise InputError(
                f"site {stats.name!r} has K = {stats.k}, N = {stats.n} in the profile and K = {shape[0]}, "
                f"N = {shape[1]} in the model; the model changed: probe it again"
            )


def with_ne(
    recorded: RecordedStats,
    sites: Sequence[Site],
    settings: Sequence[SiteSettings],
    held_out: HeldOut,
    first_loss: float,
    progress: OnSite | None = None,
    seconds: float = math.inf,
) -> RecordedStats:
    """`recorded` with the change of NE by each GEMM: of fprop for all recipes, of the others for the policy's own.

    Sites that were not seen, and GEMMs that the policy keeps, get none. Sites with the most FLOPs come first, and none
    is begun after `seconds`. `first_loss` is the loss on the held-out
    batches before training. Raises what the model raises.
    """
    seen = {site.name: site for site in recorded.profile.sites if site.operands}
    recipes = {
        site.name: {
            gemm: pairs if gemm is Gemm.FPROP else pairs[:1]
            for gemm, pairs in recipes_of(site, wanted, seen[site.name]).items()
        }
        for site, wanted in sorted(zip(sites, settings, strict=True), key=lambda pair: -pair[0].share)
        if site.name in seen
    }
    judged = {site: by_gemm for site, by_gemm in recipes.items() if by_gemm}
    found = measure_ne(held_out, judged, first_loss, progress, seconds)
    profiles = tuple(replace(site, ne=found.get(site.name, ())) for site in recorded.profile.sites)
    return replace(recorded, profile=replace(recorded.profile, sites=profiles))


def recipes_of(site: Site, settings: SiteSettings, seen: SiteProfile) -> dict[Gemm, tuple[OperandPair, ...]]:
    """The recipes to judge for each GEMM of a site: the policy's own, then the standard candidates.

    A GEMM that the policy keeps is left out. A static range without `amax` takes the largest |x| seen, as planning
    does; if there is none, the policy's own recipe is left out.
    """
    found = {}
    for gemm, wanted in settings.gemms.items():
        if wanted.compute is Compute.KEEP or gemm not in site.gemms:
            continue
        own, lacking = with_ranges(seen, gemm, wanted.operands)
        found[gemm] = tuple(dict.fromkeys((*((own,) if lacking is None else ()), *candidates(gemm))))
    return found
