"""pad_alignment: K or N of a linear that is not a multiple of 16 bytes is padded with zeros, and the result is sliced.

y = linear(x, w, b)     ->     y = linear(pad(x, (0, 1)), pad(w, (0, 1, 0, 13)), pad(b, (0, 13)))[..., :3]

The function stays the same: a zero in x is multiplied by a zero in w. The FP8 GEMM supports only multiples of 16 for K
and N, and its operator pads other sizes itself: the FP8 copies of both operands, for each of the three GEMMs in which
the size is a contraction or a column. With this mod, x and w are padded once, in the pass that makes them if
torch.compile fuses it (if x is concatenated or computed elementwise), and kernels of other libraries, which do not pad,
can run. In BF16 an odd K makes rows that are not aligned to 16 bytes, which the library's fast kernels do not support;
a multiple of 8 elements is enough there, and padding further costs a copy for nothing (3384 to 3392: 11 % slower,
docs/results/LOG.md).

M, the batch, is not padded: the operators pad it where a GEMM contracts over it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from loka.errors import LokaError
from loka.graph.ir import ForwardIR, SiteCall, Statement
from loka.graph.padded_calls import padded
from loka.mods.adaptation import Unchanged
from loka.mods.rewriting import rewriting_tools
from loka.mods.rewriting.rewriting_tools import Size

NAME = "pad_alignment"
ALIGNED = "K and N are such multiples already"


@dataclass(frozen=True, slots=True)
class Pad:
    """One linear to pad; the site has its name in the forward."""

    site: str
    k: int  # before
    n: int
    to: int  # elements: K and N become multiples of it
    columns: bool = True  # pad N too; False if a kernel of another mod reads the product

    @property
    def mod(self) -> str:
        """Name of the mod in policies."""
        return NAME

    @property
    def reads(self) -> tuple[str, ...]:
        """The site whose calls are padded."""
        return (self.site,)

    @property
    def makes(self) -> str:
        """The same site."""
        return self.site

    def under(self, rename: Callable[[str], str]) -> Pad:
        """The same with its site renamed."""
        return replace(self, site=rename(self.site))

    def rewritten(self, forward: ForwardIR) -> ForwardIR:
        """The forward with the site padded."""
        return rewrite(forward, self)

    @property
    def padded(self) -> Size:
        """The sizes of the padded GEMM."""
        n = -(-self.n // self.to) * self.to if self.columns else self.n
        return Size(-(-self.k // self.to) * self.to, n)


def find(
    forward: ForwardIR, sites: Mapping[str, tuple[Size, int]], crossed: Collection[str] = ()
) -> tuple[tuple[Pad, ...], tuple[Unchanged, ...]]:
    """The sites of a forward whose K or N is not a multiple of the number in `sites`, and reasons for the others.

    N of the `crossed` is not padded, as a cross layer reads their products.
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


def rewrite(forward: ForwardIR, pad: Pad) -> ForwardIR:
    """The forward with every call of the site padded. Raises LokaError where it does not call the site."""
    statements = [
        _padded(step, step.call, pad) if step.call is not None and step.call.site == pad.site else step
        for step in forward.statements
    ]
    if tuple(statements) == forward.statements:
        raise LokaError(f"{pad.site!r} does not stand in its forward. Please report this fault in LoKA.")
    return rewriting_tools.with_statements(forward, statements)


def _padded(statement: Statement, call: SiteCall, pad: Pad) -> Statement:
    made = padded(call, pad.padded.k - pad.k, pad.padded.n - pad.n, pad.n)
    return rewriting_tools.linear_statement(statement.target, made, statement.operands, statement.note)
