"""Planning of residual_high_precision: the modules whose residual sums are widened, and the policy schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, Strict
from torch import nn

from loka.graph.ir import ForwardIR
from loka.mods.adaptation import Setting
from loka.mods.mod_planning import OwnerModPlanning, UnplannedModel
from loka.mods.residual_high_precision.residual_high_precision import NAME, NO_SUM, widen_residual_sums
from loka.mods.residual_high_precision.residual_streams import inner, residual_streams
from loka.mods.rewriting.rewriting_tracer import OwnerScope, RewrittenOwner
from loka.policy.mod_schema import ModFields


class KeptLayers(StrEnum):
    """The dtypes that a residual stream can be kept in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ResidualHighPrecisionSetting(ModFields):
    """Residual streams stay in a wider dtype. Matched: owners. The same function at higher precision."""

    use: Literal["residual_high_precision"] = Field(title="Mod", description="Keep residual streams in a wider dtype.")
    dtype: Annotated[KeptLayers, Strict(False)] = Field(
        default=KeptLayers.FLOAT32, title="Dtype", description="What residual streams are kept in. Default: float32."
    )


@dataclass(frozen=True, slots=True)
class ResidualHighPrecisionPlanning:
    """Widens the residual sums of the outermost matched modules that contain one."""

    name: str = NAME
    exact: bool = True
    description: str = "residual sums add, and stay for the next sum and for norms, in a wider dtype"
    setting: type[ModFields] = ResidualHighPrecisionSetting
    nothing: str = NO_SUM

    def scopes(self, model: nn.Module, wants: Callable[[str], bool]) -> tuple[OwnerScope, ...]:
        """The outermost of the wanted modules with a sum in their own forward or below."""
        return residual_streams(model, wants)

    def inner(self, scope: OwnerScope, model: nn.Module) -> tuple[OwnerScope, ...]:
        """The scopes inside a module whose own forward cannot be traced."""
        return inner(scope, model)

    def rewrite(
        self, forward: ForwardIR, means: Callable[[str], bool], settings: Mapping[str, Setting]
    ) -> RewrittenOwner | str:
        """The forward with its residual sums in the wider dtype."""
        return widen_residual_sums(forward, str(settings["dtype"]), means)

    def describe(self, count: int, settings: Mapping[str, Setting]) -> str:
        """Description of `count` residual sums."""
        return f"{count} residual sum{'s' if count > 1 else ''} in {settings['dtype']}"

    def proposal(self, model: UnplannedModel) -> str | None:
        """None: it costs memory, so users have to ask for it."""
        return None


PLANNING: OwnerModPlanning = ResidualHighPrecisionPlanning()
