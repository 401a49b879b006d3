"""What a recorded forward called: GEMMs, layers that are no sites, and functions that mods may replace."""

from __future__ import annotations

from dataclasses import dataclass

from loka.sites.neighbours import Node
from loka.sites.site import GemmKind
from loka.sites.symbolic_inputs import Size


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a GEMM. `module` is set for a plain nn.Linear and for attention: it names the site."""

    kind: GemmKind
    module: str | None
    owner: str
    weight: str | None
    bias: str | None
    m: Size
    k: Size
    n: Size
    terms: tuple[tuple[Size, Size, Size], ...]
    input_grad: bool
    source: Node | None  # node of the input
    result: Node
    file: str
    line: int
    blocked: str | None


TRANSFORMED = "products under torch.vmap or another transform of torch.func"


@dataclass(frozen=True, slots=True)
class Other:
    """A convolution or recurrent layer, which costs FLOPs and is not a site; or products that cannot be seen.

    `terms` are (M, K, N) of its products, () where these are not known.
    """

    op: str
    owner: str
    terms: tuple[tuple[Size, Size, Size], ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A call of a norm or an activation, with its owner and position; torch's own modules have no position."""

    op: str  # one of FUNCTIONS
    owner: str
    file: str
    line: int
    result: Node
