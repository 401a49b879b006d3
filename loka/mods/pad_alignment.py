"""pad_alignment: K or N of a linear that is no multiple of 16 bytes is padded with zeros, and the result is cut.

y = linear(x, w, b)     ->     y = linear(pad(x, (0, 1)), pad(w, (0, 1, 0, 13)), pad(b, (0, 13)))[..., :3]

The same function: a zero in x meets a zero in w. The FP8 GEMM takes K and N in multiples of 16 alone, and pads by
itself where they are not: the FP8 copies of both operands, for each of the three GEMMs in which the size is a
contraction or a column. Padded here, x and w are padded once, in the pass that makes them where torch.compile fuses it
(x as it is concatenated or computed elementwise), and kernels of other libraries, which pad nothing, can run. In BF16
an odd K makes rows that begin off 16 bytes, which the library's fast kernels do not take; a multiple of 8 elements is
enough there, and padding it further costs a copy for nothing (3384 to 3392: 11 % slower, docs/results/LOG.md).

M, the batch, is not padded: the operators pad it where a GEMM contracts over it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from loka.errors import LokaError
from loka.graph.ir import ForwardIR, SiteCall, Statement
from loka.mods import rewriting_tools
from loka.mods.adaptation import Unchanged
from loka.mods.rewriting_tools import Size

NAME = "pad_alignment"
EXACT = True
PROMISE = "sizes of GEMMs are multiples of what kernels take: none pads or copies by itself"
_PAD = "torch.nn.functional.pad("
ALIGNED = "K and N are such multiples already"


@dataclass(frozen=True, slots=True)
class Pad:
    """One linear to pad; the site is named as in the forward."""

    site: str
    k: int  # before
    n: int
    to: int  # elements that both are made multiples of
    columns: bool = True  # whether N is padded too; not where a kernel of another mod takes the product

    def under(self, rename: Callable[[str], str]) -> Pad:
        """The same with its site under another name."""
        return replace(self, site=rename(self.site))

    @property
    def padded(self) -> Size:
        """The sizes that the GEMM gets."""
        n = -(-self.n // self.to) * self.to if self.columns else self.n
        return Size(-(-self.k // self.to) * self.to, n)


def find(
    forward: ForwardIR, sites: Mapping[str, tuple[Size, int]], crossed: Collection[str] = ()
) -> tuple[tuple[Pad, ...], tuple[Unchanged, ...]]:
    """The sites of a forward with a K or N that is no multiple of what is given with it, and the others, and why.

    N of the `crossed` stays as it is: a cross layer takes their products.
    """
    found: dict[str, Pad] = {}
    reasons: dict[str, str] = {}
    for statement in forward.statements:
        if statement.call is None or statement.call.site not in sites:
            continue
        name = statement.call.site
        size, to = sites[name]
        pad = Pad(name, size.k, size.n, to, name not in crossed)
        if pad.padded == size:
            reasons[name] = ALIGNED
        else:
            found[name] = pad
    return tuple(found.values()), tuple(Unchanged(name, reason) for name, reason in reasons.items())


@dataclass(frozen=True, slots=True)
class Unpadded:
    """A padded linear whose zero columns are left to the kernels that make its operands."""

    x: str  # templates, as those of a `SiteCall`
    weight: str  # rows may still be padded
    columns: int  # that are missing at the end of both


def unpadded(call: SiteCall) -> Unpadded | None:
    """The call without the zero columns that `rewrite` gave it; None where there are none."""
    x, _, columns = call.x.rpartition(", (0, ")
    weight, _, pads = call.weight.rpartition(", (0, ")
    if not (x.startswith(_PAD) and weight.startswith(_PAD) and columns.removesuffix("))").isdecimal()):
        return None
    added, _, rows = pads.removesuffix("))").partition(", 0, ")
    if added != columns.removesuffix("))"):
        return None
    bare = weight.removeprefix(_PAD)
    return Unpadded(x.removeprefix(_PAD), f"{_PAD}{bare}, (0, 0, 0, {rows}))" if rows else bare, int(added))


def rewrite(forward: ForwardIR, pad: Pad) -> ForwardIR:
    """The forward with every call of the site padded. Raises LokaError where it calls the site nowhere."""
    statements = [
        _padded(step, step.call, pad) if step.call is not None and step.call.site == pad.site else step
        for step in forward.statements
    ]
    if tuple(statements) == forward.statements:
        raise LokaError(f"{pad.site!r} does not stand in its forward. Please report this fault in LoKA.")
    return rewriting_tools.with_statements(forward, statements)


def _padded(statement: Statement, call: SiteCall, pad: Pad) -> Statement:
    more_k, more_n = pad.padded.k - pad.k, pad.padded.n - pad.n
    rows = f", 0, {more_n}" if more_n else ""
    x = f"{_PAD}{call.x}, (0, {more_k}))" if more_k else call.x
    weight = f"{_PAD}{call.weight}, (0, {more_k}{rows}))"
    bias, out = call.bias, call.out
    if more_n:
        out = out.replace("{0}", f"{{0}}[..., :{pad.n}]")
        bias = None if bias is None else f"{_PAD}{bias}, (0, {more_n}))"
    made = SiteCall(call.site, x, weight, bias, out)
    return rewriting_tools.linear_statement(statement.target, made, statement.operands, statement.note)
