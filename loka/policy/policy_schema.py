"""The schema of a policy. Titles and descriptions are user documentation: `loka schema` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Strict, Tag, create_model, model_validator

from loka.devices.spec import Execution
from loka.devices.targets import DEFAULT_TARGET, TargetDevice
from loka.numerics.enums import AccumulationSetting, Autocast, Compute, Format, Fuse, Range
from loka.policy import checks
from loka.policy.mod_schema import (
    ModFields,
    ModSchemas,
    Names,
    Pattern,
    SchemaModel,
    Size,
    Text,
    any_mod,
    doc,
    match_tag,
)

FLOAT32_TINY = 1.2e-38
FLOAT32_MAX = 3.4e38


class ScalingChoice(StrEnum):
    """A scaling in a policy: the values of `Scaling`, and a shorthand."""

    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE_1X128 = "blockwise_1x128"
    BLOCKWISE_128X128 = "blockwise_128x128"
    BLOCKWISE = "blockwise"


class SiteScaling(StrEnum):
    """A scaling of a whole site: as of an operand, or the choice among recipes."""

    AUTO = "auto"
    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    BLOCKWISE_1X128 = "blockwise_1x128"
    BLOCKWISE_128X128 = "blockwise_128x128"
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


class Optimizer(StrEnum):
    """The optimisers of `loka train` and `loka compare`."""

    ADAM = "adam"
    ADAGRAD = "adagrad"
    SGD = "sgd"


_Callable = Annotated[
    str, AfterValidator(checks.callable_name), Field(json_schema_extra={"pattern": checks.CALLABLE_PATTERN})
]
_Kernel = Annotated[
    str, AfterValidator(checks.kernel_name), Field(json_schema_extra={"pattern": checks.KERNEL_PATTERN})
]
_SeedRange = Annotated[
    str, AfterValidator(checks.seed_range), Field(json_schema_extra={"pattern": checks.SEEDS_PATTERN})
]
_Head = Annotated[str | int, BeforeValidator(checks.head)]
_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class OperandSetting(SchemaModel):
    """The FP8 recipe of one operand of one GEMM."""

    format: Annotated[Format, Strict(False)] | None = doc(
        "FP8 format", "e4m3: three bits of mantissa, up to 448. e5m2: two bits, up to 57344. Default: e4m3."
    )
    scaling: Annotated[ScalingChoice, Strict(False)] | None = doc(
        "Scaling",
        "How many scales an operand has. tensorwise: one. rowwise: one a row. blockwise_1x128: one for 128 neighbours "
        "in a row. blockwise_128x128: one for a square of 128 by 128. blockwise: 128x128 for the weight and 1x128 for "
        "the others. Both operands of a GEMM take the same scaling, except that blockwise_1x128 goes with "
        "blockwise_128x128. Default: rowwise.",
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

    mere: _Number | None = doc(
        "MERE", "The largest mean element-wise relative error of the GEMM's result. Default: 0.2."
    )
    sqnr_db: _Number | None = doc("SQNR", "The least signal to quantization noise of the result, in dB. Default: 24.")
    min_speedup: _Number | None = doc("Speed-up", "The least gain over the model as it is; 1.05 is 5 %. Default: 1.05.")


class SiteSetting(GemmFields):
    """Settings of a site. Fields here apply to all three GEMMs; those under one GEMM are narrower and win."""

    scaling: Annotated[SiteScaling, Strict(False)] | None = doc(  # type: ignore[assignment]  # with one value more
        "Scaling",
        "As of an operand (tensorwise, rowwise, blockwise_1x128, blockwise_128x128, blockwise), or auto: the fastest "
        "recipe within the budget, by the measurements. It chooses among rowwise with powers of two and transposed "
        "copies, rowwise, and tensorwise, for each chain of sites; fields that a later rule sets narrow the choice. "
        "Default: rowwise.",
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


_Match = Annotated[
    Annotated[Pattern, Tag("<pattern>")]
    | Annotated[list[Pattern], Field(min_length=1), Tag("<patterns>")]
    | Annotated[Criteria, Tag("<criteria>")],
    Discriminator(match_tag),
]
_MATCH_DOC = (
    'Which sites: a glob over fully qualified names ("layers.*.mlp.*"; * crosses dots), "re:..." for a regular '
    "expression that matches the whole name, a list of these (any of them), or a mapping "
    "{kind: linear, max_n: 16} (all of it)."
)


class RuleSetting(SiteSetting):
    """One rule: the sites that it matches and the fields that it sets. Later rules win, field by field."""

    match: _Match = Field(title="Match", description=_MATCH_DOC)
    optional: bool | None = doc("Optional", "The rule may match nothing. Default: false, so that a typing error shows.")
    note: str | None = doc("Note", "Why the rule is there; shown by loka explain.")


class ModelSetting(SchemaModel):
    """The model, given by the callables that build it."""

    factory: _Callable = Field(
        title="Factory", description='"package.module:name" of a function that returns the model.'
    )
    inputs: _Callable | None = doc(
        "Inputs",
        '"package.module:name" of a function of the batch size that returns the positional arguments of forward (a '
        "tuple, or a dict for keywords). Left out: example_inputs of the model, or of the factory's module, or the "
        "first of train.batches.",
    )
    batch_size: Size | None = doc("Batch size", "Samples in a step, for shapes and shares. Default: 4096.")


class TrainSetting(SchemaModel):
    """Training of the model, for probe, train and compare."""

    batches: _Callable = Field(
        title="Batches",
        description='"package.module:name" of a function of (batch_size, seed) that yields (inputs, target).',
    )
    loss: _Callable = Field(
        title="Loss", description='"package.module:name" of a function of (output, target) that returns a scalar.'
    )
    test: _Callable | None = doc(
        "Test batches",
        '"package.module:name" of a function like batches, for what the model has not seen in training. In evaluation '
        "mode the model's output has to be one logit, and the target one label, for each sample, or for each of heads.",
    )
    heads: Annotated[list[_Head], Field(min_length=1), AfterValidator(checks.distinct)] | None = doc(
        "Heads",
        "The heads of a model that has several, each judged by itself: the keys of output and target where these are "
        "dicts, attributes, places in a tuple or columns of a Tensor.",
    )
    steps: Size | None = doc("Steps", "Training steps; left out, the verb decides.")
    shared_steps: Size | None = doc(
        "Shared steps",
        "Of loka train and compare: so many steps are trained without FP8 first, and both runs go on from there, as "
        "a model does that is trained again on new data. Default: 0, both start from the first weights.",
    )
    batch_size: Size | None = doc("Batch size", "Samples in a training step. Default: that of the model.")
    optimizer: Annotated[Optimizer, Strict(False)] | None = doc("Optimiser", "Default: adam.")
    learning_rate: Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)] | None = doc(
        "Learning rate", "Default: 1e-3."
    )
    autocast: Annotated[Autocast, Strict(False)] | None = doc(
        "Autocast",
        "bfloat16: forward, loss and evaluation run under torch.autocast. none: in the dtype of the weights. "
        "Default: none, and bfloat16 for loka compare on a GPU.",
    )
    ema: Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = doc(
        "Averaging",
        "Decay of the moving average of the weights that is evaluated; left out, the weights themselves are.",
    )
    tuned_seeds: list[_SeedRange] | None = doc(
        "Seeds of tuning",
        "Ranges of seeds, as 0-13, on which this recipe was chosen among others: loka compare does not judge it on "
        "them.",
    )


class ExecutionSetting(SchemaModel):
    """How the model runs, so that the plan knows what its launches cost the host."""

    mode: Annotated[Execution, Strict(False)] = Field(
        title="Mode",
        description="eager: no torch.compile. compiled: under torch.compile, without CUDA graphs. reduce-overhead: "
        'under torch.compile(mode="reduce-overhead"), which replays CUDA graphs of what it compiled; recommended. '
        "graph: the whole step captured as one CUDA graph. In the last two the host launches nothing of the model.",
    )
    host_ms: _Milliseconds | None = doc(
        "Other host time",
        "What the host does in a step besides launching these sites' kernels, in milliseconds: data, embeddings, the "
        "optimiser. Default: 0.",
    )
    gpu_ms: _Milliseconds | None = doc(
        "Other GPU time", "What the GPU does in a step besides these sites, in milliseconds. Default: 0."
    )


class PlanBudgetSetting(SchemaModel):
    """What FP8 may cost the whole model."""

    ne_percent: _Number | None = doc(
        "NE",
        "The largest predicted change of NE by all GEMMs in FP8 together, in per cent; the upper ends of the "
        "intervals count. Left out: no limit.",
    )


def _version(value: object) -> object:
    if type(value) is not int or value != 1:
        raise checks.refuse("this LoKA reads version 1; write version: 1")
    return value


_MODS = doc("Mods", "Changes to the model that make more of it safe and fast in FP8; each says what it is for.")


class PolicySetting(SchemaModel):
    """A LoKA policy: the GEMMs of a model that run in FP8, and their recipes."""

    version: Annotated[Literal[1], BeforeValidator(_version)] = Field(
        title="Version", description="Of the policy language: 1."
    )
    name: Annotated[str, AfterValidator(checks.package_name)] = Field(
        title="Name",
        description="A Python identifier; the generated package is called so.",
        json_schema_extra={"pattern": checks.NAME_PATTERN},
    )
    model: ModelSetting = Field(
        title="Model", description="Which model this policy is for, and the batch size that shapes are taken at."
    )
    train: TrainSetting | None = doc("Training", "How the model trains; needed by probe, train and compare.")
    target: Annotated[TargetDevice, Strict(False)] | None = doc(
        "Target", f"The device that the plan is decided for, wherever it is generated. Default: {DEFAULT_TARGET}."
    )
    execution: ExecutionSetting | None = doc(
        "Execution",
        "How the model runs. Where its step waits for the host, the plan runs in FP8 only what does not make the step "
        "slower. Left out: the host is not considered.",
    )
    budget: PlanBudgetSetting | None = doc(
        "Budget", "What FP8 may cost the whole model, by what loka probe measured. Left out: no limit."
    )
    extends: Text | None = doc(
        "Base",
        "A policy that this one adds to, relative to this file. Mappings merge key by key and this file wins; rules "
        "and mods of the base come first.",
    )
    profile: Text | None = doc("Profile", "What loka probe learned, relative to this file.")
    measurements: Text | None = doc(
        "Measurements", "Kernels that loka bench kernels measured, relative to this file; left out: the set that ships."
    )
    defaults: SiteSetting | None = doc("Defaults", "What holds for every site before the rules.")
    rules: list[RuleSetting] | None = doc("Rules", "In order; each sets only the fields that it names; later wins.")
    mods: list[ModFields] | None = _MODS  # `policy_setting` replaces this by the models of mods


def policy_setting(mods: ModSchemas) -> type[PolicySetting]:
    """The schema of a policy that may list these mods."""
    return _policy_setting(tuple(mods.items()))


@cache
def _policy_setting(mods: tuple[tuple[str, type[ModFields]], ...]) -> type[PolicySetting]:
    return create_model(
        PolicySetting.__name__,
        __base__=PolicySetting,
        __doc__=PolicySetting.__doc__,
        mods=(list[any_mod(dict(mods))] | None, _MODS),  # type: ignore[arg-type, misc]
    )


def json_schema(mods: ModSchemas) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a policy file with these mods, for editors and `loka schema`.

    A file that extends another may leave out fields that its base has, so the required fields depend on `extends`.
    """
    schema: dict[str, Any] = _without_null(policy_setting(mods).model_json_schema(by_alias=True))
    models = {"model": "ModelSetting", "train": "TrainSetting", "execution": "ExecutionSetting"}
    inner = {key: {"required": schema["$defs"][name].pop("required")} for key, name in models.items()}
    whole = {"required": schema.pop("required"), "properties": inner}
    schema["anyOf"] = [whole, {"required": ["extends"]}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _without_null(node: Any) -> Any:
    """The schema without the null that stands for an omitted field, which a policy cannot write."""
    if isinstance(node, list):
        return [_without_null(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _without_null(value) for key, value in node.items() if not (key == "default" and value is None)}
    choices = node.get("anyOf")
    if isinstance(choices, list) and {"type": "null"} in choices:
        kept = [choice for choice in choices if choice != {"type": "null"}]
        rest = {key: value for key, value in node.items() if key != "anyOf"}
        return {**kept[0], **rest} if len(kept) == 1 else {**rest, "anyOf": kept}
    return node
