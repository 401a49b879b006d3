"""Measures recorded calls as functions of the batch, and merges those of one weight at one place into a site."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from loka.graph.sites.neighbours import operations_after, operations_before
from loka.graph.sites.op_names import BOUNDARIES
from loka.graph.sites.operations import Call, OtherProduct
from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.graph.sites.sizes import Sizes, line_through

_Key = tuple[str | None, str, str, int, int, int]


CallsBySite = dict[str, tuple[list["MeasuredCall"], list["MeasuredCall"]]]  # by name, in training and in evaluation


def calls_by_site(
    training: Sequence[MeasuredCall], evaluation: Sequence[MeasuredCall], order: dict[str, int]
) -> CallsBySite:
    """The calls of each site, in the order of the first calls; `order` is each module's position."""
    groups: dict[_Key, tuple[list[MeasuredCall], list[MeasuredCall]]] = {}
    for calls, which in ((training, 0), (evaluation, 1)):
        for measured in calls:
            groups.setdefault(_key(measured), ([], []))[which].append(measured)
    return dict(zip(_names(groups, order), groups.values(), strict=True))


def to_sites(groups: CallsBySite, batch: int, total: int) -> tuple[tuple[Site, ...], tuple[str, ...]]:
    """A site for each group of calls; `total` are the FLOPs that shares are of.

    Returns the sites, and notes on details that a site cannot represent.
    """
    made = [_site(name, *calls, total, batch) for name, calls in groups.items()]
    return tuple(site for site, _ in made), tuple(note for _, note in made if note)


def siblings(sites: Mapping[str, Sequence[MeasuredCall]]) -> tuple[tuple[str, ...], ...]:
    """Names of sites that seem to read one tensor, two or more, in the order of their calls.

    Parts of one tensor (unbind, chunk) count as one tensor here. A site that is called several times is left out.
    """
    readers: dict[int, list[str]] = defaultdict(list)  # by identity: nodes live as long as the calls
    for name, found in sites.items():
        if len(found) == 1 and found[0].call.source is not None:
            readers[id(found[0].call.source)].append(name)
    return tuple(tuple(names) for names in readers.values() if len(names) > 1)


def never_called(model: nn.Module, called: frozenset[str], sites: Iterable[Site]) -> tuple[Site, ...]:
    """A blocked site for each nn.Linear whose forward did not run, in training or evaluation."""
    used = defaultdict(list)
    for site in sites:
        if site.weight:
            used[site.weight].append(site.owner or "the model")
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name in called:
            continue
        owner = name.rpartition(".")[0]
        parent = model.get_submodule(owner) if owner else model
        reason = "its forward is never called"
        if isinstance(parent, nn.MultiheadAttention):
            reason += f": nn.MultiheadAttention '{owner}' reads its weight itself"
        elif readers := used.get(f"{name}.weight"):
            reason += f": its weight is read in {readers[0]}"
        found.append(
            Site(
                name=name,
                kind=GemmKind.LINEAR,
                owner=owner,
                weight=f"{name}.weight" if name else "weight",
                bias=None if module.bias is None else f"{name}.bias" if name else "bias",
                rows=RowCount(0),
                k=module.in_features,
                n=module.out_features,
                calls=0,
                calls_eval=0,
                share=0.0,
                input_grad=False,
                fed_by=(),
                followed_by=(),
                where="",
                blocked=reason,
            )
        )
    return tuple(found)


def in_model_order(sites: Iterable[Site], order: dict[str, int]) -> tuple[Site, ...]:
    """Sites by the position of their module or owner; for equal positions, in the given order."""
    after = len(order)
    return tuple(sorted(sites, key=lambda site: order.get(site.name, order.get(site.owner, after))))


def _key(measured: MeasuredCall) -> _Key:
    call = measured.call
    if call.module is not None and call.kind is GemmKind.LINEAR:
        return (call.module, "", "", 0, 0, 0)
    return (call.weight, call.owner, call.file, call.line, measured.k, measured.n)


def _names(groups: dict[_Key, tuple[list[MeasuredCall], list[MeasuredCall]]], order: dict[str, int]) -> list[str]:
    """A unique name for each group: the module's, the Parameter's, or the owner's with a number."""
    firsts = [(in_training or in_evaluation)[0].call for in_training, in_evaluation in groups.values()]
    wanted = [_wanted(call) for call in firsts]
    uses = Counter(wanted)
    taken = set(order)
    numbers: dict[str, int] = defaultdict(int)
    names = []
    for call, name in zip(firsts, wanted, strict=True):
        if name is None or uses[name] > 1 or (call.module is None and name in taken):
            while f"{call.owner}#{numbers[call.owner]}" in taken:  # a module may have such a name
                numbers[call.owner] += 1
            name = f"{call.owner}#{numbers[call.owner]}"
            numbers[call.owner] += 1
        names.append(name)
    return names


def _wanted(call: Call) -> str | None:
    return call.module if call.module else call.weight


def _site(
    name: str, in_training: list[MeasuredCall], in_evaluation: list[MeasuredCall], total: int, batch: int
) -> tuple[Site, str]:
    all_calls = in_training or in_evaluation
    first = all_calls[0].call
    before, after = operations_before(first.source), operations_after(first.result)
    ends = [tuple(each.owner for each in side if each.op in BOUNDARIES) for side in (before, after)]
    largest = max(all_calls, key=lambda measured: measured.rows.at(batch))
    note = ""
    if len({measured.rows for measured in all_calls}) > 1:
        rows = ", ".join(dict.fromkeys(str(measured.rows) for measured in all_calls))
        note = f"{name}: called with different numbers of rows ({rows}); the largest is told as its M"
    flops = sum(measured.flops for measured in in_training)
    site = Site(
        name=name,
        kind=first.kind,
        owner=first.owner,
        weight=first.weight,
        bias=first.bias,
        rows=largest.rows,
        k=largest.k,
        n=largest.n,
        calls=len(in_training),
        calls_eval=len(in_evaluation),
        share=flops / total if total else 0.0,
        input_grad=any(measured.call.input_grad for measured in in_training),
        fed_by=tuple(each.op for each in before),
        followed_by=tuple(each.op for each in after),
        where=f"{os.path.basename(first.file)}:{first.line}" if first.file else "",
        blocked=next((m.call.blocked for m in all_calls if m.call.blocked), None),
        weight_grad=any(measured.call.weight_grad for measured in in_training) or not in_training,
        boundaries=tuple(ends) if any(ends) else (),
    )
    return site, note


@dataclass(frozen=True, slots=True)
class MeasuredCall:
    """A call with its rows, and its forward FLOPs at the example's batch size."""

    call: Call
    rows: RowCount
    k: int
    n: int
    flops: int


def total_flops(calls: list[MeasuredCall]) -> int:
    """Forward FLOPs of all calls together, at the example's batch size."""
    return sum(measured.flops for measured in calls)


def measure(
    calls: Sequence[Call], samples: Sequence[int], batch: int, from_data: bool
) -> tuple[list[MeasuredCall], tuple[str, ...]]:
    """The calls of one forward, whose sizes are those of runs of some numbers of samples, at a batch size; and notes.

    Rows are on the line through all runs. Where there is none, and the inputs are real samples (`from_data`), they are
    the mean a sample; otherwise those of the first run. One run is taken as proportional to the batch if it can be.
    """
    notes: dict[str, None] = {}
    measured = []
    for call in calls:
        rows, told = _rows(call.m, samples, batch, from_data)
        if told:
            notes[f"{call.title}: {told}"] = None
        k, n, flops = (_at_batch(sizes, samples, batch, from_data) for sizes in (call.k, call.n, call.flops))
        measured.append(MeasuredCall(call, rows, k, n, flops))
    return measured, tuple(notes)


def flops_of(others: Iterable[OtherProduct], samples: Sequence[int], batch: int, from_data: bool) -> RowCount:
    """The FLOPs of products that are no sites, as a function of the batch."""
    lines = [_rows(other.flops, samples, batch, from_data)[0] for other in others]
    return RowCount(sum(line.per_sample for line in lines), sum(line.fixed for line in lines))


def _rows(rows: Sizes, samples: Sequence[int], batch: int, from_data: bool) -> tuple[RowCount, str]:
    """Rows as a function of the batch, and what is to be said of those that are none."""
    line = line_through(list(zip(samples, rows, strict=True))) if len(rows) > 1 else None
    if line is not None:
        return line, ""
    if len(rows) == 1 or not from_data:
        per_sample, rest = divmod(rows[0], samples[0])
        shown = ", ".join(f"{size} at {count}" for count, size in zip(samples, rows, strict=True))
        told = f"its rows are no line in the batch size ({shown})" if len(rows) > 1 else ""
        return RowCount(per_sample) if per_sample and not rest else RowCount(0, rows[0]), told
    means = [size / count for count, size in zip(samples, rows, strict=True)]
    low, high = round(min(means) * batch), round(max(means) * batch)
    told = f"its rows come from data: {low} to {high} at a batch size of {batch}, by the example inputs"
    return RowCount(0, _mean(rows, samples, batch)), f"{told}; M is their mean"


def _at_batch(sizes: Sizes, samples: Sequence[int], batch: int, from_data: bool) -> int:
    """A size at a batch size: on the line through those of all runs, otherwise by their mean."""
    if len(set(sizes)) == 1 and len(sizes) > 1:
        return sizes[0]
    if batch in samples and not from_data:
        return sizes[samples.index(batch)]
    line = line_through(list(zip(samples, sizes, strict=True))) if len(sizes) > 1 else None
    return _mean(sizes, samples, batch) if line is None else line.at(batch)


def _mean(sizes: Sizes, samples: Sequence[int], batch: int) -> int:
    return round(sum(sizes) / sum(samples) * batch)
