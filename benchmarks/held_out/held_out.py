"""Comparison of the errors that Probe predicts with the errors on held-out real batches.

    python -m benchmarks.held_out [--model NAME ...] [--out FILE.json] [--table FILE.md]

Trains each model, watches the last part of training with `loka.probe.probe.Probe`, freezes the weights, and captures
every site's operands in forward and backward passes over rows that were never trained on. This gives the actual MERE
and SQNR of each GEMM under each recipe. They are compared with the predictions of three samplers from the profile:
N(0,1), the paper's Gaussian, and the copula. Two more predictions from real data show what limits the samplers: batches
of *training* rows under the same frozen weights (their gap is the difference between the rows), and operands assembled
from single real rows of the watched part of training (their gap cannot be closed by any profile of rows).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.held_out.gaussian_samplers import GaussianSampler, NormalSampler
from benchmarks.held_out.held_out_capture import CapturedOperands, capture
from benchmarks.held_out.held_out_cases import StudyCase, StudySizes, held_out_batches, training_batches
from benchmarks.held_out.held_out_pool import RowPool
from benchmarks.held_out.held_out_rows import (
    COPULA,
    GAUSSIAN,
    NORMAL,
    POOLED_ROWS,
    TRAINING_ROWS,
    WHOLE_RUN,
    HeldOutRow,
    JudgedRow,
    interval,
)
from loka.bench.quality.training import build
from loka.bench.quality.training_calls import call
from loka.bench.quality.training_job import TrainingJob
from loka.errors import CheckFailedError, InputError
from loka.graph.sites.discover import find_sites
from loka.graph.sites.site import Site
from loka.model.build_model import build_model
from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Format, Gemm, Scaling
from loka.numerics.metrics import mere, sqnr
from loka.numerics.quantize import dequantize, quantize
from loka.numerics.recipe import OperandRecipe
from loka.probe.estimate import errors
from loka.probe.probe import Probe
from loka.probe.samplers import CopulaSampler, Sampler
from loka.probe.stats.site_stats import SiteStats

Say = Callable[[str], None]
Errors = tuple[float, float]  # MERE, SQNR in dB
Key = tuple[str, Gemm, OperandRecipe]

NOTES = "<!-- notes: what follows is written by hand, and kept when the tables are made anew -->"
RECIPES = tuple(
    OperandRecipe(format=format, scaling=scaling)
    for format in (Format.E4M3, Format.E5M2)
    for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE)
)
SAMPLERS: tuple[tuple[str, Callable[[SiteStats, int], Sampler]], ...] = (
    (NORMAL, NormalSampler),
    (GAUSSIAN, GaussianSampler),
    (COPULA, CopulaSampler),
)


def judge(case: StudyCase, sizes: StudySizes, *, whole_run: bool = False, say: Say = print) -> JudgedRow:
    """Train, record a profile, and compare every prediction with the held-out batches.

    With `whole_run` the model is trained again, watched from the first step to the last, and the samplers are judged on
    that profile too. Raises InputError if data or callables are missing, and CheckFailedError if the loss is not
    finite or the second training gives other weights.
    """
    clock = _Clock(say, f"{case.model} on {case.data}")
    job = case.job()
    sites = _sites(case)
    pool = RowPool(sites, job.batch_size, sizes.seed)
    model, late = train(case, job, sizes, first=max(0, case.steps - sizes.watched), every=sizes.every, pool=pool)
    profiles = {"": late}
    clock.counter_id("train and learn")
    if whole_run:
        again, whole = train(case, job, sizes, first=0, every=max(1, case.steps * sizes.every // sizes.watched))
        _same_weights(model, again)
        profiles[WHOLE_RUN] = whole
        clock.counter_id("train again, learn from all steps")
    actual = real_errors(model, sites, held_out_batches(job, sizes.batches, sizes.seed), job)
    seen = real_errors(model, sites, training_batches(job, sizes.batches, sizes.seed), job)
    clock.counter_id("real errors")
    predicted = {TRAINING_ROWS: seen, POOLED_ROWS: pooled_errors(pool, model, sites, job, sizes)}
    clock.counter_id("errors of pooled rows")
    for suffix, stats in profiles.items():
        for name, make in SAMPLERS:
            if suffix and name == NORMAL:
                continue  # it does not use the profile
            predicted[name + suffix] = predicted_errors(stats, sites, make, job.batch_size, sizes)
            clock.counter_id(f"predict: {name}{suffix}")
    rows = tuple(row for name, errors in predicted.items() for row in _rows(case, name, errors, actual))
    return JudgedRow(case, rows, clock.seconds)


def train(
    case: StudyCase, job: TrainingJob, sizes: StudySizes, first: int, every: int, pool: RowPool | None = None
) -> tuple[nn.Module, dict[str, SiteStats]]:
    """Train from the weights of `sizes.seed`, watched after step `first`; returns the model and statistics by site.

    `pool` gets rows of as many unsampled steps between (`every` is at least 2), from separate passes.
    """
    model = build(job, sizes.seed)
    optimizer = job.make_optimizer(model)
    batches = iter(job.batches(job.batch_size, sizes.seed))
    model.train()

    def step(number: int, keep: bool = False) -> None:
        inputs, target = _next(batches, number, case)
        if pool is not None and keep:
            pool.add(capture(model, pool.sites, inputs, target, job.loss))
        for group in optimizer.param_groups:
            group["lr"] = job.rate(number)
        optimizer.zero_grad(set_to_none=True)
        loss = job.loss(call(model, inputs), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if number == case.steps and not bool(loss.isfinite()):
            raise CheckFailedError(f"held-out comparison: the loss of {case.model} on {case.data} is {float(loss)}")

    for number in range(1, first + 1):
        step(number)
    with tempfile.TemporaryDirectory(prefix="loka-held-out-") as folder:
        path = Path(folder) / "held_out.yaml"
        path.write_text(case.policy, encoding="utf-8")
        with Probe(model, load_policy(path), every=every, rows=512) as probe:
            for number in range(first + 1, case.steps + 1):
                step(number, keep=(number - first) % every == 1)  # never a step that Probe samples
                probe.step()
            stats = probe.stats()
    return model, {site.name: site for site in stats}


def real_errors(
    model: nn.Module, sites: Sequence[Site], batches: Iterable[tuple[tuple[Tensor, ...], Tensor]], job: TrainingJob
) -> dict[Key, list[Errors]]:
    """MERE and SQNR of every GEMM under every recipe, for each call and batch; the weights do not change."""
    found: dict[Key, list[Errors]] = {}
    for inputs, target in batches:
        for name, calls in capture(model, sites, inputs, target, job.loss).items():
            for operands in calls:
                _add_errors(found, name, gemms_of(_named(sites, name)), operands)
    return found


def gemm_errors(a: Tensor, b: Tensor, recipes: Sequence[OperandRecipe]) -> list[Errors]:
    """MERE and SQNR of a @ b.T in float64, a (R, C) and b (S, C), both quantized by each recipe in turn."""
    reference = a.double() @ b.double().t()
    found = []
    for recipe in recipes:
        left, right = (dequantize(quantize(x, format=recipe.format, scaling=recipe.scaling)).double() for x in (a, b))
        out = left @ right.t()
        found.append((mere(out, reference).value, sqnr(out, reference)))
    return found


def predicted_errors(
    stats: Mapping[str, SiteStats],
    sites: Sequence[Site],
    make: Callable[[SiteStats, int], Sampler],
    batch_size: int,
    sizes: StudySizes,
) -> dict[Key, list[Errors]]:
    """MERE and SQNR of `sizes.draws` sampled pairs of operands, each under every recipe."""
    found: dict[Key, list[Errors]] = {}
    for place, site in enumerate(_wanted(sites)):
        if site.name not in stats:
            raise InputError(f"held-out comparison: Probe learned nothing of site {site.name!r}")
        sampler = make(stats[site.name], site.rows.at(batch_size))
        for gemm in gemms_of(site):
            generator = torch.Generator().manual_seed(_seed(sizes.seed, place, gemm))
            for _ in range(sizes.draws):
                drawn = sampler.draw(gemm, generator)
                for recipe in RECIPES:
                    found.setdefault((site.name, gemm, recipe), []).append(errors(drawn, (recipe, recipe)))
    return found


def pooled_errors(
    pool: RowPool, model: nn.Module, sites: Sequence[Site], job: TrainingJob, sizes: StudySizes
) -> dict[Key, list[Errors]]:
    """MERE and SQNR of operands assembled from single real rows of the watched steps, with the current weights."""
    ((inputs, target),) = training_batches(job, 1, sizes.seed)
    now = capture(model, sites, inputs, target, job.loss)
    found: dict[Key, list[Errors]] = {}
    for operands in pool.draws({name: calls[0].weight for name, calls in now.items()}, sizes.pooled):
        for name, one in operands.items():
            _add_errors(found, name, gemms_of(_named(sites, name)), one)
    return found


def gemms_of(site: Site) -> tuple[Gemm, ...]:
    """The GEMMs that a training step runs at a site."""
    return site.gemms


def save(judged: Sequence[JudgedRow], sizes: StudySizes, path: Path) -> None:
    """Write all rows as one JSON object."""
    cases = [asdict(one.case) | {"seconds": one.seconds} for one in judged]
    rows = [asdict(row) for one in judged for row in one.rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"sizes": asdict(sizes), "cases": cases, "rows": rows}, indent=1), encoding="utf-8")


def write_table(text: str, path: Path) -> None:
    """Write the tables; handwritten text in the file after the line NOTES is kept."""
    notes = path.read_text(encoding="utf-8").partition(NOTES)[2] if path.is_file() else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n{NOTES}{notes or chr(10)}", encoding="utf-8")


class _Clock:
    """Reports and records the wall time of each part."""

    def __init__(self, say: Say, label: str) -> None:
        self.say, self.label, self.seconds = say, label, dict[str, float]()
        self._last = time.perf_counter()

    def counter_id(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part] = round(now - self._last, 1)
        self.say(f"{self.label}: {part}, {self.seconds[part]} s")
        self._last = now


def _add_errors(found: dict[Key, list[Errors]], name: str, gemms: Sequence[Gemm], operands: CapturedOperands) -> None:
    for gemm in gemms:
        a, b = operands.of(gemm)
        for recipe, pair in zip(RECIPES, gemm_errors(a, b, RECIPES), strict=True):
            found.setdefault((name, gemm, recipe), []).append(pair)


def _rows(
    case: StudyCase, sampler: str, predicted: Mapping[Key, list[Errors]], actual: Mapping[Key, list[Errors]]
) -> list[HeldOutRow]:
    rows = []
    for (site, gemm, recipe), real in actual.items():
        guess = predicted[(site, gemm, recipe)]
        rows.append(
            HeldOutRow(
                model=case.model,
                data=case.data,
                site=site,
                gemm=gemm,
                format=recipe.format,
                scaling=recipe.scaling,
                sampler=sampler,
                predicted_mere=interval([pair[0] for pair in guess]),
                predicted_sqnr=interval([pair[1] for pair in guess]),
                actual_mere=interval([pair[0] for pair in real]),
                actual_sqnr=interval([pair[1] for pair in real]),
            )
        )
    return rows


def _sites(case: StudyCase) -> tuple[Site, ...]:
    return find_sites(build_model(case.factory, case.inputs, case.batch_size)).sites


def _wanted(sites: Iterable[Site]) -> list[Site]:
    return [site for site in sites if site.calls and site.blocked is None and site.weight is not None]


def _named(sites: Iterable[Site], name: str) -> Site:
    return next(site for site in sites if site.name == name)


def _seed(seed: int, place: int, gemm: Gemm) -> int:
    """Seed for a GEMM of a site, the same for every sampler."""
    return (seed * 10_007 + place) * len(Gemm) + tuple(Gemm).index(gemm)


def _next(batches: object, number: int, case: StudyCase) -> tuple[tuple[Tensor, ...], Tensor]:
    found: tuple[tuple[Tensor, ...], Tensor] | None = next(batches, None)  # type: ignore[call-overload]
    if found is None:
        raise InputError(f"held-out comparison: {case.batches} ended before step {number} of {case.steps}")
    return found


def _same_weights(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    differing = [name for name, value in one.state_dict().items() if not torch.equal(value, theirs[name])]
    if differing:
        raise CheckFailedError(
            f"held-out comparison: a second training gave other weights at {differing[0]!r}: training is not "
            "reproducible here, or watching it changes it"
        )
