"""What the mods that rewrite forwards say of themselves; the same words as `loka.policy.schema_mods`."""

from __future__ import annotations

from dataclasses import dataclass

from loka.mods import fuse_interaction


@dataclass(frozen=True, slots=True)
class Promise:
    """What a mod changes and what that is good for, in one line of `loka plan`."""

    text: str
    exact: bool = True  # the function stays the same, up to rounding


FORWARD_MODS = {
    "merge_siblings": Promise("linears that share an input are one GEMM: one launch, and the input is read once"),
    "batch_small": Promise("small linears of one shape are one batched GEMM: one launch instead of many"),
    "pad_alignment": Promise("sizes of GEMMs are multiples of what kernels take: none pads or copies by itself"),
    fuse_interaction.NAME: Promise(fuse_interaction.PROMISE, fuse_interaction.EXACT),
    "residual_high_precision": Promise("residual sums are carried in a wider dtype: they lose less to rounding"),
}
