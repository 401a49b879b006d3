"""Headers, registrations and docstrings as lines: what the templates take that are not filled from values yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka.kernels.fused.norm.norm_spec import Spec
from loka.kernels.fused.norm.norm_values import TITLES

__all__ = ["TITLES", "WIDTH", "Views", "header", "indented", "opened", "operator_views", "registration"]

WIDTH = 120  # of a line


@dataclass(frozen=True, slots=True)
class Views:
    """The values of a family's template, and of the operator's."""

    kernel: dict[str, object]
    operator: dict[str, object]


def opened(before: str, items: Sequence[str], after: str, indent: int = 0) -> str:
    """`before(items)after` at `indent` columns, on one line: what renders it wraps it."""
    return f"{' ' * indent}{before}({', '.join(items)}){after}"


def registration(function: str, name: str, changes: Sequence[str] = ()) -> str:
    """The statement that makes the operator; `changes` are the parameters that it writes into."""
    deferred = opened("operators.deferred", ["__package__", f'"{function}"'], ",", 4)  # an item on a line of its own
    arguments = [
        f'"{name}"',
        deferred.strip().removesuffix(","),
        f"_{function}_reference",
        f"_{function}_shapes",
        *([f"changes=({', '.join(quoted)},)"] if (quoted := [f'"{name}"' for name in changes]) else []),
    ]
    return opened(f"{function} = operators.operator", arguments, "")


def header(function: str, parameters: Sequence[str], results: int) -> str:
    """The header of a function of these parameters that returns so many tensors."""
    gives = "Tensor" if results == 1 else f"tuple[{', '.join(['Tensor'] * results)}]"
    return opened(f"def {function}", parameters, f" -> {gives}:")


def indented(lines: Sequence[str]) -> str:
    """Lines of a docstring in a function's body."""
    return "\n".join(f"    {line}" for line in lines)


def operator_views(
    spec: Spec, parameters: list[str], reference: list[str], allocations: list[str], checks: list[str]
) -> dict[str, object]:
    """The values of the operator's template: its reference, and `checks` and `allocations` for its shapes."""
    count = len(spec.results)
    return {
        "reference_header": header(f"_{spec.function}_reference", parameters, count),
        "fake_header": header(f"_{spec.function}_shapes", parameters, count),
        "reference": reference,
        "allocations": [*checks, *allocations],
        "returned": f"    return {', '.join(spec.results)}",
    }
