"""The schema of a whole policy, of which `site_schema` has the rules.

Titles and descriptions are user documentation: `loka schema` prints them.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Strict, WithJsonSchema, create_model

from loka.devices.spec import Execution
from loka.devices.targets import DEFAULT, DEVICES
from loka.numerics.enums import Autocast
from loka.policy import checks
from loka.policy.communication import CommunicationSetting
from loka.policy.mod_schema import AutoModsSetting, ModFields, ModSchemas, Number, SchemaModel, Size, Text, any_mod, doc
from loka.policy.mod_schema import Pattern as NamePattern
from loka.policy.site_schema import RuleSetting, SiteSetting


class Optimizer(StrEnum):
    """The optimisers of `loka train` and `loka compare`."""

    ADAM = "adam"
    ADAGRAD = "adagrad"
    SGD = "sgd"


_Callable = Annotated[
    str, AfterValidator(checks.callable_name), Field(json_schema_extra={"pattern": checks.CALLABLE_PATTERN})
]
_SeedRange = Annotated[
    str, AfterValidator(checks.seed_range), Field(json_schema_extra={"pattern": checks.SEEDS_PATTERN})
]
_Head = Annotated[str | int, BeforeValidator(checks.head)]
_Milliseconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


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

    ne_percent: Number | None = doc(
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
    target: Annotated[str, AfterValidator(checks.target), WithJsonSchema({"enum": list(DEVICES)})] | None = doc(
        "Target", f"The device that the plan is decided for, wherever it is generated. Default: {DEFAULT.name}."
    )
    execution: ExecutionSetting | None = doc(
        "Execution",
        "How the model runs. Where its step waits for the host, the plan runs in FP8 only what does not make the step "
        "slower. Left out: the host is not considered.",
    )
    budget: PlanBudgetSetting | None = doc(
        "Budget", "What FP8 may cost the whole model, by what loka probe measured. Left out: no limit."
    )
    units: Annotated[list[NamePattern], Field(min_length=1)] | None = doc(
        "Units",
        "Patterns of the modules that fully_shard wraps one by one (FSDP2): of each the outermost that it matches. No "
        "forward that is rewritten goes beyond a unit. Left out: units have to hold the modules that are bound.",
    )
    communication: CommunicationSetting | None = doc(
        "Communication", "What FSDP2's all-gathers of weights and TorchRec's exchanges of embeddings carry."
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
    mods: list[ModFields | AutoModsSetting] | None = _MODS  # `policy_setting` replaces this by the models of mods


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
    listed = schema["properties"]["mods"]
    words = {key: listed.pop(key) for key in ("title", "description")}
    schema["properties"]["mods"] = {**words, "anyOf": [listed, {"$ref": f"#/$defs/{AutoModsSetting.__name__}"}]}
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
