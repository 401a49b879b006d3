"""How a producer quantises what it made: the granularity of the scales, the format, and whether scales are rounded.

| scaling | scales | passes over the result | what else comes back | |---|---|---|---| | rowwise | (M, 1), found | one |
`scale_max` (P,): the largest scale that each program wrote, for `RequantizeTranspose` | | blockwise | (M, ceil(width /
128)), found | one | | | static | one, given as `scale` (1, 1) | one | `amax` (P,), `overflow` (P,): see below; or, with
`overflow_stats`, neither | | tensorwise | (1, 1), found from `maxima` (Q,) | two launches: `maximum`, then this one | |
| maximum | none: nothing is written but `amax` (P,) | | |

With a static scale (of a profile's maximum, or of the last step's) nothing is read twice. The largest finite magnitude
that each program met is returned, and how many elements were above the format's maximum at that scale (int32). Those
are saturated; the counts are the record of it. `tensorwise` finds the scale on the device from the `amax` of a launch
of `maximum` with the same arguments: the host reads nothing.

With `overflow_stats`, a static scale's kernel adds to a tensor `overflow_stats` (2,) int64 that the caller keeps,
instead of returning amax and overflow: overflow_stats[0] grows by the count, overflow_stats[1] to the bits of the
largest magnitude, which order as the magnitudes do. So steps add up on the device, and nothing else is launched.

`scale_max` is for `RequantizeTranspose`, which takes e4m3 with scales that are powers of two. A transposed copy under
one scale comes with the rows in the same pass where nothing is computed before (`CastTranspose`).

Any norm, activation, vector and matrix goes with any mode, forward and backward. Refused, by the specs: a mode without
`quantise`; a `maximum` that would save a norm's statistics, keep a sum or carry a gradient, which the launch that
writes the values does.

Values agree with `numerics.quantize` bit for bit, given the same float32 result of the producer.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.errors import InputError
from loka.numerics.enums import Format
from loka.numerics.formats import FORMATS

SCALINGS = ("rowwise", "blockwise", "static", "tensorwise", "maximum")
_FOUND = ("rowwise", "blockwise", "tensorwise")
_DESCRIPTIONS = {
    "rowwise": "with one {}scale a row",
    "blockwise": "with {}scales of 128 elements",
    "static": "under a static {}scale",
    "tensorwise": "with one {}scale",
}
_REFERENCES = {
    "rowwise": "quantise_rows",
    "blockwise": "quantise_blocks",
    "static": "quantise_static",
    "tensorwise": "quantise_tensor",
    "maximum": "largest_magnitude",
}
_SHORT = {"rowwise": "rows", "blockwise": "blocks", "static": "static", "tensorwise": "tensorwise"}


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The mode of a quantising kernel. Raises InputError for one that does not exist."""

    scaling: str = "rowwise"  # one of SCALINGS
    format: Format = Format.E4M3
    power_of_two: bool = True  # scales rounded up to powers of two, or, where static, promised to be: no division then
    overflow_stats: bool = False  # where static: amax and overflow go to a tensor that the caller keeps

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise InputError(f"no kernel quantises {self.scaling!r}; it can be {', '.join(SCALINGS)}")
        if self.format not in FORMATS:
            raise InputError(f"no kernel writes the format {self.format!r}; it can be {', '.join(FORMATS)}")
        if self.scaling == "maximum" and (self.format is not Format.E4M3 or not self.power_of_two):
            raise InputError("a kernel that finds the maximum alone has neither format nor scale; leave both alone")
        if self.overflow_stats and self.scaling != "static":
            raise InputError(f"a kernel counts what a static scale does not hold, and {self.scaling} is none")

    @property
    def name(self) -> str:
        """In the names of kernels: e4m3, e5m2_static, e4m3_blockwise_divided, maximum."""
        if self.scaling == "maximum":
            return "maximum"
        parts = [self.format.value, *([self.scaling] if self.scaling != "rowwise" else [])]
        parts += ["counted"] if self.overflow_stats else []
        return "_".join([*parts, *([] if self.power_of_two else ["divided"])])

    @property
    def description(self) -> str:
        """What a kernel makes."""
        if self.scaling == "maximum":
            return "its largest magnitude"
        scales = _DESCRIPTIONS[self.scaling].format("power-of-two " if self.power_of_two else "")
        return f"{self.format.value} {scales}"

    @property
    def short_description(self) -> str:
        """The same where little room is left."""
        if self.scaling == "maximum":
            return "maximum"
        return f"{self.format.value} {_SHORT[self.scaling]}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The host function's parameters that come last."""
        if self.overflow_stats:
            return ("scale", "overflow_stats")
        return {"static": ("scale",), "tensorwise": ("maxima",)}.get(self.scaling, ())

    @property
    def results(self) -> tuple[str, ...]:
        """What the host function returns first."""
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
        """Whether the kernel finds scales from maxima."""
        return self.scaling in _FOUND

    @property
    def limit(self) -> float:
        """The format's largest finite value."""
        return FORMATS[self.format].max

    @property
    def reference(self) -> str:
        """The name of the function in `norm_reference` that quantises so."""
        return "quantise_static_counted" if self.overflow_stats else _REFERENCES[self.scaling]

    @property
    def triton_type(self) -> str:
        """The values' type in a kernel."""
        return "tl.float8e4nv" if self.format is Format.E4M3 else "tl.float8e5"

    @property
    def torch_type(self) -> str:
        """The values' type in torch."""
        return str(FORMATS[self.format].dtype)


ROWWISE = Quantisation()
