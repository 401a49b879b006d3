"""The schema of `mods`: one model a mod, told apart by `use`. The same words as `loka.mods.registry`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Strict, Tag

from loka.policy.schema import checks
from loka.policy.schema.fields import Names, SchemaModel, Size, doc

_NAMES_DOC = (
    'a glob over fully qualified names ("layers.*"; * crosses dots), "re:..." for a regular expression that matches '
    "the whole name, or a list of these (any of them)."
)


class FinalBias(StrEnum):
    """What happens to the biases of final prediction layers."""

    KEEP = "keep"
    DROP = "drop"


class KeptLayers(StrEnum):
    """The dtypes that a residual stream can be kept in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def _power_of_two(least: int, largest: int, default: int, title: str, description: str) -> Any:
    """A field for a power of two within bounds."""
    sizes = [size for size in checks.POWERS_OF_TWO if least <= size <= largest]
    return Field(default=default, title=title, description=description, json_schema_extra={"enum": sizes})


_Block = Annotated[int, Field(ge=16, le=1024), AfterValidator(checks.power_of_two)]
_Alignment = Annotated[int, Field(ge=8, le=128), AfterValidator(checks.power_of_two)]


class ModFields(SchemaModel):
    """What every mod takes beside its own parameters."""

    match: Names | None = doc("Match", f"What the mod is for: {_NAMES_DOC} Left out: all that it can take.")
    except_: Names | None = Field(
        default=None, alias="except", title="Except", description=f"What it leaves alone: {_NAMES_DOC}"
    )
    optional: bool | None = doc(
        "Optional", "The mod may find nothing to change. Default: false, so that a typing error shows."
    )
    note: str | None = doc("Note", "Why the mod is there; shown by loka explain.")


class NoBiasSetting(ModFields):
    """Linears without a bias, except final prediction layers. Matched: linears. A new model, to be trained."""

    use: Literal["no_bias"] = Field(title="Mod", description="Drop the biases of linears.")
    final: Annotated[FinalBias, Strict(False)] = Field(
        default=FinalBias.KEEP,
        title="Final layers",
        description="The biases of final prediction layers, whose product reaches an output with no other after it. "
        "Default: keep.",
    )


class BlockNormSetting(ModFields):
    """RMSNorm over fixed blocks, without parameters, for LayerNorm and RMSNorm. Matched: norms. A new model."""

    use: Literal["block_norm"] = Field(title="Mod", description="Norms over fixed blocks of the features.")
    block: _Block = _power_of_two(16, 1024, 256, "Block", "Features that share one mean square. Default: 256.")


class HardSwishSetting(ModFields):
    """x * ReLU6(x + 3) / 6 for SiLU. Matched: activations. A new model, to be trained."""

    use: Literal["hard_swish"] = Field(title="Mod", description="Hard swish for SiLU.")


class NormFirstSetting(ModFields):
    """Normalise the input of a linear rather than its output. Matched: linears. A new model, to be trained."""

    use: Literal["norm_first"] = Field(title="Mod", description="Normalise the input of a linear, not its output.")


class MergeSiblingsSetting(ModFields):
    """Linears that share an input become one GEMM. Matched: sites. The same function."""

    use: Literal["merge_siblings"] = Field(title="Mod", description="One GEMM for linears that share an input.")


class BatchSmallSetting(ModFields):
    """Small linears of the same shape over different inputs become one grouped GEMM. Matched: sites. Exact."""

    use: Literal["batch_small"] = Field(title="Mod", description="One grouped GEMM for small linears of one shape.")
    max_k: Size = Field(default=256, title="Largest K", description="Input features of what is small. Default: 256.")
    max_n: Size = Field(default=256, title="Largest N", description="Output features of what is small. Default: 256.")


class PadAlignmentSetting(ModFields):
    """Sizes of GEMMs rounded up to a multiple. Matched: sites. The same function."""

    use: Literal["pad_alignment"] = Field(title="Mod", description="Round the sizes of GEMMs up to a multiple.")
    to: _Alignment = _power_of_two(
        8,
        128,
        16,
        "Multiple",
        "Bytes that rows become multiples of: as many elements in FP8, half as many in BF16. Default: 16.",
    )


class FuseInteractionSetting(ModFields):
    """A concatenation, residual and norm around products of samples in one kernel. Matched: owners. Exact."""

    use: Literal["fuse_interaction"] = Field(title="Mod", description="One kernel for what joins and mixes features.")


class ResidualHighPrecisionSetting(ModFields):
    """Residual streams stay in a wider dtype. Matched: owners. The same function at higher precision."""

    use: Literal["residual_high_precision"] = Field(title="Mod", description="Keep residual streams in a wider dtype.")
    dtype: Annotated[KeptLayers, Strict(False)] = Field(
        default=KeptLayers.FLOAT32, title="Dtype", description="What residual streams are kept in. Default: float32."
    )


MODS: dict[str, type[ModFields]] = {
    "no_bias": NoBiasSetting,
    "block_norm": BlockNormSetting,
    "hard_swish": HardSwishSetting,
    "norm_first": NormFirstSetting,
    "merge_siblings": MergeSiblingsSetting,
    "batch_small": BatchSmallSetting,
    "pad_alignment": PadAlignmentSetting,
    "fuse_interaction": FuseInteractionSetting,
    "residual_high_precision": ResidualHighPrecisionSetting,
}


def own_parameters(model: type[ModFields]) -> tuple[str, ...]:
    """The names of a mod's own parameters, in the order in which its model has them."""
    return tuple(name for name in model.model_fields if name not in ModFields.model_fields and name != "use")


def _mod_tag(value: object) -> str | None:
    use = value.get("use") if isinstance(value, dict) else None
    return f"<{use}>" if isinstance(use, str) and use in MODS else None


ModSetting = Annotated[
    Annotated[NoBiasSetting, Tag("<no_bias>")]
    | Annotated[BlockNormSetting, Tag("<block_norm>")]
    | Annotated[HardSwishSetting, Tag("<hard_swish>")]
    | Annotated[NormFirstSetting, Tag("<norm_first>")]
    | Annotated[MergeSiblingsSetting, Tag("<merge_siblings>")]
    | Annotated[BatchSmallSetting, Tag("<batch_small>")]
    | Annotated[PadAlignmentSetting, Tag("<pad_alignment>")]
    | Annotated[FuseInteractionSetting, Tag("<fuse_interaction>")]
    | Annotated[ResidualHighPrecisionSetting, Tag("<residual_high_precision>")],
    Discriminator(_mod_tag),
]
