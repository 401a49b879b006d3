"""`communication:` of a policy: what FSDP2's all-gathers and TorchRec's exchanges carry. Its schema, and what it gives.

Titles and descriptions are user documentation: `loka schema` prints them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, Strict, model_validator

from loka.policy import checks
from loka.policy.mod_schema import SchemaModel, Size, doc
from loka.policy.site_schema import MATCH_DOC, SiteMatch

FLOAT32_BYTES = 4
_SCALE_BYTES = 8  # of a row of FBGEMM's codec: its scale, and padding


class Wire(StrEnum):
    """The dtypes in which ranks may send what a policy names."""

    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"
    NATIVE = "native"


class GatherSetting(SchemaModel):
    """One rule of communication.weights; later rules win."""

    match: SiteMatch | None = doc("Match", f"{MATCH_DOC} Left out: every site.")
    carry: Annotated[Wire, Strict(False)] = Field(
        title="Carry",
        description="What an all-gather of the site's weight carries. fp8: its FP8 copy, where the recipe reads one "
        "alone. bf16, fp16: what fully_shard's MixedPrecisionPolicy has to give, and gather_fp8 checks. native: what "
        "fully_shard gives.",
    )
    optional: bool | None = doc("Optional", "The rule may match nothing. Default: false, so that a typing error shows.")


def _for_all_tables(value: object) -> object:
    if isinstance(value, list) or (isinstance(value, dict) and "match" in value):
        raise checks.refuse(
            "TorchRec knows one format for all tables of a sharder, and none by table: write forward and backward alone"
        )
    return value


class ExchangeSetting(SchemaModel):
    """What TorchRec's exchanges carry, for all tables; the package then has qcomms(), which returns its config."""

    forward: Annotated[Wire, Strict(False)] = Field(
        title="Forward", description="Of pooled and of sequence embeddings. native: float32, as TorchRec's default."
    )
    backward: Annotated[Wire, Strict(False)] = Field(
        title="Backward", description="Of their gradients. native: float32, as TorchRec's default."
    )
    row: Size | None = doc(
        "Row", "With fp8: so many neighbouring numbers share a scale. A divisor of every table's dimension."
    )

    @model_validator(mode="after")
    def _scaled(self) -> Self:
        """FP8 has a scale a row, and nothing else has one."""
        if (Wire.FP8 in (self.forward, self.backward)) != (self.row is not None):
            raise checks.refuse(
                "fp8 needs row, and nothing else has one: the numbers that share a scale, a divisor of every table's "
                "dimension, as in row: 64"
            )
        return self

    def bytes_each(self, wire: Wire) -> float:
        """Bytes of a number on the wire, with its part of a scale; a row is padded to a multiple of four."""
        if wire is Wire.FP8 and self.row is not None:
            return (-(-self.row // 4) * 4 + _SCALE_BYTES) / self.row
        return FLOAT32_BYTES if wire is Wire.NATIVE else 2


class CommunicationSetting(SchemaModel):
    """What ranks send each other."""

    weights: Annotated[list[GatherSetting], Field(min_length=1)] | None = doc(
        "Weights",
        "What FSDP2's all-gathers of weights carry: rules in order, later ones win. patch.gather_fp8() carries it out. "
        "A site that no rule names is gathered in FP8 where its recipe allows.",
    )
    embeddings: Annotated[ExchangeSetting, BeforeValidator(_for_all_tables)] | None = doc(
        "Embeddings", "What TorchRec's exchanges of embeddings and their gradients carry."
    )
