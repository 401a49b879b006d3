"""Planning of pad_alignment: the sites with a K or N that kernels do not support without padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from loka.graph.ir import ForwardIR
from loka.mods.mod_planning import SiteModPlanning, UnplannedModel
from loka.mods.pad_alignment.pad_alignment import ALIGNED, NAME, Pad, find
from loka.mods.rewriting.model_in_change import ModelInChange
from loka.mods.rewriting.site_change import OwnedChange
from loka.mods.rewriting.site_outcome import SiteOutcome
from loka.numerics.enums import Compute
from loka.policy import checks
from loka.policy.mod_schema import ModFields, power_of_two
from loka.policy.policy import ModRule
from loka.sites.site import GemmKind, Site

_TO = 16  # default multiple
_MIXED = "it is part of a mixing layer, for which fuse_interaction has kernels that mask sizes themselves"


class PadAlignmentSetting(ModFields):
    """Sizes of GEMMs rounded up to a multiple. Matched: sites. The same function."""

    use: Literal["pad_alignment"] = Field(title="Mod", description="Round the sizes of GEMMs up to a multiple.")
    to: Annotated[int, Field(ge=8, le=128), AfterValidator(checks.power_of_two)] = power_of_two(
        8,
        128,
        _TO,
        "Multiple",
        "Bytes that rows become multiples of: as many elements in FP8, half as many in BF16. Default: 16.",
    )


@dataclass(frozen=True, slots=True)
class PadAlignmentPlanning:
    """Pads each site separately, in its owner's forward; an nn.Linear in its own forward."""

    name: str = NAME
    exact: bool = True
    description: str = "sizes of GEMMs are multiples of what kernels take: none pads or copies by itself"
    setting: type[ModFields] = PadAlignmentSetting

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Pad the sites of a policy entry."""
        outcome, to = SiteOutcome(model, rule, usual=(ALIGNED,)), int(dict(rule.settings)["to"])
        owners: dict[str, list[str]] = {}
        for site in outcome.wanted():
            multiple = _multiple(model, site.name, to)
            if site.k % multiple == 0 and site.n % multiple == 0:
                outcome.leave([site.name], ALIGNED)
            elif site.k % multiple == 0 and site.name in model.reserved.products:
                outcome.leave([site.name], _read_as_it_is(model.reserved.mod))
            else:
                owners.setdefault(site.name if site.kind is GemmKind.LINEAR else site.owner, []).append(site.name)
        model.capture(list(owners))
        for owner, names in owners.items():
            for forward, _, sizes, called in outcome.traced(names, owner):
                mixed = _mixed(forward)
                wanted = {
                    inner: (size, _multiple(model, called[inner], to))
                    for inner, size in sizes.items()
                    if inner not in mixed
                }
                products = {inner for inner in wanted if called[inner] in model.reserved.products}
                pads, _ = find(forward, wanted, products)
                outcome.leave([called[inner] for inner in sizes if inner in mixed], _MIXED)
                for change in pads:
                    name = called[change.site]
                    site = padded_site(model.sites[name], change)
                    owned = OwnedChange(owner, change, linear=owner == name)
                    outcome.take(owned, [name], site, _what(change, model.reserved.mod))
        return outcome

    def proposal(self, model: UnplannedModel) -> str | None:
        """Number of linears with a size that is no multiple, in words; None for none."""
        odd = [site for site in model.sites if site.kind is GemmKind.LINEAR and (site.k % _TO or site.n % _TO)]
        if not odd:
            return None
        return f"{len(odd)} linear{'s' if len(odd) != 1 else ''} with K or N no multiple of {_TO}"


def _read_as_it_is(mod: str) -> str:
    return (
        f"what multiplies its product may be a cross layer, which {mod} takes with N as it is; leave its owner "
        "out of that mod's match instead"
    )


def _multiple(model: ModelInChange, name: str, to: int) -> int:
    """Elements that a site's sizes become multiples of: `to` bytes in FP8, or in 16 bits if all its GEMMs are kept."""
    kept = all(asked.compute is Compute.KEEP for asked in model.settings[name].gemms.values())
    return to // 2 if kept else to


def _mixed(forward: ForwardIR) -> frozenset[str]:
    """The sites of FM interactions."""
    calls = (forward.statements[place].call for mix in forward.mixes for place in mix.gemms)
    return frozenset(call.site for call in calls if call is not None)


def _what(change: Pad, other: str) -> str:
    """Description of the padding, and of the sizes left to another mod."""
    sizes = [("K", change.k, change.padded.k), ("N", change.n, change.padded.n)]
    left = [] if change.columns or change.n % change.to == 0 else [f"N {change.n} left to {other}"]
    return ", ".join([*(f"{name} {old} padded to {new}" for name, old, new in sizes if old != new), *left])


def padded_site(site: Site, pad: Pad) -> Site:
    """The site with the padded sizes. A plain linear becomes a functional linear in its own forward."""
    kind = GemmKind.FUNCTIONAL_LINEAR if site.kind is GemmKind.LINEAR else site.kind
    return replace(site, kind=kind, k=pad.padded.k, n=pad.padded.n)


PLANNING: SiteModPlanning = PadAlignmentPlanning()
