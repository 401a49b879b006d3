"""Views of quantizers and linears for their templates."""

from __future__ import annotations

from dataclasses import dataclass

from loka.numerics.scalings import Block


@dataclass(frozen=True, slots=True)
class QuantizerView:
    """View of a quantizer, for templates/quantizer.py.j2."""

    name: str
    format: str  # e4m3
    dtype: str  # torch.float8_e4m3fn
    maximum: str  # constant with the format's largest finite value
    block: Block  # elements that share a scale
    power_of_two: bool
    amax: str | None  # maximum of a static scale as a Python number; None for a dynamic scale
    static_scale: str | None  # the scale derived from it


@dataclass(frozen=True, slots=True)
class LinearView:
    """View of a linear, an autograd function and its wrapper, for templates/linear.py.j2.

    fprop, dgrad and wgrad are lines of code; () is a plain matmul.
    """

    function: str  # LinearE4m3Rowwise
    header: str
    said: str
    fprop: tuple[str, ...]
    dgrad: tuple[str, ...]
    wgrad: tuple[str, ...]
    bias: str  # "always", "never", "sometimes": calls that pass one


@dataclass(frozen=True, slots=True)
class FrozenView:
    """View of a linear with a frozen weight, for templates/linear_frozen.py.j2."""

    header: str
    fprop: tuple[str, ...]
    bias: str
