"""The kernel of a cross layer's gradients: its spec, how it is launched, and what its template is given.

The forward, factor * (product + bias) + residual, is a `NormForward` without a norm.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.norm.norm_launch import padded_width
from loka.kernels.fused.norm.norm_spec import NormForward
from loka.kernels.fused.norm.norm_text import WIDTH, Views, header, indented, opened
from loka.kernels.fused.norm.norm_widths import LARGEST_HELD

_NO_EPS = 1e-05  # as in the specs of chains' kernels without a norm


@dataclass(frozen=True, slots=True)
class CrossBackward:
    """The gradients of factor * (product + bias) + residual but for the residual's, which is that of the whole.

    Parameters: grad, product, factor (M, width), bias (width,) and passed (M, width), those that there are, of any
    floating dtypes. `passed` is a gradient of the factor from elsewhere, which is added to this one's; where the
    residual is the factor `itself`, so is grad. Results: dproduct (M, width) in the dtype of product, dfactor (M,
    width) in that of factor, dbias, partial sums (P, width) in float32, which `Reduce` adds up.
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
        """The host function's name."""
        what = [name for name in ("bias", "itself", "passed") if getattr(self, name)]
        return "_".join(["cross", *what, "backward", str(self.width)])

    @property
    def parameters(self) -> tuple[str, ...]:
        """The host function's parameters, all tensors."""
        there = {"bias": self.bias, "passed": self.passed}
        return ("grad", "product", "factor", *(name for name, present in there.items() if present))

    @property
    def results(self) -> tuple[str, ...]:
        """What the host function returns."""
        return ("dproduct", "dfactor", *(("dbias",) if self.bias else ()))


def cross_forward(width: int, bias: bool) -> NormForward:
    """The kernel of the sum itself: x is the product, `add` the bias, `times` the factor."""
    return NormForward(width, None, False, False, _NO_EPS, None, bias, False, False, True, True)


@dataclass(frozen=True, slots=True)
class CrossConfiguration:
    """How the kernel is launched. Each program takes a block of columns, and every so many-th block of rows of it."""

    columns: int  # of a block, a power of two
    rows: int  # of a block, a power of two
    warps: int  # of a program
    programs: int  # for a block of columns, on each multiprocessor, at most


def unsupported_reason(width: int) -> str | None:
    """Why there is no kernel for this width; None where there is."""
    if not 1 <= width <= LARGEST_HELD:
        return f"no cross layer is {width} wide; rows have 1 to {LARGEST_HELD} elements"
    return None


def cross_configuration(spec: CrossBackward, device: DeviceSpec = DEFAULT) -> CrossConfiguration:
    """The choice for a spec: blocks of so many elements, and so few programs that each adds up several of them."""
    launch = device.launches.cross
    columns = min(launch.columns, padded_width(spec.width))
    blocks = -(-spec.width // columns)
    return CrossConfiguration(columns, launch.elements // columns, launch.warps, max(1, launch.programs // blocks))


def cross_backward_views(spec: CrossBackward, launched: CrossConfiguration) -> Views:
    """Views of the kernel."""
    masked = spec.width % launched.columns != 0
    matrices = [name for name in spec.parameters if name != "bias"]
    parameters = [f"{name}: Tensor" for name in spec.parameters]
    limits = f"rows={launched.rows}, per_multiprocessor={launched.programs}"
    allocations = [
        *(f"operators.check_rows({name}, {spec.width})" for name in matrices),
        "m = product.shape[0]",
        f"programs = operators.programs_for(m, product.device, {limits})",
        f"dproduct = product.new_empty((m, {spec.width}))",
        f"dfactor = factor.new_empty((m, {spec.width}))",
        *([f"dbias = product.new_empty((programs, {spec.width}), dtype=torch.float32)"] if spec.bias else []),
    ]
    grid = f"(programs, {-(-spec.width // launched.columns)})"
    arguments = [*(f"{name}.contiguous()" for name in spec.parameters), *spec.results]
    pointers = [f"{name}_ptr" for name in (*spec.parameters, *spec.results)]
    kernel: dict[str, object] = {
        "spec": spec,
        "rows": launched.rows,
        "columns": launched.columns,
        "masked": masked,
        "title": _title(spec),
        "shapes": indented(_shapes(spec)),
        "kernel_header": opened(f"def _{spec.function}", [*pointers, "m"], ":"),
        "host_header": header(spec.function, parameters, len(spec.results)),
        "allocations": allocations,
        "launch": opened(f"_{spec.function}[{grid}]", [*arguments, "m", f"num_warps={launched.warps}"], "", 4),
        "results": ", ".join(spec.results),
    }
    unread = () if spec.bias else ("programs = ",)
    operator: dict[str, object] = {
        "title": _title(spec),
        "comment": _shapes(spec),
        "reference_header": header(f"_{spec.function}_reference", parameters, len(spec.results)),
        "reference": [*(line for line in allocations if "check_rows" in line), *_reference(spec)],
        "fake_header": header(f"_{spec.function}_shapes", parameters, len(spec.results)),
        "allocations": [line for line in allocations if not line.startswith(unread)],
        "returned": f"    return {', '.join(spec.results)}",
    }
    return Views(kernel, operator)


def _title(spec: CrossBackward) -> str:
    product = "(product + bias)" if spec.bias else "product"
    return f"Gradients of factor * {product} + {'factor' if spec.itself else 'residual'}"


def _shapes(spec: CrossBackward) -> list[str]:
    known = {"bias": f"({spec.width},)", "dbias": f"(P, {spec.width})"}
    takes, gives = (
        ", ".join(f"{name} {known.get(name, f'(M, {spec.width})')}" for name in names)
        for names in (spec.parameters, spec.results)
    )
    return textwrap.wrap(f"{takes} -> {gives}.", WIDTH - 4)


def _reference(spec: CrossBackward) -> list[str]:
    given = [f"{name}={name}" for name in ("bias", "passed") if getattr(spec, name)]
    given += ["itself=True"] if spec.itself else []
    call = opened("found = cross_reference.cross_backward", ["grad", "product", "factor", *given], "", 4)
    results = ["found.product.to(product.dtype)", "found.factor.to(factor.dtype)"]
    results += ["found.bias"] if spec.bias else []
    return [*(line[4:] for line in call.split("\n")), f"return {', '.join(results)}"]
