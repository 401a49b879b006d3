"""Sizes and FLOPs of watched calls as functions of the batch."""

from __future__ import annotations

from dataclasses import dataclass

from loka.sites.batch_sizes import NotLinearError, Size, rows_of, rows_through, value_at
from loka.sites.recorder import Call
from loka.sites.site import RowCount


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
