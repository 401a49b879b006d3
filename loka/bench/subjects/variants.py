"""The variants of a comparison: the unchanged model, other libraries, and generated packages."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum

from loka.errors import InputError


class Precision(StrEnum):
    """Precision of a variant's GEMMs."""

    TF32 = "tf32"
    BF16 = "bf16"
    FP8 = "fp8"  # precise accumulation
    FP8_FAST = "fp8-fast"  # fast accumulation

    @property
    def is_fp8(self) -> bool:
        """True if operands are FP8."""
        return self in (Precision.FP8, Precision.FP8_FAST)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of running a model. At most one of `torchao` and `defaults` is set; with neither it is unchanged."""

    name: str
    precision: Precision  # of the GEMMs that it changes; the others stay BF16
    torchao: str = ""  # training recipe; inference uses the configuration of the same granularity
    defaults: str = ""  # defaults of the package's policy, in YAML
    known: bool = False  # that policy has static scales, from a profile learned on the benchmark's own work

    @property
    def generated(self) -> bool:
        """True for a generated package."""
        return bool(self.defaults)


BASELINE = "bf16"  # ratios are over this variant
SHOWN = "loka-fp8"  # its bound is printed beside the times

_TRANSPOSED = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
_KNOWN = (
    "compute: fp8, scaling: tensorwise, power_of_two: true, fuse: always, "
    "fprop: {input: {range: static}}, dgrad: {grad_output: {range: static}}, wgrad: {range: static}"
)

VARIANTS = (
    Variant("tf32", Precision.TF32),
    Variant(BASELINE, Precision.BF16),
    Variant("torchao-tensorwise", Precision.FP8_FAST, torchao="tensorwise"),
    Variant("torchao-rowwise", Precision.FP8_FAST, torchao="rowwise"),
    Variant("loka-bf16", Precision.BF16, defaults="{compute: keep, fuse: always}"),
    Variant(SHOWN, Precision.FP8, defaults=f"{{{_TRANSPOSED}}}"),
    Variant("loka-fp8-fast", Precision.FP8_FAST, defaults=f"{{{_TRANSPOSED}, accumulation: fast}}"),
    Variant("loka-fp8-known", Precision.FP8, defaults=f"{{{_KNOWN}}}", known=True),
    Variant("loka-fp8-known-fast", Precision.FP8_FAST, defaults=f"{{{_KNOWN}, accumulation: fast}}", known=True),
)
NAMES = tuple(variant.name for variant in VARIANTS)


def choose(names: str | None, known: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    """The names in a comma-separated list, in the order of `known`; all of them for None.

    Raises InputError for an unknown name, and for an empty list.
    """
    if names is None:
        return known
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise InputError(f"--variants: there is no {unknown[0]!r}; there are {', '.join(known)}{hint}")
    if not wanted:
        raise InputError(f"--variants: names none; there are {', '.join(known)}")
    return tuple(name for name in known if name in wanted)


def variants_named(names: tuple[str, ...]) -> tuple[Variant, ...]:
    """The variants of these names, in their order."""
    return tuple(variant for variant in VARIANTS if variant.name in names)
