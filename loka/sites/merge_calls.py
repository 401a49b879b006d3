"""Measures recorded calls as functions of the batch, and merges those of one weight at one place into a site."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from loka.sites.neighbours import Call, boundaries, fed_by, followed_by
from loka.sites.site import GemmKind, RowCount, Site
from loka.sites.symbolic_inputs import NotLinearError, Size, rows_of, rows_through, value_at

_Key = tuple[str | None, str, str, int, int, int]


def to_sites(
    training: list[MeasuredCall], evaluation: list[MeasuredCall] | None, order: dict[str, int], batch: int
) -> tuple[tuple[Site, ...], tuple[str, ...]]:
    """Group calls into sites, in the order of the calls.

    `evaluation` is None if it was not run: it is then assumed to make the calls of training. `order` is each module's
    position. Returns the sites, and notes on details that a site cannot represent.
    """
    groups: dict[_Key, tuple[list[MeasuredCall], list[MeasuredCall]]] = {}
    for calls, which in ((training, 0), (evaluation or [], 1)):
        for measured in calls:
            groups.setdefault(_key(measured), ([], []))[which].append(measured)
    if evaluation is None:
        for in_training, in_evaluation in groups.values():
            in_evaluation.extend(in_training)
    total = total_flops(training)
    sites, notes = [], []
    for name, (in_training, in_evaluation) in zip(_names(groups, order), groups.values(), strict=True):
        site, note = _site(name, in_training, in_evaluation, total, batch)
        sites.append(site)
        if note:
            notes.append(note)
    return tuple(sites), tuple(notes)


def siblings(calls: list[MeasuredCall], order: dict[str, int]) -> tuple[tuple[str, ...], ...]:
    """Names of sites that seem to read one tensor, two or more, in the order of their calls.

    Parts of one tensor (unbind, chunk) count as one tensor here. A site that is called several times is left out.
    """
    readers: dict[int, list[str]] = defaultdict(list)  # by identity: nodes live as long as the calls
    for name, found in by_site(calls, order).items():
        if len(found) == 1 and found[0].call.source is not None:
            readers[id(found[0].call.source)].append(name)
    return tuple(tuple(names) for names in readers.values() if len(names) > 1)


def by_site(calls: list[MeasuredCall], order: dict[str, int]) -> dict[str, list[MeasuredCall]]:
    """The calls of each site, by its name, in the order of the first calls."""
    groups: dict[_Key, tuple[list[MeasuredCall], list[MeasuredCall]]] = {}
    for measured in calls:
        groups.setdefault(_key(measured), ([], []))[0].append(measured)
    return {name: found for name, (found, _) in zip(_names(groups, order), groups.values(), strict=True)}


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
        fed_by=fed_by(first.source),
        followed_by=followed_by(first.result),
        where=f"{os.path.basename(first.file)}:{first.line}" if first.file else "",
        blocked=next((m.call.blocked for m in all_calls if m.call.blocked), None),
        boundaries=ends if any(ends := boundaries(first.source, first.result)) else (),
    )
    return site, note


class UnlikeRunsError(ValueError):
    """The forwards at two batch sizes call different GEMMs."""


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


def measure_linear(calls: tuple[Call, ...], batch: int) -> tuple[list[MeasuredCall], tuple[str, ...]]:
    """Read symbolic sizes. Rows that are not linear in the batch are given by their slope at `batch`, with a note."""
    notes: list[str] = []
    measured = []
    values: dict[int, int] = {}  # by identity of a size, which the calls keep alive: symbolic arithmetic is slow
    lines: dict[int, RowCount | NotLinearError] = {}

    def at_batch(size: Size) -> int:
        if isinstance(size, int):
            return size
        if id(size) not in values:
            values[id(size)] = value_at(size, batch)
        return values[id(size)]

    for call in calls:
        rows = lines.get(id(call.m))
        if rows is None:
            rows = lines[id(call.m)] = _line(call.m)
        if isinstance(rows, NotLinearError):
            notes.append(_bent(call, f"B being the batch, {rows}"))
            rows = _rows_at(at_batch(call.m), batch)
        flops = sum(2 * at_batch(m) * at_batch(k) * at_batch(n) for m, k, n in call.terms)
        measured.append(MeasuredCall(call, rows, at_batch(call.k), at_batch(call.n), flops))
    return measured, tuple(dict.fromkeys(notes))


def measure_pair(
    first: tuple[Call, ...], second: tuple[Call, ...], one: int, two: int, batch: int
) -> tuple[list[MeasuredCall], tuple[str, ...]]:
    """Fit a line through two runs, at the batch sizes `one` and `two`.

    Raises:
        UnlikeRunsError: The runs call different GEMMs.
    """
    if [_identity(call) for call in first] != [_identity(call) for call in second]:
        raise UnlikeRunsError(f"the forward calls other GEMMs at a batch of {one} than of {two}")
    notes: list[str] = []
    measured = []
    for call, other in zip(first, second, strict=True):

        def at(size: Size, size_there: Size) -> RowCount:
            return rows_through((one, int(size)), (two, int(size_there)))

        try:
            rows = at(call.m, other.m)
            k, n = at(call.k, other.k).at(batch), at(call.n, other.n).at(batch)
            flops = sum(
                2 * at(m, m_).at(batch) * at(k_, k__).at(batch) * at(n_, n__).at(batch)
                for (m, k_, n_), (m_, k__, n__) in zip(call.terms, other.terms, strict=True)
            )
        except NotLinearError as error:
            notes.append(_bent(call, str(error)))
            rows, k, n = _rows_at(int(call.m), one), int(call.k), int(call.n)
            flops = sum(2 * int(a) * int(b) * int(c) for a, b, c in call.terms) * batch // one
        measured.append(MeasuredCall(call, rows, k, n, flops))
    return measured, tuple(dict.fromkeys(notes))


def measure_samples(
    runs: Sequence[tuple[int, tuple[Call, ...]]], batch: int
) -> tuple[list[MeasuredCall], tuple[str, ...]]:
    """Sizes from runs on real samples, each with its number of samples, three runs or more.

    Rows that are no line in the number of samples come from data, as those of jagged inputs: M is their mean at
    `batch`, and a note has their range.

    Raises:
        UnlikeRunsError: The runs call different GEMMs.
    """
    samples = [size for size, _ in runs]
    called = [[_identity(call) for call in calls] for _, calls in runs]
    if any(each != called[0] for each in called):
        shown = ", ".join(map(str, samples))
        raise UnlikeRunsError(f"the forward calls other GEMMs on different numbers of samples ({shown})")
    notes: list[str] = []
    measured = []
    for calls in zip(*(calls for _, calls in runs), strict=True):
        rows = _through([(size, int(call.m)) for size, call in zip(samples, calls, strict=True)])
        if rows is None:
            means = [int(call.m) / size for size, call in zip(samples, calls, strict=True)]
            low, high = round(min(means) * batch), round(max(means) * batch)
            name = calls[0].module or calls[0].weight or calls[0].owner or "the model"
            notes.append(
                f"{name}: its rows come from data: {low} to {high} at a batch size of {batch}, by the example inputs; "
                "M is their mean"
            )
            rows = RowCount(0, _mean_at(samples, [int(call.m) for call in calls], batch))
        flops = [sum(2 * int(m) * int(k) * int(n) for m, k, n in call.terms) for call in calls]
        k, n = (_at(samples, [int(size) for size in sizes], batch) for sizes in _widths(calls))
        measured.append(MeasuredCall(calls[0], rows, k, n, _at(samples, flops, batch)))
    return measured, tuple(dict.fromkeys(notes))


def _widths(calls: Sequence[Call]) -> tuple[list[Size], list[Size]]:
    return [call.k for call in calls], [call.n for call in calls]


def _at(samples: Sequence[int], sizes: Sequence[int], batch: int) -> int:
    """A size at `batch` samples: on the line through those of all runs, otherwise by their mean a sample."""
    line = _through(list(zip(samples, sizes, strict=True)))
    return _mean_at(samples, sizes, batch) if line is None else line.at(batch)


def _mean_at(samples: Sequence[int], sizes: Sequence[int], batch: int) -> int:
    return round(sum(sizes) / sum(samples) * batch)


def _through(points: Sequence[tuple[int, int]]) -> RowCount | None:
    """The line through all points (samples, size); None where there is none."""
    try:
        line = rows_through(points[0], points[1])
    except NotLinearError:
        return None
    return line if all(line.at(samples) == size for samples, size in points) else None


def measure_single(calls: tuple[Call, ...], batch: int) -> list[MeasuredCall]:
    """Sizes of one run at the example's batch size: rows divisible by it are taken as proportional to it."""
    return [
        MeasuredCall(
            call,
            _rows_at(int(call.m), batch),
            int(call.k),
            int(call.n),
            sum(2 * int(m) * int(k) * int(n) for m, k, n in call.terms),
        )
        for call in calls
    ]


def _line(size: Size) -> RowCount | NotLinearError:
    try:
        return rows_of(size)
    except NotLinearError as error:
        return error


def _rows_at(rows: int, batch: int) -> RowCount:
    per_sample, rest = divmod(rows, batch)
    return RowCount(per_sample) if per_sample and not rest else RowCount(0, rows)


def _identity(call: Call) -> tuple[object, ...]:
    return (call.kind, call.module, call.owner, call.weight, call.file, call.line)


def _bent(call: Call, how: str) -> str:
    return f"{call.module or call.weight or call.owner or 'the model'}: its rows are no line in the batch size ({how})"
