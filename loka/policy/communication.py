"""`communication:` of a policy: what FSDP2's all-gathers and TorchRec's exchanges carry. Its schema, and what it gives.

Titles and descriptions are user documentation: `loka schema` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, Strict, model_validator

from loka.policy import checks
from loka.policy.mod_schema import SchemaModel, Size, doc
from loka.policy.site_schema import MATCH_DOC, SiteMatch

FLOAT32_BYTES = 4
_SCALE_BYTES = 8  # of a row of FBGEMM's codec: its scale, and padding


class Wire(StrEnum):
    """The dtypes in which FSDP2 may gather a weight."""

    FP8 = "fp8"
    BF16 = "bf16"
    NATIVE = "native"


class ExchangeWire(StrEnum):
    """The dtypes in which TorchRec may exchange embeddings and their gradients."""

    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"
    NATIVE = "native"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What TorchRec's ranks send each other. `row`: numbers that share a scale, in fp8; None without it."""

    forward: ExchangeWire
    backward: ExchangeWire
    row: int | None = None

    def bytes_each(self, wire: ExchangeWire) -> float:
        """Bytes of a number on the wire, with its part of a scale; a row is padded to a multiple of four."""
        if wire is ExchangeWire.FP8 and self.row is not None:
            return (-(-self.row // 4) * 4 + _SCALE_BYTES) / self.row
        return FLOAT32_BYTES if wire is ExchangeWire.NATIVE else 2


class GatherSetting(SchemaModel):
    """One rule of communication.weights; later rules win."""

    match: SiteMatch | None = doc("Match", f"{MATCH_DOC} Left out: every site.")
    carry: Annotated[Wire, Strict(False)] = Field(
        title="Carry",
        description="What an all-gather of the site's weight carries. fp8: its FP8 copy, where the recipe reads one "
        "alone. bf16: bfloat16, which fully_shard's MixedPrecisionPolicy has to give and gather_fp8 checks. native: "
        "what fully_shard gives.",
    )
    optional: bool | None = doc("Optional", "The rule may match nothing. Default: false, so that a typing error shows.")


_Rules = Annotated[list[GatherSetting], Field(min_length=1)]


def _rules(value: object) -> object:
    return [{"carry": value}] if isinstance(value, str) else value


def _for_all_tables(value: object) -> object:
    if isinstance(value, list) or (isinstance(value, dict) and "match" in value):
        raise checks.refuse(
            "TorchRec knows one format for all tables of a sharder, and none by table: write forward and backward alone"
        )
    return value


class ExchangeSetting(SchemaModel):
    """What TorchRec's exchanges carry, for all tables; the package then has qcomms(), which returns its config."""

    forward: Annotated[ExchangeWire, Strict(False)] = Field(
        title="Forward", description="Of pooled and of sequence embeddings. native: float32, as TorchRec's default."
    )
    backward: Annotated[ExchangeWire, Strict(False)] = Field(
        title="Backward", description="Of their gradients. native: float32, as TorchRec's default."
    )
    row: Size | None = doc(
        "Row", "With fp8: so many neighbouring numbers share a scale. A divisor of every table's dimension."
    )

    @model_validator(mode="after")
    def _scaled(self) -> Self:
        """FP8 has a scale a row, and nothing else has one."""
        fp8 = ExchangeWire.FP8 in (self.forward, self.backward)
        if fp8 and self.row is None:
            raise checks.refuse(
                "fp8 needs row, the numbers that share a scale: a divisor of every table's dimension, as in row: 64"
            )
        if not fp8 and self.row is not None:
            raise checks.refuse("row is for fp8, and neither forward nor backward is fp8: leave it out")
        return self


class CommunicationSetting(SchemaModel):
    """What ranks send each other."""

    weights: (
        Annotated[
            _Rules,
            BeforeValidator(_rules, json_schema_input_type=Wire | _Rules),
        ]
        | None
    ) = doc(
        "Weights",
        "What FSDP2's all-gathers of weights carry: one word for all, or a list of rules. patch.gather_fp8() carries "
        "it out. A site that no rule names is gathered in FP8 where its recipe allows.",
    )
    embeddings: Annotated[ExchangeSetting, BeforeValidator(_for_all_tables)] | None = doc(
        "Embeddings", "What TorchRec's exchanges of embeddings and their gradients carry."
    )

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.weights is None and self.embeddings is None:
            raise checks.refuse("an empty mapping says nothing; write weights or embeddings, or remove the key")
        return self
