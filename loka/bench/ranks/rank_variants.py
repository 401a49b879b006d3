"""What `loka bench model --gpus` compares: how ranks share the work, BF16 and FP8, eager and compiled."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loka.bench.options import listed


class Sharing(StrEnum):
    """How the ranks train together."""

    FSDP2 = "fsdp2"  # fully_shard of each unit and of the model
    DDP = "ddp"
    ALONE = "alone"  # each trains by itself, without communication


class Numbers(StrEnum):
    """What the model computes in."""

    BF16 = "bf16"  # the factory's model
    FP8 = "loka-fp8"  # the generated package of the policy
    GATHERED = "loka-fp8-gather"  # the same, after patch.gather_fp8()


@dataclass(frozen=True, slots=True)
class RankVariant:
    """One way of training a policy's model on several GPUs, everything in bfloat16 that is not in FP8."""

    sharing: Sharing
    numbers: Numbers
    compiled: bool

    @property
    def name(self) -> str:
        """As typed: fsdp2-loka-fp8-gather, ddp-bf16-eager."""
        return f"{self.sharing.value}-{self.numbers.value}{'' if self.compiled else '-eager'}"

    @property
    def baseline(self) -> str:
        """The name of the variant that its ratio is over."""
        return RankVariant(self.sharing, Numbers.BF16, self.compiled).name

    @property
    def without_communication(self) -> str:
        """The name of the variant that computes the same, on each rank by itself."""
        numbers = Numbers.BF16 if self.numbers is Numbers.BF16 else Numbers.FP8
        return RankVariant(Sharing.ALONE, numbers, self.compiled).name


RANK_VARIANTS = tuple(  # in the order of measuring and of the tables
    RankVariant(sharing, numbers, compiled)
    for compiled in (True, False)
    for sharing in Sharing
    for numbers in Numbers
    if sharing is Sharing.FSDP2 or numbers is not Numbers.GATHERED
)


def chosen_rank_variants(names: str | None) -> tuple[RankVariant, ...]:
    """The variants of a comma-separated list, all for None, with their baselines. Raises InputError as `listed`."""
    known = {variant.name: variant for variant in RANK_VARIANTS}
    chosen = [known[name] for name in listed("--variants", names, tuple(known))] or RANK_VARIANTS
    wanted = {name for variant in chosen for name in (variant.name, variant.baseline)}
    return tuple(variant for variant in RANK_VARIANTS if variant.name in wanted)
