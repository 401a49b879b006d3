"""Guards of unrolled loops: each loop was unrolled for a fixed number of items, which every call checks."""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeVar

from loka.errors import InputError

NAME = "dispatch.checked_length"  # its name in generated code

Items = TypeVar("Items", bound=Sized)


def checked_length(items: Items, count: int) -> Items:
    """Return the list, tuple or Tensor unchanged. Raises InputError unless it has `count` items, as when planned."""
    if len(items) != count:
        raise InputError(
            f"a loop of this model was planned over {count} items and meets {len(items)}: run loka generate again, "
            "with model.inputs as the model is called"
        )
    return items
