"""Guards inside a straight-line forward: loops were unrolled and branches taken as planned, which every call checks."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, TypeVar

from loka.errors import InputError

Items = TypeVar("Items", bound=Sized)
Value = TypeVar("Value")
Named = TypeVar("Named", bound=Mapping[Any, Any])


def checked_length(items: Items, count: int) -> Items:
    """Return the list, tuple or Tensor unchanged. Raises InputError unless it has `count` items, as when planned."""
    if len(items) != count:
        raise InputError(
            f"a loop of this model was planned over {count} items and meets {len(items)}: run loka generate again, "
            "with model.inputs as the model is called"
        )
    return items


def checked_keys(items: Named, *keys: str | int) -> Named:
    """Return the dict unchanged. Raises InputError unless it has these keys in this order, as when planned."""
    if tuple(items) != keys:
        planned, met = (", ".join(map(repr, names)) or "none" for names in (keys, items))
        raise InputError(
            f"a loop of this model was planned over the keys {planned} and meets {met}: run loka generate again, with "
            "model.inputs as the model is called"
        )
    return items


def checked_branch(value: Value, planned: Value) -> Value:
    """Return the value unchanged. Raises InputError unless it is the one by which a branch was planned."""
    if value != planned:
        raise InputError(
            f"a branch of this model was planned for {planned} and meets {value}: run loka generate again, with "
            "model.inputs as the model is called"
        )
    return value


# Their names in generated code.
NAMES = {
    checked_length: "dispatch.checked_length",
    checked_keys: "dispatch.checked_keys",
    checked_branch: "dispatch.checked_branch",
}
