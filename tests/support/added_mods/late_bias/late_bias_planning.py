"""late_bias, planned: the linears that have a bias."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from loka.mods.late_bias.late_bias import NAME, LateBias
from pydantic import Field

from loka.mods.mod_planning import SiteModPlanning, UnplannedModel
from loka.mods.rewriting.model_in_change import ModelInChange
from loka.mods.rewriting.site_change import OwnedChange
from loka.mods.rewriting.site_outcome import SiteOutcome
from loka.policy.mod_schema import ModFields
from loka.policy.policy import ModRule
from loka.sites.site import GemmKind


class LateBiasSetting(ModFields):
    """A linear's bias by a statement of its own. Matched: sites. The same function."""

    use: Literal["late_bias"] = Field(title="Mod", description="Biases by statements of their own.")


@dataclass(frozen=True, slots=True)
class LateBiasPlanning:
    """Splits each linear in its own forward."""

    name: str = NAME
    exact: bool = True
    description: str = "the GEMM writes its product alone, and what reads it adds the bias"
    setting: type[ModFields] = LateBiasSetting

    def rewrite_sites(self, model: ModelInChange, rule: ModRule) -> SiteOutcome:
        """Split what the entry is for."""
        outcome = SiteOutcome(model, rule)
        wanted = outcome.wanted()
        for site in wanted:
            if site.kind is not GemmKind.LINEAR or site.bias is None:
                outcome.leave([site.name], "it is no nn.Linear with a bias")
        split = [site for site in wanted if site.kind is GemmKind.LINEAR and site.bias is not None]
        model.capture([site.name for site in split])
        for site in split:
            for _, _, _, called in outcome.traced([site.name], site.name):
                (inner,) = called
                change = OwnedChange(site.name, LateBias(inner), linear=True)
                made = replace(site, kind=GemmKind.FUNCTIONAL_LINEAR, bias=None)
                outcome.take(change, [site.name], made, f"a bias of {site.n} is added later")
        return outcome

    def proposal(self, model: UnplannedModel) -> str | None:
        """How many linears have a bias."""
        count = sum(site.kind is GemmKind.LINEAR and site.bias is not None for site in model.sites)
        return f"{count} biases may be added later" if count else None


PLANNING: SiteModPlanning = LateBiasPlanning()
