"""Planning of merge_siblings: the sites of a model that can be one GEMM, and the resulting site."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from loka.mods.merge_siblings.merge_siblings import ALONE, NAME, Siblings, find
from loka.mods.mod_planning import SiteModPlanning, UnplannedModel
from loka.mods.rewriting.model_in_change import ModelInChange
from loka.mods.rewriting.site_change import OwnedChange
from loka.mods.rewriting.site_outcome import SiteOutcome
from loka.policy.mod_schema import ModFields
from loka.policy.policy import ModRule
from loka.policy.settings import SiteSettings
from loka.sites.site import GemmKind, Site


class MergeSiblingsSetting(ModFields):
    """Linears that share an input become one GEMM. Matched: sites. The same function."""

    use: Literal["merge_siblings"] = Field(title="Mod", description="One GEMM for linears that share an input.")


@dataclass(frozen=True, slots=True)
class MergeSiblingsPlanning:
    """Merges the sites of one K, M and dtype that read one tensor, and that have the same settings in the policy."""

    name: str = NAME
    exact: bool = True
    description: str = "linears that read one tensor are one GEMM: one launch, and the tensor is read once"
    setting: type[ModFields] = MergeSiblingsSetting

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Merge the sites of a policy entry."""
        outcome = SiteOutcome(model, rule, usual=(ALONE,))
        wanted = {site.name: site for site in outcome.wanted()}
        groups = [
            names
            for group in model.siblings
            for names in _alike(model, [name for name in group if name in wanted], outcome)
        ]
        model.capture([model.around(names) for names in groups])
        for names in groups:
            owner = model.around(names)
            for forward, _, sizes, called in outcome.traced(names, owner):
                siblings, unchanged = find(forward, sizes)
                for each in unchanged:
                    outcome.leave([called[each.name]], each.reason)
                for change in siblings:
                    members = [called[name] for name in change.members]
                    name = f"{owner}.{change.name}" if owner else change.name
                    site = merged_site(name, owner, [model.sites[member] for member in members])
                    outcome.take(OwnedChange(owner, change), members, site, _what(change))
        outcome.leave(wanted, ALONE)
        return outcome

    def proposal(self, model: UnplannedModel) -> str | None:
        """Number of sites that share an input tensor, in words; None for none."""
        if not model.siblings:
            return None
        tensors = f"{len(model.siblings)} tensors" if len(model.siblings) > 1 else "one tensor"
        return f"{sum(map(len, model.siblings))} sites read {tensors}"


def _alike(model: ModelInChange, group: Sequence[str], outcome: SiteOutcome) -> Iterator[list[str]]:
    """The sites of a group that can be one GEMM: of one K, M and dtype, and with the same settings."""
    shapes: dict[tuple[object, ...], list[str]] = {}
    for name in group:
        site = model.sites[name]
        shapes.setdefault((site.k, site.rows, *model.kind_of_weight(site)), []).append(name)
    for names in shapes.values():
        by_policy: list[list[str]] = []
        for name in names:
            same = next((each for each in by_policy if _same(model.settings[each[0]], model.settings[name])), None)
            if same is None:
                by_policy.append([name])
            else:
                same.append(name)
        for each in by_policy:
            if len(each) > 1:
                yield each
            elif len(names) > 1:
                other = next(name for name in names if name != each[0])
                outcome.leave(each, f"the policy treats it otherwise than {other!r}, which reads the same tensor")


def _same(one: SiteSettings, other: SiteSettings) -> bool:
    return (one.gemms, one.budget, one.fuse) == (other.gemms, other.budget, other.fuse)


def _what(change: Siblings) -> str:
    return f"{len(change.members)} linears over one input are one GEMM of K {change.k}, N {change.n}"


def merged_site(name: str, owner: str, members: Sequence[Site]) -> Site:
    """The site of merged siblings: N and the shares of FLOPs add up."""
    first = members[0]
    same_after = all(site.followed_by == first.followed_by for site in members)
    return replace(
        first,
        name=name,
        kind=GemmKind.FUNCTIONAL_LINEAR,
        owner=owner,
        weight=None,
        bias=None,
        n=sum(site.n for site in members),
        calls_eval=max(site.calls_eval for site in members),
        share=sum(site.share for site in members),
        input_grad=any(site.input_grad for site in members),
        followed_by=first.followed_by if same_after else (),
        members=tuple(site.name for site in members),
    )


PLANNING: SiteModPlanning = MergeSiblingsPlanning()
