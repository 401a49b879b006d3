"""The kernel of a cross layer's gradients: its spec, launch and template values.

The forward, factor * (product + bias) + residual, is a `NormForward` without a norm.
"""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.kernel_values import LARGEST_HELD, padded_width
from loka.kernels.fused.norm.norm_spec import NormForward

_NO_EPS = 1e-05  # the value of specs without a norm


@dataclass(frozen=True, slots=True)
class CrossBackward:
    """The gradients of factor * (product + bias) + residual, except the residual's, which is `grad` itself.

    Parameters: grad, product, factor (M, width), then bias (width,) and passed (M, width) if present, of any floating
    dtypes. `passed` is another gradient of the factor, which is added to this one; so is grad, if the residual is the
    factor `itself`. Results: dproduct (M, width) in the dtype of product, dfactor (M, width) in that of factor, and
    with a bias dbias, partial sums (P, width) in float32, which `Reduce` adds up.
    """

    width: int
    bias: bool
    itself: bool
    passed: bool

    def __post_init__(self) -> None:
        reason = unsupported_reason(self.width)
        if reason is not None:
            raise InputError(reason)

    @property
    def function(self) -> str:
        """The operator's name."""
        what = [name for name in ("bias", "itself", "passed") if getattr(self, name)]
        return "_".join(["cross", *what, "backward", str(self.width)])

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        there = {"bias": self.bias, "passed": self.passed}
        return ("grad", "product", "factor", *(name for name, present in there.items() if present))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("dproduct", "dfactor", *(("dbias",) if self.bias else ()))


def cross_forward(width: int, bias: bool) -> NormForward:
    """The spec of the forward: x is the product, `add` the bias, `times` the factor."""
    return NormForward(width, None, False, False, _NO_EPS, None, bias, False, False, True, True)


@dataclass(frozen=True, slots=True)
class CrossConfiguration:
    """Launch configuration: a program takes a block of columns, in a grid-stride loop over blocks of rows."""

    columns: int  # of a block, a power of two
    rows: int  # of a block, a power of two
    warps: int  # of a program
    programs: int  # per multiprocessor for a block of columns, at most


def unsupported_reason(width: int) -> str | None:
    """Reason why there is no kernel for this width; None where there is one."""
    if not 1 <= width <= LARGEST_HELD:
        return f"no cross layer is {width} wide; rows have 1 to {LARGEST_HELD} elements"
    return None


def cross_configuration(spec: CrossBackward, device: DeviceSpec = DEFAULT) -> CrossConfiguration:
    """The launch for a spec: blocks of a fixed number of elements, few enough programs that each sums several."""
    launch = device.launches.cross
    columns = min(launch.columns, padded_width(spec.width))
    blocks = -(-spec.width // columns)
    return CrossConfiguration(columns, launch.elements // columns, launch.warps, max(1, launch.programs // blocks))


def cross_title(spec: CrossBackward) -> str:
    """What a kernel computes."""
    product = "(product + bias)" if spec.bias else "product"
    return f"Gradients of factor * {product} + {'factor' if spec.itself else 'residual'}"
