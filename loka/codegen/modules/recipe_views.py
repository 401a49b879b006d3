"""What the templates of quantisers and linears are given."""

from __future__ import annotations

from dataclasses import dataclass

from loka.numerics.scalings import Block


@dataclass(frozen=True, slots=True)
class QuantiserView:
    """One quantiser, as templates/quantiser.py.j2 reads it."""

    name: str
    format: str  # e4m3
    dtype: str  # torch.float8_e4m3fn
    maximum: str  # the constant that holds the format's largest finite value
    block: Block  # what shares a scale
    power_of_two: bool
    amax: str | None  # the known maximum, as a Python number; None where it is measured
    static_scale: str | None  # and the scale that follows from it


@dataclass(frozen=True, slots=True)
class LinearView:
    """One linear: an autograd function and its wrapper, as templates/linear.py.j2 reads it.

    fprop, dgrad and wgrad are lines of code; () stands for a plain matmul.
    """

    function: str  # LinearE4m3Rowwise
    header: str
    said: str
    fprop: tuple[str, ...]
    dgrad: tuple[str, ...]
    wgrad: tuple[str, ...]
    bias: str  # "always", "never", "sometimes": what the calls pass


@dataclass(frozen=True, slots=True)
class FrozenView:
    """The wrapper for a weight that was quantised once, as templates/linear_frozen.py.j2 reads it."""

    header: str
    fprop: tuple[str, ...]
    bias: str
