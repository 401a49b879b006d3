"""Expands a setting of a policy into leaves, broad before narrow, for the cascade."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum

from loka.numerics.enums import OPERANDS, AccumulationSetting, Compute, Gemm, Operand, Range, Scaling
from loka.numerics.recipe import TRANSPOSED_FROM, OperandRecipe
from loka.numerics.scalings import blockwise
from loka.policy.policy import OPERAND_FIELDS, Leaf
from loka.policy.settings import Assignment, Budget, SiteSettings
from loka.policy.site_schema import GemmFields, OperandSetting, ScalingChoice, SiteScaling, SiteSetting
from loka.policy.tree import Node, Path, node_at

GEMM_FIELDS = ("compute", "accumulation", "padding", "kernel")
BUILT_IN = "built-in"


@dataclass(frozen=True, slots=True)
class RuleOrigin:
    """Origin of a setting: its tree and path, and the name shown as its source."""

    root: Node
    path: Path
    source: str

    def leaf(self, name: str, value: object, *steps: str) -> Leaf:
        """The leaf `name`, set by the field at `steps` below the setting."""
        node = node_at(self.root, (*self.path, *steps))
        text = node.text if isinstance(value, float) else shown_value(value)
        return Leaf(Assignment(name, text, self.source, node.place.file, node.place.line), value, node.place.column)


def shown_value(value: object) -> str:
    """A leaf's value in the syntax of policies."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.value if isinstance(value, StrEnum) else str(value)


def expand(setting: SiteSetting, origin: RuleOrigin) -> tuple[Leaf, ...]:
    """Every leaf that a setting assigns: the site's fields, then those of each GEMM, then those of each operand."""
    leaves = []
    if setting.scaling is SiteScaling.AUTO:  # before the others, which narrow its choice
        leaves.append(origin.leaf("scaling", setting.scaling, "scaling"))
    leaves += _gemm_fields(setting, Gemm, origin)
    if setting.budget is not None:
        for name, value in setting.budget:
            if value is not None:
                leaves.append(origin.leaf(f"budget.{name}", value, "budget", name))
    if setting.fuse is not None:
        leaves.append(origin.leaf("fuse", setting.fuse, "fuse"))
    gemms = [(gemm, getattr(setting, gemm.value)) for gemm in Gemm]
    for gemm, fields in gemms:
        if fields is not None:
            leaves.extend(_gemm_fields(fields, (gemm,), origin, gemm.value))
    for gemm, fields in gemms:
        for operand in OPERANDS[gemm]:
            recipe = getattr(fields, operand.value) if fields is not None else None
            if recipe is not None:
                leaves.extend(_operand_fields(recipe, ((gemm, operand),), origin, gemm.value, operand.value))
    return tuple(leaves)


def built_in() -> tuple[Leaf, ...]:
    """The built-in settings of a site, leaf by leaf."""
    recipe = OperandRecipe()
    values: dict[str, object] = {}
    for gemm in Gemm:
        values |= {
            f"{gemm}.compute": Compute.AUTO,
            f"{gemm}.accumulation": AccumulationSetting.PRECISE,
            f"{gemm}.padding": True,
        }
        for operand in OPERANDS[gemm]:
            values |= {f"{gemm}.{operand}.{name}": getattr(recipe, name) for name in OPERAND_FIELDS}
    values |= {f"budget.{name}": value for name, value in asdict(Budget()).items()}
    values["fuse"] = SiteSettings(gemms={}).fuse
    return tuple(
        Leaf(Assignment(name, shown_value(value), BUILT_IN, "", 0), value, 0) for name, value in values.items()
    )


def _gemm_fields(fields: GemmFields, gemms: Iterable[Gemm], origin: RuleOrigin, *steps: str) -> Iterator[Leaf]:
    gemms = tuple(gemms)
    for name in GEMM_FIELDS:
        value = getattr(fields, name)
        if value is not None:
            for gemm in gemms:
                yield origin.leaf(f"{gemm}.{name}", value, *steps, name)
    pairs = [(gemm, operand) for gemm in gemms for operand in OPERANDS[gemm]]
    yield from _operand_fields(fields, pairs, origin, *steps)


def _operand_fields(
    fields: OperandSetting, pairs: Iterable[tuple[Gemm, Operand]], origin: RuleOrigin, *steps: str
) -> Iterator[Leaf]:
    pairs = tuple(pairs)
    for name in OPERAND_FIELDS:
        value = getattr(fields, name)
        if value is None or value is SiteScaling.AUTO:
            continue
        for gemm, operand in pairs:
            given = _scaling(value, operand) if name == "scaling" else value
            yield origin.leaf(f"{gemm}.{operand}.{name}", given, *steps, name)
            if value is Range.DYNAMIC:
                # Policies cannot write "no amax": `range: dynamic` clears an earlier one.
                yield origin.leaf(f"{gemm}.{operand}.amax", None, *steps, name)
    transposed = getattr(fields, "requantize_transpose", None)
    if transposed is not None:
        for gemm, operand in pairs:
            if (gemm, operand) in TRANSPOSED_FROM:
                yield origin.leaf(f"{gemm}.{operand}.requantize_transpose", transposed, *steps, "requantize_transpose")


def _scaling(choice: ScalingChoice | SiteScaling, operand: Operand) -> Scaling:
    if choice.value == ScalingChoice.BLOCKWISE.value:
        return blockwise(operand)
    return Scaling(choice.value)
