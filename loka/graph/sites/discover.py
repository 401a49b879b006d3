"""Discovers every GEMM of a model, in whatever form, in the graphs of a training and an evaluation forward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from loka.errors import InputError
from loka.graph.sites.flow import Flow, flow_of
from loka.graph.sites.forwards import Forwards, forwards_of
from loka.graph.sites.merge_calls import (
    calls_by_site,
    flops_of,
    in_model_order,
    measure,
    never_called,
    siblings,
    to_sites,
    total_flops,
)
from loka.graph.sites.operations import TRANSFORMED, OtherProduct
from loka.graph.sites.site import Opaque, Site
from loka.graph.sites.train_eval_diff import is_fused
from loka.model.build_model import BuiltModel


@dataclass(frozen=True)
class SiteMap:
    """All GEMMs of a model in model order: by the position of the owning module, then by the order of the calls.

    Recurrent layers, and convolutions of a kernel size above 1, are not among them: they are `opaque`, and count in the
    shares. `notes` names them.
    """

    sites: tuple[Site, ...]
    notes: tuple[str, ...]
    siblings: tuple[tuple[str, ...], ...] = ()  # names of sites that seem to read one tensor
    flow: Flow = field(default_factory=Flow)  # what products become
    opaque: tuple[Opaque, ...] = ()

    def __getitem__(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)


def find_sites(built: BuiltModel) -> SiteMap:
    """Find every GEMM of a model. The model, its buffers, its hooks and the random state are unchanged.

    Raises:
        InputError: The forward raises, or depends on its inputs' values and cannot be run on a few real samples.
    """
    return sites_in(built, forwards_of(built))


def sites_in(built: BuiltModel, forwards: Forwards) -> SiteMap:
    """The GEMMs in the forwards of a model. Raises InputError for one that has nothing to multiply."""
    modules = dict(built.module.named_modules())
    order = {name: place for place, name in enumerate(modules)}
    training, row_notes = measure(forwards.training.calls, forwards.samples, built.batch_size, forwards.from_data)
    evaluation = training
    if forwards.evaluation is not forwards.training:
        evaluation, _ = measure(forwards.evaluation.calls, forwards.samples, built.batch_size, forwards.from_data)
    opaque = _opaque(forwards, total_flops(training), total_flops(evaluation), built.batch_size)
    total = total_flops(training) + sum(each.flops.at(built.batch_size) for each in opaque)
    groups = calls_by_site(training, evaluation, order)
    in_training = {name: calls for name, (calls, _) in groups.items() if calls}
    sites, merge_notes = to_sites(groups, built.batch_size, total)
    sites, fused_notes = _without_fused(sites, [name for name, module in modules.items() if is_fused(module)])
    sites = in_model_order((*sites, *never_called(built.module, forwards.called, sites)), order)
    empty = next((site for site in sites if not site.k or not site.n), None)
    if empty is not None:
        raise InputError(
            f"model: the weight of {empty.name!r} has {empty.k} inputs and {empty.n} outputs: there is nothing to "
            f"multiply; give both a size, or take it out of the model"
        )
    return SiteMap(
        sites=sites,
        notes=(*row_notes, *forwards.notes, *merge_notes, *fused_notes, *_other_notes(forwards, opaque)),
        siblings=siblings(in_training),
        flow=flow_of(in_training, forwards.training.outputs),
        opaque=opaque,
    )


def _without_fused(sites: tuple[Site, ...], fused: Sequence[str]) -> tuple[tuple[Site, ...], tuple[str, ...]]:
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


def _opaque(forwards: Forwards, gemms: int, gemms_eval: int, batch: int) -> tuple[Opaque, ...]:
    """The products that are no sites, by operation, beside the FLOPs of the sites in training and in evaluation."""
    groups: dict[str, tuple[list[OtherProduct], list[OtherProduct]]] = {}
    for which, mode in enumerate((forwards.training, forwards.evaluation)):
        for other in mode.others:
            if any(other.flops):
                groups.setdefault(other.op, ([], []))[which].append(other)
    lines = {
        op: [flops_of(others, forwards.samples, batch, forwards.from_data) for others in both]
        for op, both in groups.items()
    }
    total, total_eval = (
        sites + sum(each[which].at(batch) for each in lines.values()) for which, sites in enumerate((gemms, gemms_eval))
    )
    return tuple(
        Opaque(
            what=op,
            owners=tuple(dict.fromkeys(other.owner for others in groups[op] for other in others)),
            calls=len(groups[op][0]),
            flops=flops,
            share=flops.at(batch) / total if total else 0.0,
            share_eval=flops_eval.at(batch) / total_eval if total_eval else 0.0,
        )
        for op, (flops, flops_eval) in lines.items()
    )


def _other_notes(forwards: Forwards, opaque: Iterable[Opaque]) -> tuple[str, ...]:
    """Notes on products that are no sites: convolutions and recurrent layers with their share, and what is not seen."""
    notes = [
        f"{each.calls} x {each.what}: not replaced, and not among the sites: {100 * each.share:.3g} % of the FLOPs of "
        "a forward"
        for each in opaque
        if each.calls
    ]
    owners = sorted({other.owner for other in forwards.training.others if other.op == TRANSFORMED})
    names = ", ".join(repr(name) for name in owners[:3]) + (", ..." if len(owners) > 3 else "")
    unseen = f"{TRANSFORMED} in {names}: not seen, neither among the sites nor in their shares"
    return (*notes, unseen) if owners else tuple(notes)
