"""The mods that rewrite forwards, as one: a change of each is data, which `rewrite` carries out in a forward."""

from __future__ import annotations

from collections.abc import Callable

from loka.graph.ir import ForwardIR
from loka.mods import batch_small, merge_siblings, pad_alignment
from loka.mods.batch_small import Batch
from loka.mods.merge_siblings import Siblings
from loka.mods.pad_alignment import Pad

Change = Siblings | Batch | Pad


def rewrite(forward: ForwardIR, change: Change) -> ForwardIR:
    """The forward with one change carried out, which is of a forward with the same calls."""
    match change:
        case Siblings():
            return merge_siblings.rewrite(forward, change)
        case Batch():
            return batch_small.rewrite(forward, change)
        case Pad():
            return pad_alignment.rewrite(forward, change)


def under(change: Change, rename: Callable[[str], str]) -> Change:
    """The same change, its sites under other names."""
    return change.under(rename)


def mod_of(change: Change) -> str:
    """As a policy writes it."""
    match change:
        case Siblings():
            return merge_siblings.NAME
        case Batch():
            return batch_small.NAME
        case Pad():
            return pad_alignment.NAME
