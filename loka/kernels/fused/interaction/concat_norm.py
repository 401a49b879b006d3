"""Kernels of a norm over concatenated rows: parts, a residual added, and the norm, in one pass over the rows."""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.kernel_values import LARGEST_HELD, padded_width

NORMS = ("layer_norm", "rms_norm")
LARGEST_PARTS = 4


@dataclass(frozen=True, slots=True)
class _ConcatNorm:
    """What a forward and its backward are both rendered for."""

    width: int
    parts: int
    residual: bool
    norm: str
    weight: bool
    bias: bool
    eps: float  # not in the text of a backward: it is part of rstd

    def __post_init__(self) -> None:
        reason = unsupported_reason(self.norm, self.width, self.parts)
        if reason is not None:
            raise InputError(reason)
        if self.parts == 1 and not self.residual:
            raise InputError("one part without a residual is a norm alone; render that")
        if not 0.0 <= self.eps < float("inf"):
            raise InputError(f"the eps of a norm must be finite, zero or above, not {self.eps}")


@dataclass(frozen=True, slots=True)
class ConcatNormForward(_ConcatNorm):
    """norm(cat(parts, -2) [+ residual]) over the last dimension.

    Parameters: part_0 (B, n_0, width), part_1 (B, n_1, width), ..., residual (B, n, width) with n the sum of the n_i,
    weight and bias (width,), those present, of any floating dtypes; and `dtype: torch.dtype` of the result. A single
    part needs a residual. Results: out (B, n, width); then mean (B * n,) and rstd (B * n,) in float32, which the
    backward needs: rms_norm has only rstd.
    """

    @property
    def function(self) -> str:
        """The operator's name."""
        eps = "" if self.eps == 1e-5 else "eps_" + "".join(c if c.isalnum() else "_" for c in repr(self.eps))
        return "_".join(item for item in ("concat_norm", _what(self), str(self.width), eps) if item)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's tensor parameters."""
        return (*part_names(self.parts), *_named(residual=self.residual, weight=self.weight, bias=self.bias))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("out", *_statistics(self))


@dataclass(frozen=True, slots=True)
class ConcatNormBackward(_ConcatNorm):
    """The gradient of `ConcatNormForward` with respect to cat(parts, -2) + residual, and to weight and bias.

    Parameters: grad (B, n, width), the parts and the residual as in the forward, weight, mean, rstd. Results: dx (B, n,
    width), in the dtype of part_0 or of the residual, whichever is wider; its parts along dimension 1 are the gradients
    of the parts; dweight and dbias, partial sums (P, width) in float32, which `Reduce` adds up.
    """

    @property
    def function(self) -> str:
        """The operator's name."""
        return f"concat_norm_{_what(self)}_backward_{self.width}"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The operator's parameters, all tensors."""
        vectors = _named(residual=self.residual, weight=self.weight)
        return ("grad", *part_names(self.parts), *vectors, *_statistics(self))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the operator's results."""
        return ("dx", *_named(dweight=self.weight, dbias=self.bias))


def backward_of(spec: ConcatNormForward) -> ConcatNormBackward:
    """The spec of its gradients."""
    return ConcatNormBackward(spec.width, spec.parts, spec.residual, spec.norm, spec.weight, spec.bias, spec.eps)


def part_names(parts: int) -> tuple[str, ...]:
    """part_0, part_1, ..."""
    return tuple(f"part_{index}" for index in range(parts))


def _named(**present: bool) -> tuple[str, ...]:
    return tuple(name for name, there in present.items() if there)


def _statistics(spec: ConcatNormForward | ConcatNormBackward) -> tuple[str, ...]:
    return ("mean", "rstd") if spec.norm == "layer_norm" else ("rstd",)


def _what(spec: ConcatNormForward | ConcatNormBackward) -> str:
    """Name of the operation, such as 2_residual_layer_norm; unusual weights and biases of the norm are named."""
    unusual = "" if spec.weight else "unweighted"
    if spec.bias != (spec.norm == "layer_norm"):
        unusual += ("_" if unusual else "") + ("biased" if spec.bias else "unbiased")
    return "_".join(item for item in (str(spec.parts), "residual" if spec.residual else "", spec.norm, unusual) if item)


def unsupported_reason(norm: str, width: int, parts: int) -> str | None:
    """Reason why there is no kernel for this norm, width and number of parts; None where there is one."""
    if not 1 <= width <= LARGEST_HELD:
        return f"no kernel normalises concatenated rows {width} wide; they have 1 to {LARGEST_HELD} elements"
    if not 1 <= parts <= LARGEST_PARTS:
        return f"a kernel concatenates 1 to {LARGEST_PARTS} parts, not {parts}"
    if norm not in NORMS:
        return f"no kernel has a norm {norm!r} over concatenated rows; it can be {' or '.join(NORMS)}"
    return None


_TITLES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


@dataclass(frozen=True, slots=True)
class ConcatNormConfiguration:
    """Launch configuration."""

    rows: int  # rows per step of a program, a power of two
    warps: int  # of a program
    programs: int  # per multiprocessor, at most


def concat_norm_configuration(
    spec: ConcatNormForward | ConcatNormBackward, device: DeviceSpec = DEFAULT
) -> ConcatNormConfiguration:
    """The launch configuration for a spec.

    A backward kernel with sums for a weight or a bias keeps them in registers, so it has its own rows and warps.
    """
    launch, padded = device.launches.concat_norm, padded_width(spec.width)
    if padded > launch.wide:
        warps = min(launch.most_warps, padded // launch.wide_warp_elements)
        return ConcatNormConfiguration(1, warps, max(1, launch.wide_elements // padded))
    if isinstance(spec, ConcatNormForward) or not (spec.weight or spec.bias):
        return ConcatNormConfiguration(launch.elements // padded, *launch.launch)
    return ConcatNormConfiguration(launch.summed_elements // padded, *launch.summed)


def concat_norm_title(spec: ConcatNormForward | ConcatNormBackward) -> str:
    """What a kernel computes."""
    eps = f" (eps {spec.eps})" if isinstance(spec, ConcatNormForward) else ""
    what = f"{spec.parts} parts concatenated" if spec.parts > 1 else "a residual added"
    if spec.parts > 1 and spec.residual:
        what += ", a residual added"
    steps = f"{what} -> {_TITLES[spec.norm]}{eps}"
    return steps[0].upper() + steps[1:] if isinstance(spec, ConcatNormForward) else f"Gradient of {steps}"
