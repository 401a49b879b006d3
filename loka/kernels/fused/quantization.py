"""Quantization modes of fused kernels: the granularity of the scales, the format, and rounding of the scales.

| scaling    | scales                            | launches                       | further results              |
|------------|-----------------------------------|--------------------------------|------------------------------|
| rowwise    | (M, 1), computed                  | one                            | `scale_max` (P,)             |
| blockwise  | (M, ceil(width / 128)), computed  | one                            |                              |
| static     | one, given as `scale` (1, 1)      | one                            | `amax` (P,), `overflow` (P,) |
| tensorwise | (1, 1), computed from `maxima`    | two: `maximum`, then this one  |                              |
| maximum    | none: only `amax` is written      | one                            | `amax` (P,)                  |

`scale_max` is the largest scale that each program wrote. It is for `RequantizeTranspose`, which takes e4m3 with
power-of-two scales. `CastTranspose` quantizes a matrix and its transpose under one scale in a single pass, where no
operation comes before.

With a static scale (from a profile's maximum, or from the last step) nothing is read twice. Each program returns the
largest finite magnitude that it read, and the number of elements above the format's maximum at that scale (int32),
which are saturated. `tensorwise` computes the scale on the device from `maxima` (Q,), the `amax` of a launch of
`maximum` with the same arguments; the host reads nothing.

With `overflow_stats`, a kernel with a static scale updates a tensor `overflow_stats` (2,) int64 of the caller instead
of returning amax and overflow: the count is added to overflow_stats[0], and overflow_stats[1] becomes the maximum of
itself and the bits of the largest magnitude, which sort like the magnitudes. So the statistics accumulate over steps on
the device, without another launch.

Any norm, activation, vector and matrix can be combined with any mode, forward and backward. Specs reject a mode without
`quantize`, and a `maximum` that would save a norm's statistics, keep a sum or pass on a gradient, as the launch that
writes the values does that.

Values agree with `numerics.quantize` bit for bit, given the same float32 input.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.errors import InputError
from loka.numerics.enums import Format
from loka.numerics.quantize import FORMATS

SCALINGS = ("rowwise", "blockwise", "static", "tensorwise", "maximum")
_FOUND = ("rowwise", "blockwise", "tensorwise")
_DESCRIPTIONS = {
    "rowwise": "with one {}scale a row",
    "blockwise": "with {}scales of 128 elements",
    "static": "under a static {}scale",
    "tensorwise": "with one {}scale",
}
_REFERENCES = {
    "rowwise": "quantize_rows",
    "blockwise": "quantize_blocks",
    "static": "quantize_static",
    "tensorwise": "quantize_tensor",
    "maximum": "largest_magnitude",
}
_SHORT = {"rowwise": "rows", "blockwise": "blocks", "static": "static", "tensorwise": "tensorwise"}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Quantization mode of a kernel. Raises InputError for one that does not exist."""

    scaling: str = "rowwise"  # one of SCALINGS
    format: Format = Format.E4M3
    power_of_two: bool = True  # scales are rounded up to powers of two or, if static, must be such: no division
    overflow_stats: bool = False  # static only: amax and overflow are added to a tensor of the caller

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise InputError(f"no kernel quantizes {self.scaling!r}; it can be {', '.join(SCALINGS)}")
        if self.format not in FORMATS:
            raise InputError(f"no kernel writes the format {self.format!r}; it can be {', '.join(FORMATS)}")
        if self.scaling == "maximum" and (self.format is not Format.E4M3 or not self.power_of_two):
            raise InputError("a kernel that finds the maximum alone has neither format nor scale; leave both alone")
        if self.overflow_stats and self.scaling != "static":
            raise InputError(f"a kernel counts what a static scale does not hold, and {self.scaling} is none")

    @property
    def name(self) -> str:
        """Suffix of kernel names: e4m3, e5m2_static, e4m3_blockwise_divided, maximum."""
        if self.scaling == "maximum":
            return "maximum"
        parts = [self.format.value, *([self.scaling] if self.scaling != "rowwise" else [])]
        parts += ["counted"] if self.overflow_stats else []
        return "_".join([*parts, *([] if self.power_of_two else ["divided"])])

    @property
    def description(self) -> str:
        """Description of the result, for docstrings."""
        if self.scaling == "maximum":
            return "its largest magnitude"
        scales = _DESCRIPTIONS[self.scaling].format("power-of-two " if self.power_of_two else "")
        return f"{self.format.value} {scales}"

    @property
    def short_description(self) -> str:
        """A shorter description."""
        if self.scaling == "maximum":
            return "maximum"
        return f"{self.format.value} {_SHORT[self.scaling]}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """Last parameters of the operator."""
        if self.overflow_stats:
            return ("scale", "overflow_stats")
        return {"static": ("scale",), "tensorwise": ("maxima",)}.get(self.scaling, ())

    @property
    def results(self) -> tuple[str, ...]:
        """First results of the operator."""
        if self.overflow_stats:
            return ("values",)
        return {
            "rowwise": ("values", "scale", "scale_max"),
            "blockwise": ("values", "scale"),
            "static": ("values", "amax", "overflow"),
            "tensorwise": ("values", "scale"),
            "maximum": ("amax",),
        }[self.scaling]

    @property
    def found(self) -> bool:
        """True if the kernel computes scales from maxima."""
        return self.scaling in _FOUND

    @property
    def limit(self) -> float:
        """The format's largest finite value."""
        return FORMATS[self.format].max

    @property
    def reference(self) -> str:
        """Name of the function in `norm_reference` with the same quantization."""
        return "quantize_static_counted" if self.overflow_stats else _REFERENCES[self.scaling]


ROWWISE = Quantization()
