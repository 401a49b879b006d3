"""Inputs of the rules about a site, changes of its bias among them, and the wording of findings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from torch import Tensor, nn

from loka.graph.sites.site import Site
from loka.mods.protocols import Concern
from loka.mods.suggestions import Suggestions
from loka.numerics.enums import OPERANDS, Compute, Gemm, Operand
from loka.numerics.recipe import OperandRecipe
from loka.policy.settings import SiteSettings
from loka.probe.profile.profile import Finding, SiteProfile
from loka.probe.stats.site_stats import OperandStats, SiteStats


class FindingKind(StrEnum):
    """Kind of a finding."""

    BIAS_DIVERGES = "bias_diverges"
    NORM_CANCELS = "norm_cancels"
    ACTIVATION_OUTLIERS = "activation_outliers"
    FEATURE_DOMINATES = "feature_dominates"
    ROW_DOMINATES = "row_dominates"
    GRADIENT_UNDERFLOWS = "gradient_underflows"
    NONFINITE = "nonfinite"
    ALWAYS_ZERO = "always_zero"
    NEVER_RAN = "never_ran"
    TOO_FEW_ROWS = "too_few_rows"
    OVER_BUDGET = "over_budget"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class FindingEvidence:
    """All inputs of a rule."""

    site: Site
    stats: SiteStats
    summary: SiteProfile
    settings: SiteSettings
    bias: BiasTrack | None
    suggestible: Suggestions = field(default_factory=dict)

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """The existing GEMMs that the policy does not keep."""
        return tuple(gemm for gemm in self.site.gemms if self.settings.gemms[gemm].compute is not Compute.KEEP)

    def recipe(self, gemm: Gemm, operand: Operand) -> OperandRecipe:
        """The policy's recipe for an operand of a GEMM."""
        return self.settings.gemms[gemm].operands[OPERANDS[gemm].index(operand)]

    def activation(self, operand: Operand) -> OperandStats | None:
        """The statistics of the input or the output gradient; None if not seen."""
        return self.stats.input if operand is Operand.INPUT else self.stats.grad_output

    def finding(self, kind: FindingKind, evidence: str, remedy: str) -> Finding:
        """A finding about this site."""
        return Finding(self.site.name, kind.value, evidence, remedy)

    @property
    def quoted(self) -> str:
        """The site's name as quoted in remedies."""
        return f'"{self.site.name}"'

    def mod(self, concern: Concern, change: str) -> str:
        """The mod against a concern about this site, in policy syntax; without one, a manual change."""
        found = self.suggestible.get(concern)
        if found is None:
            return self.by_hand(change)
        return f"mods: [{{use: {found.use}, match: {json.dumps(found.match)}}}]"

    def by_hand(self, change: str) -> str:
        """A manual change of the model."""
        return f"in the model, {change}"

    def afresh(self, gemm: Gemm) -> str:
        """Fields that a rule must reset so that a scaling has its own dynamic scales; "" for none."""
        recipes = self.settings.gemms[gemm].operands
        transposed = "requantize_transpose: false, " if any(recipe.transposed for recipe in recipes) else ""
        static = "range: dynamic, " if any(recipe.is_static for recipe in recipes) else ""
        return transposed + static

    def rule(self, setting: str) -> str:
        """A rule for this site, in policy syntax."""
        return f"rules: [{{match: {self.quoted}, {setting}}}]"


@dataclass(frozen=True, slots=True)
class BiasTrack:
    """The bias of one site: its Euclidean norm at the start and the end of probing, and its final values."""

    first: float
    last: float
    values: Tensor  # (N,) float32, on the CPU


@torch.no_grad()
def read_biases(model: nn.Module, sites: Sequence[Site]) -> dict[str, Tensor]:
    """The bias of each site that has one, by the site's name: (N,) float32 copies on the CPU.

    Synchronises: call it before the first step and after the last. Sites whose bias is missing in `model` are left out.
    """
    parameters = dict(model.named_parameters())
    wanted = ((site.name, parameters.get(site.bias)) for site in sites if site.bias is not None)
    return {name: bias.detach().float().cpu().flatten().clone() for name, bias in wanted if bias is not None}


def track_biases(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, BiasTrack]:
    """Tracks from two readings of `read_biases`, for sites in both."""
    return {
        name: BiasTrack(float(before[name].norm()), float(values.norm()), values)
        for name, values in after.items()
        if name in before
    }
