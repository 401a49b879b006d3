"""The schema of what a policy says of sites: recipes, budgets, and the rules that match sites by name and by kind.

Titles and descriptions are user documentation: `loka schema` prints them.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Self

from pydantic import AfterValidator, Discriminator, Field, Strict, Tag, model_validator

from loka.numerics.enums import AccumulationSetting, Compute, Format, Fuse, Range
from loka.policy import checks
from loka.policy.mod_schema import Names, Number, Pattern, SchemaModel, Size, doc, match_tag

FLOAT32_TINY = 1.2e-38
FLOAT32_MAX = 3.4e38


class ScalingChoice(StrEnum):
    """A scaling in a policy: the values of `Scaling`, and a shorthand."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE_1X128 = "blockwise_1x128"
    BLOCKWISE_128X128 = "blockwise_128x128"
    BLOCKWISE_1X32 = "blockwise_1x32"
    NVFP4 = "nvfp4"
    BLOCKWISE = "blockwise"


class SiteScaling(StrEnum):
    """A scaling of a whole site: as of an operand, or the choice among recipes."""

    AUTO = "auto"
    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE_1X128 = "blockwise_1x128"
    BLOCKWISE_128X128 = "blockwise_128x128"
    BLOCKWISE_1X32 = "blockwise_1x32"
    BLOCKWISE = "blockwise"


class SiteKind(StrEnum):
    """The kinds of sites, for `match: {kind: ...}`; the same words as `loka.graph.sites.site.GemmKind`."""

    LINEAR = "linear"
    FUNCTIONAL_LINEAR = "functional_linear"
    MATMUL = "matmul"
    ADDMM = "addmm"
    EINSUM = "einsum"
    BMM = "bmm"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"


_Kernel = Annotated[
    str, AfterValidator(checks.kernel_name), Field(json_schema_extra={"pattern": checks.KERNEL_PATTERN})
]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class OperandSetting(SchemaModel):
    """The FP8 recipe of one operand of one GEMM."""

    format: Annotated[Format, Strict(False)] | None = doc(
        "FP8 format", "e4m3: three bits of mantissa, up to 448. e5m2: two bits, up to 57344. Default: e4m3."
    )
    scaling: Annotated[ScalingChoice, Strict(False)] | None = doc(
        "Scaling",
        "How many scales an operand has. tensorwise: one. rowwise: one a row. blockwise_1x128: one for 128 neighbours "
        "in a row. blockwise_128x128: one for a square of 128 by 128. blockwise: 128x128 for the weight and 1x128 for "
        "the others. blockwise_1x32: one for 32 neighbours in a row, always a power of two: MXFP8, for the few "
        "targets that multiply it. nvfp4: 4 bits, one for 16 neighbours in a row and one for all, in fprop, for loka "
        "probe alone: format and power_of_two say nothing of it, and no plan takes it. Both operands of a GEMM take "
        "the same scaling, except that blockwise_1x128 goes with blockwise_128x128. Default: rowwise.",
    )
    range: Annotated[Range, Strict(False)] | None = doc(
        "Range",
        "Where a scale's maximum comes from. dynamic: measured on the tensor in each step. static: known beforehand, "
        "from amax. Setting dynamic forgets an amax that an earlier rule gave. Default: dynamic.",
    )
    amax: Annotated[float, Field(ge=FLOAT32_TINY, le=FLOAT32_MAX, allow_inf_nan=False)] | None = doc(
        "Maximum", "The largest magnitude that the operand takes, for range: static. Greater than zero."
    )
    power_of_two: bool | None = doc(
        "Power-of-two scales", "Round each scale up to a power of two, so that scaling is exact. Default: false."
    )


_REQUANTIZE_TRANSPOSE = doc(
    "Requantize and transpose",
    "Made from the FP8 copy that another GEMM of the site reads, transposed: wgrad's grad_output from dgrad's, wgrad's "
    "input from fprop's input, dgrad's weight from fprop's weight; of other operands nothing is said. The other GEMM "
    "must run in FP8 with scaling: rowwise, range: dynamic and power_of_two: true there; format, scaling, range and "
    "power_of_two of the transposed operand itself then follow. Default: false.",
)


class TransposableSetting(OperandSetting):
    """An operand that is read along its other dimension: weight in dgrad, grad_output and input in wgrad."""

    requantize_transpose: bool | None = _REQUANTIZE_TRANSPOSE

    @model_validator(mode="after")
    def _alone(self) -> Self:
        """A transposed operand has no other fields: they follow from its source."""
        others = sorted(self.model_fields_set - {"requantize_transpose"})
        if self.requantize_transpose and others:
            raise checks.refuse(
                f"a transposed operand takes the rest from the one it is made from; leave out {', '.join(others)}"
            )
        return self


class GemmFields(OperandSetting):
    """Settings of a whole GEMM; format, scaling, range, amax and power_of_two apply to both operands."""

    compute: Annotated[Compute, Strict(False)] | None = doc(
        "Compute",
        "auto: FP8 where the evidence allows it. fp8: FP8 wherever it can run. keep: as the model has it. "
        "Default: auto.",
    )
    accumulation: Annotated[AccumulationSetting, Strict(False)] | None = doc(
        "Accumulation",
        "How the tensor core sums. fast: about 14 bits between promotions. precise: promoted to float32. auto: fast "
        "where that is measured to be faster and as accurate. Default: precise.",
    )
    padding: bool | None = doc("Padding", "Zero-pad sizes that the kernel cannot take. Default: true.")
    kernel: _Kernel | None = doc(
        "Kernel",
        "The kernel that FP8 runs on: torch.scaled_mm, fbgemm.rowwise, mslk.rowwise, or auto, the fastest by the "
        "measurements. Where it cannot run, the GEMM stays as it is, with the reason. Default: auto.",
    )


class FpropSetting(GemmFields):
    """The forward GEMM, y = input @ weight.T."""

    input: OperandSetting | None = doc("Input", "The input alone.")
    weight: OperandSetting | None = doc("Weight", "The weight alone.")


class DgradSetting(GemmFields):
    """The GEMM of the input's gradient, grad_output @ weight."""

    requantize_transpose: bool | None = _REQUANTIZE_TRANSPOSE
    grad_output: OperandSetting | None = doc("Output gradient", "The gradient of the output alone.")
    weight: TransposableSetting | None = doc("Weight", "The weight alone.")


class WgradSetting(GemmFields):
    """The GEMM of the weight's gradient, grad_output.T @ input."""

    requantize_transpose: bool | None = _REQUANTIZE_TRANSPOSE
    grad_output: TransposableSetting | None = doc("Output gradient", "The gradient of the output alone.")
    input: TransposableSetting | None = doc("Input", "The input alone.")


class BudgetSetting(SchemaModel):
    """Limits of error and speedup for a GEMM to run in FP8 under compute: auto."""

    mere: Number | None = doc(
        "MERE", "The largest mean element-wise relative error of the GEMM's result. Default: 0.2."
    )
    sqnr_db: Number | None = doc("SQNR", "The least signal to quantization noise of the result, in dB. Default: 24.")
    min_speedup: Number | None = doc("Speed-up", "The least gain over the model as it is; 1.05 is 5 %. Default: 1.05.")


class SiteSetting(GemmFields):
    """Settings of a site. Fields here apply to all three GEMMs; those under one GEMM are narrower and win."""

    scaling: Annotated[SiteScaling, Strict(False)] | None = doc(  # type: ignore[assignment]  # with one value more
        "Scaling",
        "As of an operand (tensorwise, rowwise, blockwise_1x128, blockwise_128x128, blockwise_1x32, blockwise), or "
        "auto: the fastest recipe within the budget, by the measurements. It chooses among rowwise with powers of two "
        "and transposed copies, rowwise, and tensorwise, for each chain of sites; fields that a later rule sets narrow "
        "the choice. Default: rowwise.",
    )
    requantize_transpose: bool | None = _REQUANTIZE_TRANSPOSE
    fuse: Annotated[Fuse, Strict(False)] | None = doc(
        "Fusion",
        "Whether the site's neighbours (norm, activation, residual) are taken along into one kernel. auto: where a "
        "measured kernel gains by it. Default: auto.",
    )
    budget: BudgetSetting | None = doc("Budget", "What FP8 may cost and must gain under compute: auto.")
    fprop: FpropSetting | None = doc("Forward GEMM", "y = input @ weight.T")
    dgrad: DgradSetting | None = doc("Input gradient GEMM", "grad_output @ weight; none where the input needs none.")
    wgrad: WgradSetting | None = doc("Weight gradient GEMM", "grad_output.T @ input")


class Criteria(SchemaModel):
    """Sites by properties; all criteria must hold. Shapes are those of y = x @ weight.T, x M x K, weight N x K."""

    kind: Annotated[SiteKind, Strict(False)] | None = doc("Kind", "How the model writes the GEMM.")
    name: Names | None = doc(
        "Name", 'A glob over fully qualified names, "re:..." for a regular expression, or a list of these.'
    )
    min_m: Size | None = doc("Least M", "Rows of the input at the policy's batch size.")
    max_m: Size | None = doc("Largest M", "Rows of the input at the policy's batch size.")
    min_k: Size | None = doc("Least K", "Input features.")
    max_k: Size | None = doc("Largest K", "Input features.")
    min_n: Size | None = doc("Least N", "Output features.")
    max_n: Size | None = doc("Largest N", "Output features.")
    min_share: _Share | None = doc("Least share", "Share of the model's GEMM FLOPs, 0 to 1.")
    max_share: _Share | None = doc("Largest share", "Share of the model's GEMM FLOPs, 0 to 1.")

    @property
    def bounds(self) -> Iterator[tuple[str, float | None, float | None]]:
        """Each property that has bounds, with the least and the largest; None for an open end."""
        for name in ("m", "k", "n", "share"):
            least, largest = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if least is not None or largest is not None:
                yield name, least, largest

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """Criteria are not empty, and no lower bound exceeds its upper bound."""
        if not self.model_fields_set:
            raise checks.refuse('an empty mapping says nothing; write "*" for every site')
        for name, least, largest in self.bounds:
            if least is not None and largest is not None and least > largest:
                raise checks.refuse(
                    f"min_{name} {least} is over max_{name} {largest}; nothing can match: change one of them"
                )
        return self


SiteMatch = Annotated[
    Annotated[Pattern, Tag("<pattern>")]
    | Annotated[list[Pattern], Field(min_length=1), Tag("<patterns>")]
    | Annotated[Criteria, Tag("<criteria>")],
    Discriminator(match_tag),
]
MATCH_DOC = (
    'Which sites: a glob over fully qualified names ("layers.*.mlp.*"; * crosses dots), "re:..." for a regular '
    "expression that matches the whole name, a list of these (any of them), or a mapping "
    "{kind: linear, max_n: 16} (all of it)."
)


class RuleSetting(SiteSetting):
    """One rule: the sites that it matches and the fields that it sets. Later rules win, field by field."""

    match: SiteMatch = Field(title="Match", description=MATCH_DOC)
    optional: bool | None = doc("Optional", "The rule may match nothing. Default: false, so that a typing error shows.")
    note: str | None = doc("Note", "Why the rule is there; shown by loka explain.")
