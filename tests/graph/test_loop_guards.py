"""Guards inside a forward."""

from __future__ import annotations

import pytest
import torch

from loka.errors import InputError
from loka.graph.guards import checked_branch, checked_length


def test_what_is_as_planned_is_given_back() -> None:
    items = [torch.ones(1)] * 2
    assert checked_length(items, 2) is items
    assert checked_branch(3, 3) == 3


def test_anything_else_says_what_to_do() -> None:
    with pytest.raises(InputError, match="planned over 2 items and meets 3: run loka generate again"):
        checked_length([1, 2, 3], 2)
    with pytest.raises(InputError, match="planned for 3 and meets 4: run loka generate again"):
        checked_branch(4, 3)
