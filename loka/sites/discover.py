"""Discovers every GEMM of a model, in whatever form, from one forward on fake tensors.

The model is copied with fake tensors, the batch is kept symbolic, and one forward is recorded in training and one in
evaluation. If the forward reads values, which fake tensors do not have, a copy is run on a few real samples instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from loka.errors import InputError
from loka.sites.build_model import BuiltModel
from loka.sites.callables import describe_error, place_of
from loka.sites.flow import Flow, flow_of
from loka.sites.merge_calls import (
    MeasuredCall,
    UnlikeRunsError,
    by_site,
    in_model_order,
    measure_linear,
    measure_pair,
    measure_samples,
    measure_single,
    never_called,
    siblings,
    to_sites,
    total_flops,
)
from loka.sites.neighbours import TRANSFORMED
from loka.sites.site import Site
from loka.sites.symbolic_inputs import value_at
from loka.sites.train_eval_diff import depends_on_mode, fused_in_evaluation
from loka.sites.watched_forward import Watched, undisturbed, unusual_batch, watch_fake, watch_real

SAMPLES = 64  # in the largest run on real samples
MANY = 1000  # modules above which the evaluation forward is skipped if nothing depends on the mode


@dataclass(frozen=True)
class SiteMap:
    """All GEMMs of a model in model order: by the position of the owning module, then by the order of the calls.

    Recurrent layers, and convolutions of a kernel size above 1, are not included; `notes` names them.
    """

    sites: tuple[Site, ...]
    notes: tuple[str, ...]
    siblings: tuple[tuple[str, ...], ...] = ()  # names of sites that seem to read one tensor
    flow: Flow = field(default_factory=Flow)  # what products become

    def __getitem__(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)


@dataclass(frozen=True)
class _Found:
    training: list[MeasuredCall]
    evaluation: list[MeasuredCall] | None
    watched: Watched
    notes: tuple[str, ...] = ()


def find_sites(built: BuiltModel) -> SiteMap:
    """Find every GEMM of a model. The model, its buffers, its hooks and the random state are unchanged.

    Raises:
        InputError: The forward raises, or depends on its inputs' values and cannot be run on a few real samples.
    """
    return find_sites_watched(built)[0]


def find_sites_watched(built: BuiltModel) -> tuple[SiteMap, Watched]:
    """`find_sites`, and the recorded forwards in which they were found."""
    with undisturbed():
        return _find_sites(built)


def _find_sites(built: BuiltModel) -> tuple[SiteMap, Watched]:
    modules = dict(built.module.named_modules())
    order = {name: place for place, name in enumerate(modules)}
    notes: list[str] = []
    evaluate = len(modules) <= MANY or depends_on_mode(modules) is not None
    if not evaluate:
        notes.append(
            f"evaluation was taken to call what training calls: none of the {len(modules)} modules asks for the mode"
        )
    found = _find(built, evaluate)
    sites, merge_notes = to_sites(found.training, found.evaluation, order, built.batch_size)
    sites, fused_notes = _without_fused(sites, fused_in_evaluation(modules))
    sites = in_model_order((*sites, *never_called(built.module, found.watched.called, sites)), order)
    empty = next((site for site in sites if not site.k or not site.n), None)
    if empty is not None:
        raise InputError(
            f"model: the weight of {empty.name!r} has {empty.k} inputs and {empty.n} outputs: there is nothing to "
            f"multiply; give both a size, or take it out of the model"
        )
    notes.extend(
        (*found.notes, *merge_notes, *fused_notes, *_other_notes(found, built.batch_size), *_transformed_notes(found))
    )
    sitemap = SiteMap(
        sites=sites,
        notes=tuple(notes),
        siblings=siblings(found.training, order),
        flow=flow_of(by_site(found.training, order)),
    )
    return sitemap, found.watched


def _find(built: BuiltModel, evaluate: bool) -> _Found:
    """The sites from the first attempt to run the model that works; raises an InputError if none does."""
    fixed = "the batch size is written into the forward: rows follow it only as far as one size shows"
    numbers = "the forward reads values: it was run on a few real samples, and other values may call other GEMMs"
    usual = unusual_batch(built)
    attempts: list[tuple[bool, Callable[[], _Found]]] = [
        (False, lambda: _symbolic(built, usual, evaluate)),
        (False, lambda: _pair(built, usual, 2 * usual, watch_fake, evaluate)),
        (False, lambda: _single(built, watch_fake, evaluate, fixed)),
        (True, lambda: _samples(built, evaluate, numbers)),
        (True, lambda: _pair(built, 2, 3, watch_real, evaluate, numbers)),
        (True, lambda: _single(built, watch_real, evaluate, numbers)),
    ]
    first: Exception | None = None
    last: Exception | None = None
    for real, attempt in attempts:
        if _needs_numbers(first) and not real:
            continue
        try:
            return attempt()
        except Exception as error:  # noqa: BLE001 - a forward can raise anything; the next attempt may work
            if first is None or (_needs_numbers(error) and not _needs_numbers(first)):
                first = error
            last = error
    raise _refusal(built, first, last) from (last or first)


def _needs_numbers(error: Exception | None) -> TypeGuard[Exception]:
    """True if a forward failed for want of values, which fake tensors do not have."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # takes a quarter of a second

    kinds = DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException
    return isinstance(error, (*kinds, GuardOnDataDependentSymNode))


def _refusal(built: BuiltModel, first: Exception | None, last: Exception | None) -> InputError:
    kind = type(built.module).__name__
    if _needs_numbers(first):
        where = f" at {place}" if (place := place_of(first)) else ""
        return InputError(
            f"model: the forward of {kind} reads the value of a tensor{where}, which hides its GEMMs, "
            f"and running it on real samples failed too ({describe_error(last or first)}); take that branch "
            f"out of the forward, or decide it in the factory"
        )
    error = last or first
    return InputError(
        f"model: the forward of {kind} raised {describe_error(error) if error else 'an error'}; make "
        f"model(*inputs({built.batch_size})) work first"
    )


def _symbolic(built: BuiltModel, usual: int, evaluate: bool) -> _Found:
    watched = watch_fake(built, usual, evaluate, symbolic=True)
    training, notes = measure_linear(watched.training, built.batch_size)
    evaluation = None if watched.evaluation is None else measure_linear(watched.evaluation, built.batch_size)[0]
    return _Found(training, evaluation, watched, notes)


def _pair(
    built: BuiltModel,
    one: int,
    two: int,
    watch: Callable[[BuiltModel, int, bool], Watched],
    evaluate: bool,
    note: str = "",
) -> _Found:
    first, second = watch(built, one, evaluate), watch(built, two, evaluate)
    sizes = (one, two, built.batch_size)
    training, notes = measure_pair(first.training, second.training, *sizes)
    evaluation = None
    if first.evaluation is not None and second.evaluation is not None:
        evaluation, _ = measure_pair(first.evaluation, second.evaluation, *sizes)
    return _Found(training, evaluation, first, (*notes, *((note,) if note else ())))


def _samples(built: BuiltModel, evaluate: bool, note: str) -> _Found:
    """Runs on some numbers of real samples: rows may follow the batch, or come from data."""
    sizes = (2, 3, min(built.batch_size, SAMPLES))
    if len(set(sizes)) < len(sizes):
        raise UnlikeRunsError(f"{built.batch_size} samples are too few for three runs")
    runs = [watch_real(built, size, evaluate) for size in sizes]
    training, notes = measure_samples([(n, run.training) for n, run in zip(sizes, runs, strict=True)], built.batch_size)
    evaluation = None
    if evaluate:
        calls = [(n, run.evaluation or ()) for n, run in zip(sizes, runs, strict=True)]
        evaluation, _ = measure_samples(calls, built.batch_size)
    return _Found(training, evaluation, runs[0], (*notes, note))


def _single(built: BuiltModel, watch: Callable[[BuiltModel, int, bool], Watched], evaluate: bool, note: str) -> _Found:
    watched = watch(built, built.batch_size, evaluate)
    evaluation = None if watched.evaluation is None else measure_single(watched.evaluation, built.batch_size)
    return _Found(measure_single(watched.training, built.batch_size), evaluation, watched, (note,))


def _without_fused(sites: tuple[Site, ...], fused: tuple[str, ...]) -> tuple[tuple[Site, ...], tuple[str, ...]]:
    """Remove the evaluation calls of nn.Linears that torch's fused encoder layers bypass."""
    bypassed = {f"{name}.{linear}" if name else linear for name in fused for linear in ("linear1", "linear2")}
    kept = tuple(replace(site, calls_eval=0) if site.name in bypassed else site for site in sites)
    if not any(site.name in bypassed for site in sites):
        return sites, ()
    names = ", ".join(repr(name) for name in fused[:3]) + (", ..." if len(fused) > 3 else "")
    return kept, (
        f"nn.TransformerEncoderLayer {names}: in evaluation without gradients torch runs it as one fused kernel, which "
        f"reads linear1 and linear2 without calling them: they are called in training alone",
    )


def _other_notes(found: _Found, batch: int) -> tuple[str, ...]:
    """Notes on convolutions and recurrent layers that are no sites, by operation, with their share."""
    flops: Counter[str] = Counter()
    count: Counter[str] = Counter()
    gemms = total_flops(found.training)
    for other in found.watched.others:
        count[other.op] += 1
        flops[other.op] += sum(2 * math.prod(value_at(size, batch) for size in term) for term in other.terms)
    total = gemms + sum(flops.values())
    return tuple(
        f"{count[op]} x {op}: not replaced, and not among the sites: {100 * flops[op] / total:.3g} % of the FLOPs of a "
        "forward"
        for op in flops
        if flops[op]
    )


def _transformed_notes(found: _Found) -> tuple[str, ...]:
    """A note on products whose sizes cannot be seen."""
    owners = sorted({other.owner for other in found.watched.others if other.op == TRANSFORMED})
    names = ", ".join(repr(name) for name in owners[:3]) + (", ..." if len(owners) > 3 else "")
    return (f"{TRANSFORMED} in {names}: not seen, neither among the sites nor in their shares",) if owners else ()
