"""Linears padded with zeros, and what a kernel that writes their operands leaves of that."""

from __future__ import annotations

from dataclasses import dataclass

from loka.graph.ir import SiteCall

_PAD = "torch.nn.functional.pad("


def padded(call: SiteCall, columns: int, rows: int, n: int) -> SiteCall:
    """The call with `columns` zero columns appended to x and weight, and `rows` zero rows to weight and bias.

    If `rows` is not 0, the product is sliced to its first `n` columns.
    """
    below = f", 0, {rows}" if rows else ""
    x = f"{_PAD}{call.x}, (0, {columns}))" if columns else call.x
    weight = f"{_PAD}{call.weight}, (0, {columns}{below}))"
    bias, out = call.bias, call.out
    if rows:
        out = out.replace("{0}", f"{{0}}[..., :{n}]")
        bias = None if bias is None else f"{_PAD}{bias}, (0, {rows}))"
    return SiteCall(call.site, x, weight, bias, out)


@dataclass(frozen=True, slots=True)
class Unpadded:
    """A padded linear whose zero columns are left to the kernels that write its operands."""

    x: str  # template, as in `SiteCall`
    weight: str  # template; its rows may still be padded
    columns: int  # zero columns missing at the end of both


def unpadded(call: SiteCall) -> Unpadded | None:
    """The call without the zero columns added by `padded`; None where there are none."""
    x, _, columns = call.x.rpartition(", (0, ")
    weight, _, pads = call.weight.rpartition(", (0, ")
    if not (x.startswith(_PAD) and weight.startswith(_PAD) and columns.removesuffix("))").isdecimal()):
        return None
    added, _, rows = pads.removesuffix("))").partition(", 0, ")
    if added != columns.removesuffix("))"):
        return None
    bare = weight.removeprefix(_PAD)
    return Unpadded(x.removeprefix(_PAD), f"{_PAD}{bare}, (0, 0, 0, {rows}))" if rows else bare, int(added))
