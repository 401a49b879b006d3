"""A part of a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from loka.errors import InputError


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def first_rows(batch: Any, rows: int) -> Any:
    """The first rows of each tensor of a batch; tensors without dimensions stay.

    Raises InputError if the first dimensions of its tensors differ: which are samples cannot be known.
    """
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    if len(sizes) != 1:
        found = f"have {', '.join(map(str, sorted(sizes)))} rows" if sizes else "are none"
        raise InputError(
            f"guard: rows={rows} takes the first rows of all tensors of the batch, which {found}: leave `rows` out, "
            "and cut the batch in `loss`, or give `step` tuples, lists or dicts of tensors with a row for each sample"
        )
    return tree_map(lambda leaf: leaf[:rows] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)
