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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from loka.errors import LokaError
from loka.graph.ir import ForwardIR, SiteCall, Statement, padded
from loka.graph.sites.site import GemmKind, Site
from loka.mods.protocols import SiteMod, UnplannedModel
from loka.mods.rewriting import rewriting_tools
from loka.mods.rewriting.rewriting_tools import Size
from loka.mods.rewriting.rewriting_tracer import OwnedChange, SiteChange
from loka.mods.rewriting.site_rewriting import ModelInChange, SiteOutcome
from loka.numerics.enums import Compute
from loka.policy.policy import ModRule

NAME = "pad_alignment"
ALIGNED = "K and N are such multiples already"
_TO = 16  # default multiple
_MIXED = "it is part of a mixing layer, for which fuse_interaction has kernels that mask sizes themselves"


@dataclass(frozen=True, slots=True)
class Pad(SiteChange):
    """One linear to pad."""

    mod: ClassVar[str] = NAME
    k: int  # before
    n: int
    to: int  # elements: K and N become multiples of it

    def rewritten(self, forward: ForwardIR) -> ForwardIR:
        """The forward with every call of the site padded. Raises LokaError where it does not call the site."""
        statements = [
            _padded(step, step.call, self) if step.call is not None and step.call.site == self.name else step
            for step in forward.statements
        ]
        if tuple(statements) == forward.statements:
            raise LokaError(f"{self.name!r} does not stand in its forward. Please report this fault in LoKA.")
        return rewriting_tools.with_statements(forward, statements)

    @property
    def padded(self) -> Size:
        """The sizes of the padded GEMM."""
        return Size(*(-(-size // self.to) * self.to for size in (self.k, self.n)))


def find(forward: ForwardIR, sites: Mapping[str, tuple[Size, int]]) -> tuple[Pad, ...]:
    """The sites of a forward whose K or N is not a multiple of the number in `sites`."""
    called = dict.fromkeys(step.call.site for step in forward.statements if step.call is not None)
    wanted = ((name, *sites[name]) for name in called if name in sites)
    pads = (Pad(name, (name,), size.k, size.n, to) for name, size, to in wanted)
    return tuple(pad for pad in pads if pad.padded != Size(pad.k, pad.n))


def _padded(statement: Statement, call: SiteCall, pad: Pad) -> Statement:
    made = padded(call, pad.padded.k - pad.k, pad.padded.n - pad.n, pad.n)
    return rewriting_tools.linear_statement(statement.target, made, statement.note)


@dataclass(frozen=True, slots=True)
class PadAlignmentMod:
    """Pads each site separately, in its owner's forward; an nn.Linear in its own forward."""

    name: str = NAME
    exact: bool = True
    description: str = "sizes of GEMMs are multiples of what kernels take: none pads or copies by itself"

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Pad the sites of a policy entry."""
        outcome, to = SiteOutcome(model, rule, usual=(ALIGNED,)), int(dict(rule.settings)["to"])
        owners: dict[str, list[str]] = {}
        for site in outcome.wanted():
            multiple = _multiple(model, site.name, to)
            if site.k % multiple == 0 and site.n % multiple == 0:
                outcome.leave([site.name], ALIGNED)
            else:
                owners.setdefault(site.name if site.kind is GemmKind.LINEAR else site.owner, []).append(site.name)
        model.capture(owners)
        for owner, names in owners.items():
            for forward, _, sizes, called in outcome.traced(names, owner):
                mixed = _mixed(forward)
                wanted = {
                    inner: (size, _multiple(model, called[inner], to))
                    for inner, size in sizes.items()
                    if inner not in mixed
                }
                pads = find(forward, wanted)
                outcome.leave([called[inner] for inner in sizes if inner in mixed], _MIXED)
                for change in pads:
                    name = called[change.name]
                    site = padded_site(model.sites[name], change)
                    owned = OwnedChange(owner, change, linear=owner == name)
                    outcome.take(owned, [name], site, _what(change))
        return outcome

    def proposal(self, model: UnplannedModel) -> str | None:
        """Number of linears with a size that is no multiple, in words; None for none."""
        odd = [site for site in model.sites if site.kind is GemmKind.LINEAR and (site.k % _TO or site.n % _TO)]
        if not odd:
            return None
        return f"{len(odd)} linear{'s' if len(odd) != 1 else ''} with K or N no multiple of {_TO}"


def _multiple(model: ModelInChange, name: str, to: int) -> int:
    """Elements that a site's sizes become multiples of: `to` bytes in FP8, or in 16 bits if all its GEMMs are kept."""
    kept = all(asked.compute is Compute.KEEP for asked in model.settings[name].gemms.values())
    return to // 2 if kept else to


def _mixed(forward: ForwardIR) -> frozenset[str]:
    """The sites of FM interactions."""
    calls = (forward.statements[place].call for mix in forward.mixes for place in mix.gemms)
    return frozenset(call.site for call in calls if call is not None)


def _what(change: Pad) -> str:
    """Description of the padding."""
    sizes = [("K", change.k, change.padded.k), ("N", change.n, change.padded.n)]
    return ", ".join(f"{name} {old} padded to {new}" for name, old, new in sizes if old != new)


def padded_site(site: Site, pad: Pad) -> Site:
    """The site with the padded sizes. A plain linear becomes a functional linear in its own forward."""
    kind = GemmKind.FUNCTIONAL_LINEAR if site.kind is GemmKind.LINEAR else site.kind
    return replace(site, kind=kind, k=pad.padded.k, n=pad.padded.n)


MOD: SiteMod = PadAlignmentMod()
