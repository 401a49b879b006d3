"""What ranks send each other by a plan: the all-gathers of its weights, and TorchRec's exchanges, with their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loka.plan.format import format_share, grouped, pattern_of, rule_patterns
from loka.plan.plan import GatherPlan, Plan
from loka.policy.communication import FLOAT32_BYTES, Exchange, ExchangeWire, Wire

ROUNDS = 2  # all-gathers of a weight in a step: for the forward, and again for the backward
GATHERS = ("all-gather of", "count", "carries", "bytes", "of BF16", "why")
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True)
class GatheredBytes:
    """Bytes of all-gathers in a training step: of the weights of all sites, forward and backward together."""

    nbytes: int
    nbytes_bf16: int  # if all carried bfloat16
    forward: int  # of `nbytes`: all of it with reshard_after_forward=False


def gathered_bytes(plan: Plan) -> GatheredBytes | None:
    """The bytes of a step; None where the policy says nothing of all-gathers."""
    if not plan.gathers:
        return None
    forward, in_bf16 = (sum(sizes) for sizes in zip(*((g.nbytes, g.nbytes_bf16) for g in plan.gathers), strict=True))
    return GatheredBytes(ROUNDS * forward, ROUNDS * in_bf16, forward)


def gather_rows(plan: Plan) -> list[tuple[str, ...]]:
    """A row of GATHERS for each weight; those that differ only in the numbers of their names, and by size, share one.

    Bytes are of one gather of all of a row.
    """
    names = [each.weight for each in plan.gathers]
    rows: list[tuple[str, ...]] = []
    for group in grouped(
        plan.gathers, lambda each: (pattern_of(each.weight), each.wire, each.reason, each.nbytes, each.nbytes_bf16)
    ):
        nbytes, in_bf16 = sum(each.nbytes for each in group), sum(each.nbytes_bf16 for each in group)
        name = ", ".join(rule_patterns([each.weight for each in group], names))
        figures = (format_bytes(nbytes), f"{nbytes / max(in_bf16, 1):.3f}")
        rows.append((name, str(len(group)), group[0].wire.value, *figures, group[0].reason))
    return rows


def communication_lines(plan: Plan) -> Iterator[str]:
    """What the table leaves open: the bytes of a step, and TorchRec's exchanges."""
    total = gathered_bytes(plan)
    if total is not None:
        yield (
            f"All-gathers of these weights in a step: {format_bytes(total.nbytes)}, "
            f"{total.nbytes / max(total.nbytes_bf16, 1):.3f} of bfloat16, half of it for the forward and half for the "
            "backward (none with reshard_after_forward=False). Of N ranks each receives (N - 1) / N of it."
        )
        if any(each.wire is Wire.NATIVE for each in plan.gathers):
            yield "native counts the dtype of the Parameter; MixedPrecisionPolicy of fully_shard may give another."
    if plan.exchange is not None:
        yield from _exchange_lines(plan.exchange)


def gather_words(gather: GatherPlan) -> str:
    """One weight: `fp8 (fp8 by t.yaml:14), 27456 bytes for the forward and for the backward, 0.516 of bfloat16`."""
    ratio = gather.nbytes / max(gather.nbytes_bf16, 1)
    each = f"{gather.nbytes} bytes for the forward and for the backward, {ratio:.3f} of bfloat16"
    return f"{gather.wire.value} ({gather.reason}), {each}"


def exchange_words(exchange: Exchange) -> str:
    """`forward fp8 with a scale for 64 numbers, backward bf16`."""
    rows = f" with a scale for {exchange.row} numbers"
    return ", ".join(
        f"{name} {wire.value}{rows if wire is ExchangeWire.FP8 else ''}"
        for name, wire in (("forward", exchange.forward), ("backward", exchange.backward))
    )


def _exchange_lines(exchange: Exchange) -> Iterator[str]:
    forward, backward = (exchange.bytes_each(wire) for wire in (exchange.forward, exchange.backward))
    share = format_share((forward + backward) / (2 * FLOAT32_BYTES))
    yield (
        f"TorchRec's exchanges: {exchange_words(exchange)}: {forward:.3g} bytes of a number and {backward:.3g} of its "
        f"gradient, {share} of float32. The package's qcomms() returns the QCommsConfig; tables are in no plan, and so "
        "are their sizes."
    )
    if ExchangeWire.FP8 in (exchange.forward, exchange.backward):
        yield (
            "Of tables that are sharded by rows TorchRec reduces and scatters, and not in fp8: it takes FP16 for the "
            "forward and BF16 for the backward instead, and says so."
        )


def format_bytes(count: int) -> str:
    """Three figures: `27.5 kB`."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
