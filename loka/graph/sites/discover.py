"""Discovers every GEMM of a model, in whatever form, in the graphs of a training and an evaluation forward.

torch reads them, with a symbol for the batch. Where it cannot, and where the modules are so many that it would take
minutes, the forwards run on fake tensors at two batch sizes, or on a few real samples if they ask for values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from loka.errors import InputError
from loka.gc import deferred_gc
from loka.graph.capture.captured import CannotCaptureError
from loka.graph.sites.captured_forward import NotAtAnyBatchError, captured_forwards
from loka.graph.sites.flow import Flow, flow_of
from loka.graph.sites.forward import Forward
from loka.graph.sites.merge_calls import (
    MeasuredCall,
    Run,
    by_site,
    check_alike,
    flops_of,
    in_model_order,
    measure,
    never_called,
    siblings,
    to_sites,
    total_flops,
)
from loka.graph.sites.operations import TRANSFORMED, Operations, operations_of
from loka.graph.sites.recording import record_fake, record_real, undisturbed
from loka.graph.sites.site import Site
from loka.graph.sites.train_eval_diff import depends_on_mode, fused_in_evaluation
from loka.model.build_model import BuiltModel
from loka.model.callables import describe_error, place_of
from loka.model.inputs import tensors_in

SAMPLES = 64  # in the largest run on real samples
READ = 200  # modules above which torch would read for many seconds: the forward is run instead
MANY = 1000  # modules above which the evaluation forward is skipped if nothing depends on the mode
FIXED = "the batch size is written into the forward: rows follow it only as far as one size shows"
NUMBERS = "the forward reads values: it was run on a few real samples, and other values may call other GEMMs"


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


@dataclass(frozen=True, slots=True)
class Forwards:
    """What a model does in training and in evaluation, at one or more batch sizes."""

    training: tuple[Run, ...]
    evaluation: tuple[Run, ...]  # () if it was not run: it is taken to do what training does
    from_data: bool
    notes: tuple[str, ...] = ()

    @property
    def modes(self) -> tuple[Operations, ...]:
        """What is done in training, and in evaluation if that was run."""
        return tuple(runs[0][1] for runs in (self.training, self.evaluation) if runs)

    @property
    def called(self) -> frozenset[str]:
        """Modules whose forward runs, in either mode."""
        return frozenset().union(*(mode.called for mode in self.modes))


def find_sites(built: BuiltModel) -> SiteMap:
    """Find every GEMM of a model. The model, its buffers, its hooks and the random state are unchanged.

    Raises:
        InputError: The forward raises, or depends on its inputs' values and cannot be run on a few real samples.
    """
    with deferred_gc():  # graphs are many small objects, none of them garbage yet
        return sites_in(built, forwards_of(built))


def forwards_of(built: BuiltModel, sizes: bool = True) -> Forwards:
    """The forwards of a model, from the first attempt to see them that works.

    Without `sizes` at other batches they are run at once, which takes a tenth of the time of reading them. The model,
    its buffers, its hooks and the random state are unchanged. Raises InputError where no attempt works.
    """
    modules = dict(built.module.named_modules())
    usual, note = _unusual_batch(built), ""
    if sizes and len(modules) <= READ:
        try:
            with undisturbed():
                return _read_once(captured_forwards(built, usual), modules, built.batch_size, usual)
        except NotAtAnyBatchError:
            pass
        except CannotCaptureError as error:
            kind = type(built.module).__name__
            note = f"torch cannot read the forward of {kind} as one graph, so it was run: {error}"
    modes = [True, False] if len(modules) <= MANY or depends_on_mode(modules) is not None else [True]
    few = tuple(sorted({2, 3, min(built.batch_size, SAMPLES)}))
    attempts: tuple[tuple[_Record, tuple[int, ...], tuple[str, ...]], ...] = (
        (record_fake, (usual, 2 * usual), (note,)),
        (record_fake, (built.batch_size,), (FIXED,)),
        (record_real, few, (note, NUMBERS)),
        (record_real, (2, 3), (note, NUMBERS)),
        (record_real, (built.batch_size,), (note, NUMBERS)),
    )
    first: Exception | None = None
    last: Exception | None = None
    for record, batches, notes in attempts:
        if _needs_numbers(first) and record is record_fake:
            continue
        try:
            with undisturbed():
                runs = [(size, record(built, size, modes)) for size in (batches if sizes else batches[:1])]
                return _forwards(runs, modules, record is record_real, tuple(filter(None, notes)))
        except Exception as error:  # noqa: BLE001 - a forward can raise anything; the next attempt may work
            if first is None or (_needs_numbers(error) and not _needs_numbers(first)):
                first = error
            last = error
    raise _refusal(built, first, last) from (last or first)


def _read_once(read: tuple[Forward, Forward], modules: dict[str, nn.Module], batch: int, usual: int) -> Forwards:
    """Forwards with symbols as sizes, which are the same at any batch size."""
    training = operations_of(read[0], modules)
    evaluation = training if read[1] is read[0] else operations_of(read[1], modules)
    if any(type(size) is int and size % usual == 0 for call in training.calls for size in (call.m, call.k, call.n)):
        raise NotAtAnyBatchError("the batch has become a number, perhaps in numpy, which sets no condition")
    sizes = (batch, 2 * batch, 3 * batch)
    return Forwards(tuple((n, training) for n in sizes), tuple((n, evaluation) for n in sizes), from_data=False)


_Record = Callable[[BuiltModel, int, Iterable[bool]], list[Forward]]


def _forwards(
    runs: Sequence[tuple[int, Sequence[Forward]]],
    modules: dict[str, nn.Module],
    from_data: bool,
    notes: tuple[str, ...],
) -> Forwards:
    """The operations of forwards in one or two modes, at each batch size. Raises UnlikeRunsError."""
    training, *evaluation = (
        tuple((size, operations_of(forward, modules)) for (size, _), forward in zip(runs, forwards, strict=True))
        for forwards in zip(*(forwards for _, forwards in runs), strict=True)
    )
    for mode in (training, *evaluation):
        check_alike(mode)
    return Forwards(training, evaluation[0] if evaluation else (), from_data, notes)


def sites_in(built: BuiltModel, forwards: Forwards) -> SiteMap:
    """The GEMMs in the forwards of a model. Raises InputError for one that has nothing to multiply."""
    modules = dict(built.module.named_modules())
    order = {name: place for place, name in enumerate(modules)}
    notes: list[str] = []
    training, row_notes = measure(forwards.training, built.batch_size, forwards.from_data)
    evaluation = None
    if forwards.evaluation:
        evaluation, _ = measure(forwards.evaluation, built.batch_size, forwards.from_data)
    else:
        notes.append(
            f"evaluation was taken to call what training calls: none of the {len(modules)} modules asks for the mode"
        )
    sites, merge_notes = to_sites(training, evaluation, order, built.batch_size)
    sites, fused_notes = _without_fused(sites, fused_in_evaluation(modules))
    sites = in_model_order((*sites, *never_called(built.module, forwards.called, sites)), order)
    empty = next((site for site in sites if not site.k or not site.n), None)
    if empty is not None:
        raise InputError(
            f"model: the weight of {empty.name!r} has {empty.k} inputs and {empty.n} outputs: there is nothing to "
            f"multiply; give both a size, or take it out of the model"
        )
    others = _other_notes(forwards.training, training, built.batch_size)
    return SiteMap(
        sites=sites,
        notes=(*notes, *row_notes, *forwards.notes, *merge_notes, *fused_notes, *others),
        siblings=siblings(training, order),
        flow=flow_of(by_site(training, order)),
    )


def _unusual_batch(built: BuiltModel) -> int:
    """A size at or just above the batch size that no parameter and no other dimension of the inputs has.

    So the batch cannot be confused with another size that it happens to equal.
    """
    taken = {0, 1}
    for tensor in (*built.module.parameters(), *built.module.buffers()):
        taken.update(tensor.shape)
    for tensor in tensors_in((built.args, built.kwargs)):
        taken.update(tensor.shape[1:])
    size = built.batch_size
    while size in taken:
        size += 1
    return size


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


def _other_notes(runs: Sequence[Run], calls: list[MeasuredCall], batch: int) -> tuple[str, ...]:
    """Notes on products that are no sites: convolutions and recurrent layers with their share, and what is not seen."""
    flops: Counter[str] = Counter()
    count: Counter[str] = Counter()
    others = runs[0][1].others
    for other in others:
        count[other.op] += 1
        flops[other.op] += flops_of(runs, batch, other)
    total = total_flops(calls) + sum(flops.values())
    notes = [
        f"{count[op]} x {op}: not replaced, and not among the sites: {100 * flops[op] / total:.3g} % of the FLOPs of a "
        "forward"
        for op in flops
        if flops[op]
    ]
    owners = sorted({other.owner for other in others if other.op == TRANSFORMED})
    names = ", ".join(repr(name) for name in owners[:3]) + (", ..." if len(owners) > 3 else "")
    unseen = f"{TRANSFORMED} in {names}: not seen, neither among the sites nor in their shares"
    return (*notes, unseen) if owners else tuple(notes)
