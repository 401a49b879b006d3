"""Variants of a policy's model, and the blocks of measurements that compare them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

from loka.bench.options import listed


class Compiling(StrEnum):
    """What of a model is compiled."""

    EAGER = "eager"
    DEFAULT = "torch.compile"
    MAX_AUTOTUNE = "max-autotune"
    FUNCTIONS = "patch.compile"  # the generated functions alone


class StepLaunch(StrEnum):
    """How the host launches a step."""

    LOOP = "loop"  # a plain loop, without a CUDA graph
    REDUCE_OVERHEAD = "reduce-overhead"  # CUDA graphs of the compiled parts
    CAPTURED = "captured"  # the whole step as one CUDA graph


class Casting(StrEnum):
    """The dtypes of training and serving in bfloat16."""

    AUTOCAST = "autocast"  # float32 parameters
    BFLOAT16 = "bfloat16"  # everything in bfloat16, without autocast


class PackageKind(StrEnum):
    """The generated package of a variant."""

    BF16 = "bf16"  # every site `compute: keep, fuse: always`
    POLICY = "policy"  # of the policy as it is


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """One way of running a policy's model. At most one of `torchao` and `package` is set; with neither it is torch's.

    `float32`: with TF32 products, whatever the casting. `adapted`: with the policy's mods that change modules, which
    packages have anyway. `counters`: the ids of its GEMMs' counters begin there, or later if it is in use.
    """

    name: str
    compiling: Compiling = Compiling.DEFAULT
    float32: bool = False
    adapted: bool = False
    torchao: str = ""  # recipe, or granularity in inference
    package: str | None = None  # a PackageKind, or the name of a plan that the subject was given
    counters: int = 0

    @property
    def launches(self) -> tuple[StepLaunch, ...]:
        """The launches that there are for it: nothing of an eager model can be a graph, unless the whole step is."""
        if self.compiling is Compiling.EAGER:
            return StepLaunch.LOOP, StepLaunch.CAPTURED
        return tuple(StepLaunch)

    @property
    def tunes(self) -> bool:
        """True if it is compiled with max-autotune, which takes minutes."""
        return self.compiling is Compiling.MAX_AUTOTUNE

    def compile_mode(self, launch: StepLaunch) -> str | None:
        """`mode` of torch.compile, of the model or of its functions; None: the default."""
        graphs = launch is StepLaunch.REDUCE_OVERHEAD
        if self.tunes:
            return "max-autotune" if graphs else "max-autotune-no-cudagraphs"
        return "reduce-overhead" if graphs else None


MODEL_BASELINE = "bf16"  # ratios are over this variant, in the same block

MODEL_VARIANTS = (  # in the order of the tables
    ModelVariant("tf32-eager", Compiling.EAGER, float32=True),
    ModelVariant("tf32", float32=True),
    ModelVariant("tf32-max-autotune", Compiling.MAX_AUTOTUNE, float32=True),
    ModelVariant("bf16-eager", Compiling.EAGER),
    ModelVariant(MODEL_BASELINE),
    ModelVariant("bf16-max-autotune", Compiling.MAX_AUTOTUNE),
    ModelVariant("bf16-mods", adapted=True),
    ModelVariant("torchao-tensorwise", torchao="tensorwise"),
    ModelVariant("torchao-rowwise", torchao="rowwise"),
    ModelVariant("loka-bf16-eager", Compiling.EAGER, package=PackageKind.BF16),
    ModelVariant("loka-bf16", package=PackageKind.BF16),
    ModelVariant("loka-fp8-eager", Compiling.EAGER, package=PackageKind.POLICY),
    ModelVariant("loka-fp8-functions", Compiling.FUNCTIONS, package=PackageKind.POLICY),
    ModelVariant("loka-fp8", package=PackageKind.POLICY),
)
MODEL_NAMES = tuple(variant.name for variant in MODEL_VARIANTS)


@dataclass(frozen=True, slots=True)
class StepBlock:
    """Steps that are compared: variants in one block are timed in turns."""

    casting: Casting
    training: bool
    launch: StepLaunch

    @property
    def mode(self) -> str:
        """train or infer."""
        return "train" if self.training else "infer"

    @property
    def label(self) -> str:
        """Name in lines of progress."""
        return f"{self.mode} {self.casting.value} {self.launch.value}"


MODES = ("train", "infer")


def chosen_variants(names: str | None) -> tuple[ModelVariant, ...]:
    """The variants of a comma-separated list, all for None; the baseline always. Raises InputError as `listed` does."""
    wanted = {*(listed("--variants", names, MODEL_NAMES) or MODEL_NAMES), MODEL_BASELINE}
    return tuple(variant for variant in MODEL_VARIANTS if variant.name in wanted)


def chosen_blocks(only: str | None, castings: str | None) -> tuple[StepBlock, ...]:
    """The blocks of `--only`, a comma-separated list of modes and launches, and of `--casting`, in order.

    Without a mode in the list both are chosen, and likewise all launches; without castings autocast alone. Every mode
    is measured without a graph before any is with one. Raises InputError for an unknown name and for an empty list.
    """
    wanted = listed("--only", only, (*MODES, *StepLaunch))
    modes = [mode for mode in MODES if mode in wanted] or list(MODES)
    launches = [launch for launch in StepLaunch if launch in wanted] or list(StepLaunch)
    written = listed("--casting", castings, tuple(Casting)) or (Casting.AUTOCAST,)
    chosen = [Casting(casting) for casting in written]
    return tuple(
        StepBlock(casting, mode == "train", launch) for launch, casting, mode in product(launches, chosen, modes)
    )


def in_measuring_order(variants: Iterable[ModelVariant], launch: StepLaunch) -> tuple[ModelVariant, ...]:
    """The variants that there are for a launch, the most telling first, for runs that end early.

    The baseline, generated packages (the policy's first, and compiled as a whole first), the others in bfloat16, TF32;
    and last those whose compilation takes minutes.
    """

    def rank(variant: ModelVariant) -> tuple[bool, ...]:
        compiled, policys = variant.compiling is Compiling.DEFAULT, variant.package == PackageKind.POLICY
        last = variant.tunes, variant.float32, variant.package is None
        return variant.name != MODEL_BASELINE, *last, not compiled, not policys

    return tuple(sorted((variant for variant in variants if launch in variant.launches), key=rank))
