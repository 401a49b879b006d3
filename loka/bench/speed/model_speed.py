"""Speed of the zoo's dense models in every variant, at their benchmark batch sizes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import torch
from torch import Tensor, nn

from loka import zoo
from loka.bench.results import Section
from loka.bench.speed import roofline
from loka.bench.speed.comparison import Comparison, Progress, compare
from loka.bench.speed.roofline import Peaks, SiteWork, model_us
from loka.bench.speed.steps import SEED, make_work
from loka.bench.subjects.modded import with_mods
from loka.bench.subjects.packages import BuiltPackage, Subject, Workshop
from loka.bench.subjects.peers import takes_fp8
from loka.bench.subjects.variants import BASELINE, SHOWN, Variant
from loka.errors import InputError
from loka.plan.planner import model_sites
from loka.sites.site import GemmKind, Site

MEASURED_MS = 800  # of replays: a step takes up to 40 ms, and the spread needs several samples
PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum")  # as Site.fed_by names them
LINEARS = (GemmKind.LINEAR, GemmKind.FUNCTIONAL_LINEAR)


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model of the zoo and its batch size in benchmarks. Its inputs require gradients."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    batch: int


MODELS = {
    "wukong_small": BenchModel(zoo.wukong_small, zoo.wukong_small_inputs, 16384),
    "wukong_small_mods": BenchModel(
        partial(with_mods, zoo.wukong_small, zoo.wukong_small_inputs), zoo.wukong_small_inputs, 16384
    ),
    "wukong_large": BenchModel(zoo.wukong_large, zoo.wukong_large_inputs, 4096),
    "wukong_large_mods": BenchModel(
        partial(with_mods, zoo.wukong_large, zoo.wukong_large_inputs), zoo.wukong_large_inputs, 4096
    ),
    "dcnv2": BenchModel(zoo.dcnv2, zoo.dcnv2_inputs, 8192),
}


def named(names: Sequence[str]) -> tuple[str, ...]:
    """The models to measure; all if none is named. Raises InputError for an unknown name."""
    for name in names:
        if name not in MODELS:
            near = difflib.get_close_matches(name, MODELS, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            if name.endswith((".yaml", ".yml")):
                hint = "; a policy's own model is measured with --ablate mods"
            raise InputError(f"loka bench model: there is no model {name!r}; there are {', '.join(MODELS)}{hint}")
    return tuple(names) or tuple(MODELS)


def subject(name: str) -> Subject:
    """A model of the zoo as a Subject to generate a package for."""
    source = f'''\
"""{name} of the zoo, for the planner."""

from loka.bench.speed import model_speed


def build():
    return model_speed.MODELS[{name!r}].build()


def inputs(batch_size):
    return model_speed.MODELS[{name!r}].inputs(batch_size)
'''
    return Subject(name, source, MODELS[name].batch)


def run_models(
    names: Sequence[str], variants: Sequence[Variant], modes: Sequence[bool], progress: Progress
) -> tuple[Section, ...]:
    """Measure every variant of every model in each mode (True: training) on the current GPU."""
    peaks = roofline.peaks_of(torch.cuda.get_device_name())
    with Workshop() as workshop:
        found = [
            compare(name, partial(_comparison, name, modes, workshop, peaks, progress), variants, modes, progress)
            for name in names
        ]
    return tuple(
        Section(
            "one training step" if training else "one inference",
            tuple(cell for cells in found for cell in cells[training]),
            BASELINE,
            SHOWN,
        )
        for training in modes
    )


def _comparison(
    name: str, modes: Sequence[bool], workshop: Workshop, peaks: Peaks | None, progress: Progress
) -> Comparison:
    model = MODELS[name]
    torch.manual_seed(SEED)
    with torch.device("cuda"):
        base = model.build()
    examples = tuple(value.detach().cuda() for value in model.inputs(model.batch))
    work = make_work(name, base, examples, modes, MEASURED_MS)
    sites = model_sites(*workshop.add(subject(name)), model.batch) if peaks is not None else ()

    def bound(variant: Variant, training: bool, made: BuiltPackage | None) -> float | None:
        if peaks is None:
            return None
        return model_us(
            site_works(sites, model.batch, fp8_sites(variant, sites, made)), variant.precision, training, peaks
        )

    return Comparison(work, subject(name), workshop, bound, progress)


def fp8_sites(variant: Variant, sites: Iterable[Site], made: BuiltPackage | None) -> frozenset[str]:
    """Names of the sites that a variant runs in FP8, by the plan of its package or by torchao's filter."""
    if made is not None:
        return frozenset(plan.site.name for plan in made.plan.sites if plan.fp8)
    if not variant.torchao:
        return frozenset()
    return frozenset(site.name for site in sites if site.kind is GemmKind.LINEAR and takes_fp8(site.k, site.n))


def site_works(sites: Iterable[Site], batch: int, fp8: frozenset[str]) -> tuple[SiteWork, ...]:
    """The work that the bound counts for each site.

    A linear fed by an elementwise operation has a pass before it. The other products of one module are assumed to read
    one tensor: only the largest fed one has a pass, so that a shared tensor counts once. A product that runs once for
    each sample counts as one with all rows.
    """
    passed: dict[str, Site] = {}
    for site in sites:
        if site.kind not in LINEARS and _is_fed(site):
            largest = passed.get(site.owner)
            if largest is None or site.rows.at(batch) * site.k > largest.rows.at(batch) * largest.k:
                passed[site.owner] = site
    works = []
    for site in sites:
        rows = site.rows.at(batch)
        fed = _is_fed(site) if site.kind in LINEARS else passed.get(site.owner) is site
        works.append(SiteWork(rows, site.k, site.n, site.calls, site.name in fp8, rows * site.k if fed else 0))
    return tuple(works)


def _is_fed(site: Site) -> bool:
    """True if an elementwise operation stands between this GEMM and the one before."""
    return any(True for _ in takewhile(lambda operation: operation not in PRODUCTS, site.fed_by))
