"""The policy schema of each mod: the entry of `mods`, with the mod's own parameters."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict

from loka.policy import checks
from loka.policy.mod_schema import ModFields, ModSchemas, Size, power_of_two


class FinalBias(StrEnum):
    """Treatment of the biases of final prediction layers."""

    KEEP = "keep"
    DROP = "drop"


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
    block: Annotated[int, Field(ge=16, le=1024), AfterValidator(checks.power_of_two)] = power_of_two(
        16, 1024, 256, "Block", "Features that share one mean square. Default: 256."
    )


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
    to: Annotated[int, Field(ge=8, le=128), AfterValidator(checks.power_of_two)] = power_of_two(
        8,
        128,
        16,
        "Multiple",
        "Bytes that rows become multiples of: as many elements in FP8, half as many in BF16. Default: 16.",
    )


class Where(StrEnum):
    """Where interactions are fused."""

    ALWAYS = "always"
    FASTER = "faster"


class FuseInteractionSetting(ModFields):
    """A concatenation, residual and norm around products of samples in one kernel. Matched: owners. Exact."""

    use: Literal["fuse_interaction"] = Field(title="Mod", description="One kernel for what joins and mixes features.")
    where: Annotated[Where, Strict(False)] = Field(
        default=Where.ALWAYS,
        title="In which modules",
        description="faster: in the modules where the measurements say that it is faster than torch.compile; it may be "
        "nowhere. Default: always.",
    )


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


MOD_SCHEMAS: ModSchemas = MappingProxyType(
    {
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
)
