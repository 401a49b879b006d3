"""Loops in printed forwards: each was written out for a number of items, which every call checks."""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeVar

from loka.errors import InputError

NAME = "dispatch.checked_length"  # as generated code calls it

Items = TypeVar("Items", bound=Sized)


def checked_length(items: Items, count: int) -> Items:
    """The list, tuple or Tensor as it is. Raises InputError unless it has `count` items, as when it was planned."""
    if len(items) != count:
        raise InputError(
            f"a loop of this model was planned over {count} items and meets {len(items)}: run loka generate again, "
            "with model.inputs as the model is called"
        )
    return items
