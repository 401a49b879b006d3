"""What the mods that rewrite forwards say of themselves, by the names that policies call them."""

from __future__ import annotations

from dataclasses import dataclass

from loka.mods import batch_small, fuse_interaction, merge_siblings, pad_alignment, residual_high_precision


@dataclass(frozen=True, slots=True)
class Description:
    """What a mod changes and what that is good for, in one line of `loka plan`."""

    text: str
    exact: bool  # the function stays the same, up to rounding


FORWARD_MOD_DESCRIPTIONS = {
    mod.NAME: Description(mod.PROMISE, mod.EXACT)
    for mod in (merge_siblings, batch_small, pad_alignment, fuse_interaction, residual_high_precision)
}
