"""The host's side of norms and quantizers: checks, results, launches and references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from loka.kernels.fused import checks, operators
from loka.kernels.fused.kernel_values import padded_width
from loka.kernels.fused.launching import Launch
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.fused_cast_transpose import MOST_TILES, FusedCastTranspose, TransposeTile
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norm_values import MAXIMA, SUMS, Rows, WideRows, wide_norm_passes
from loka.kernels.fused.operators import SpecOperator
from loka.kernels.fused.quantization import Quantization
from loka.numerics.quantize import FORMATS

VECTORS = ("add", "weight", "bias")
MATRICES = ("residual_grad_in", "x", "times", "residual")  # beside the first parameter
SUMS_OF_COLUMNS = ("dweight", "dbias", "dadd")
_OUT = ("values", "out", "dx")  # of a kernel `out_ptr`

# The kernels' pointers, in order; one is None where the operator has no such parameter or result.
FORWARD_POINTERS = (
    *("x", "add", "times", "residual", "weight", "bias", "maxima", "overflow_stats"),
    *("out", "scale", "scale_max", "amax", "overflow", "kept", "mean", "rstd"),
)
BACKWARD_POINTERS = (
    *("grad", "residual_grad_in", "x", "add", "weight", "bias", "times", "mean", "rstd", "maxima", "overflow_stats"),
    *("out", "scale", "scale_max", "amax", "overflow", "residual_grad_out", "dweight", "dbias", "dadd"),
)


class _NormOperator(SpecOperator):
    """What all kernels of norms and quantizers have in common: arguments, the table of results, the reference."""

    spec: NormForward | NormBackward | FusedCastTranspose

    @property
    def norm(self) -> NormForward | NormBackward:
        """What is computed, with or without a transposed copy beside it."""
        return self.spec.spec if isinstance(self.spec, FusedCastTranspose) else self.spec

    @property
    def dtype(self) -> str:  # type: ignore[override]
        takes_dtype = isinstance(self.spec, NormForward) and self.spec.takes_dtype
        return "ScalarType? dtype=None" if takes_dtype else ""

    def check(self, arguments: Sequence[Any], width: int) -> None:
        """Raises InputError for arguments, beside the first, that a kernel for rows of that width does not take."""
        for name, tensor in zip(self.spec.parameters[1:], arguments[1:], strict=False):
            if name in MATRICES:
                checks.check_rows(tensor, width, arguments[0].shape[0])
            elif name in VECTORS:
                checks.check_vectors(width, tensor)
            elif name == "scale":
                checks.check_scale(tensor)
            elif name == "overflow_stats":
                checks.check_overflow_stats(tensor)

    def allocated(self, arguments: Sequence[Any], width: int, programs: int, parts: int) -> Any:
        """The results by the table of their shapes; `parts` are those of sums of columns."""
        parameters, spec, how = self.spec.parameters, self.norm, self.norm.how
        first = arguments[0]
        m = first.shape[0]
        dtype = arguments[len(parameters)] if len(arguments) > len(parameters) else None
        fp8, float32, own = FORMATS[how.format].dtype, torch.float32, dtype or first.dtype
        columns = spec.columns if spec.columns != spec.width else width
        outer = arguments[parameters.index("residual_grad_in")].dtype if "residual_grad_in" in parameters else own
        scale = {"rowwise": (m, 1), "blockwise": (m, (width + 127) // 128)}.get(how.scaling, (1, 1))
        shapes: dict[str, tuple[tuple[Any, ...], torch.dtype]] = {
            "values": ((m, columns), fp8),
            "transposed": ((width, m), fp8),
            "scale": (scale, float32),
            "scale_max": ((programs,), float32),
            "amax": ((programs,), float32),
            "overflow": ((programs,), torch.int32),
            "out": ((m, width), own),
            "dx": ((m, width), first.dtype),
            "kept": ((m, width), own),
            "residual_grad_out": ((m, width), outer),
            "mean": ((m,), float32),
            "rstd": ((m,), float32),
            **dict.fromkeys(SUMS_OF_COLUMNS, ((parts, width), float32)),
        }
        made = tuple([first.new_empty(shapes[name][0], dtype=shapes[name][1]) for name in self.spec.results])
        return made if len(made) > 1 else made[0]

    def reference(self, *arguments: Any) -> Any:
        results, spec, how = self.spec.results, self.norm, self.norm.how
        given = dict(zip((*self.spec.parameters, "dtype"), arguments, strict=False))
        dtype = given.pop("dtype", None) or arguments[0].dtype
        quantizing = {name: given.pop(name) for name in how.parameters} if spec.quantize else {}
        norm: dict[str, Any] = {"norm": spec.norm, "activation": spec.activation, "eps": spec.eps, "block": spec.block}
        found: dict[str, Any]
        if isinstance(spec, NormForward):
            forward = norm_reference.norm_forward(given.pop("x"), **given, **norm)
            behind = spec.columns - spec.width
            y = torch.nn.functional.pad(forward.y, (0, behind)) if behind else forward.y
            found = {"out": y.to(dtype), "kept": forward.kept.to(dtype), "mean": forward.mean, "rstd": forward.rstd}
        else:
            backward = norm_reference.norm_backward(given.pop("grad"), **given, **norm)
            y, outer = backward.x, given.get("residual_grad_in", arguments[0]).dtype
            found = {"dx": y.to(arguments[0].dtype), "residual_grad_out": backward.sum.to(outer)}
            found |= {"dweight": backward.weight, "dbias": backward.bias, "dadd": backward.add}
        if spec.quantize:
            found |= dict(zip(how.results, quantized(how, y, *quantizing.values()), strict=True))
        if "transposed" in results:
            found["transposed"] = norm_reference.transpose(found["values"])
        made = tuple(found[name] for name in results)
        return made if len(made) > 1 else made[0]

    def contiguous(self, arguments: Sequence[Any]) -> list[Any]:
        """The tensors among the arguments as a kernel reads them: the first by whole rows, the others contiguous."""
        rest = (tensor.contiguous() for tensor in arguments[1 : len(self.spec.parameters)])
        return [checks.whole_rows(arguments[0]), *rest]


def quantized(how: Quantization, y: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """The results of a quantization of y (M, width), in the order of `how.results`; `given` are its parameters."""
    words: dict[str, Any] = {} if how.scaling == "maximum" else {"format": how.format.value}
    if how.found:
        words["power_of_two"] = how.power_of_two
    made = getattr(norm_reference, how.reference)(y, *given, **words)
    return made if isinstance(made, tuple) else (made,)


@dataclass(frozen=True)
class NormOperator(_NormOperator):
    """A norm's forward or backward of rows that a program holds, of each width in `launches`."""

    spec: NormForward | NormBackward
    launches: Mapping[int, Rows]  # by width

    @cached_property
    def _pointers(self) -> tuple[int | None, ...]:
        """The place of each of the kernel's pointers among parameters and results."""
        pointers = FORWARD_POINTERS if isinstance(self.spec, NormForward) else BACKWARD_POINTERS
        there = ["out" if name in _OUT else name for name in (*self.spec.parameters, *self.spec.results)]
        return tuple(there.index(name) if name in there else None for name in pointers)

    @cached_property
    def _constants(self) -> dict[int, tuple[object, ...]]:
        """The kernel's constants, by width."""
        spec, how = self.spec, self.spec.how
        scaling = how.scaling if spec.quantize else None
        last = (spec.norm, spec.eps, spec.block, spec.activation, scaling, how.limit, how.power_of_two)
        found = {}
        for width, it in self.launches.items():
            columns = spec.aligned or width if isinstance(spec, NormForward) else width
            sizes = (columns,) if isinstance(spec, NormForward) else ()
            found[width] = (width, padded_width(columns), *sizes, it.rows, it.stages, it.held, *last)
        return found

    def outputs(self, *arguments: Any) -> Any:
        first = arguments[0]
        width = checks.width_of(first, self.launches)
        self.check(arguments, width)
        programs = operators.programs(first, self.launches[width].least, self.launches[width].programs)
        return self.allocated(arguments, width, programs, programs)

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        forward = isinstance(self.spec, NormForward)
        tensors = [*self.contiguous(arguments), *results]
        width = int(tensors[0].shape[1])
        it = self.launches[width]
        programs = operators.programs(tensors[0], it.least, it.programs)
        pointers = [None if place is None else tensors[place] for place in self._pointers]
        maxima = pointers[(FORWARD_POINTERS if forward else BACKWARD_POINTERS).index("maxima")]
        sizes = [tensors[0].stride(0), tensors[0].shape[0], 0 if maxima is None else maxima.shape[0]]
        launch(
            kernels.norm_forward if forward else kernels.norm_backward,
            (programs,),
            *pointers,
            *sizes,
            *([width] if forward else []),
            constants=self._constants[width],
            num_warps=it.warps,
        )


@dataclass(frozen=True)
class WideNormOperator(_NormOperator):
    """A norm's forward or backward of rows that programs take in chunks."""

    spec: NormForward | NormBackward
    rows: WideRows

    @property
    def opaque(self) -> bool:  # type: ignore[override]
        """The compiler would add up the sums of rows in another order than torch."""
        return isinstance(self.spec, NormBackward)

    def _parts(self, first: Tensor) -> tuple[int, int]:
        """The programs, and the parts of the rows, of which each is shared by as many programs as there are chunks."""
        rows = self.rows
        if isinstance(self.spec, NormForward):
            programs = operators.programs(first, rows.least, rows.programs)
            return programs, programs
        parts = operators.row_parts(first, rows.least, rows.across, rows.programs)
        return parts * rows.across, parts

    def outputs(self, *arguments: Any) -> Any:
        checks.check_rows(arguments[0], self.spec.width)
        self.check(arguments, self.spec.width)
        return self.allocated(arguments, self.spec.width, *self._parts(arguments[0]))

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        spec, tensors = self.spec, self.contiguous(arguments)
        first = tensors[0]
        programs, parts = self._parts(first)
        found = dict(zip((*spec.parameters, *spec.results), (*tensors, *results), strict=True))
        sizes = (first.stride(0), first.shape[0])
        if isinstance(spec, NormForward):
            kernel = getattr(kernels, f"_{spec.function}")
            launch(kernel, (programs,), *found.values(), *sizes, num_warps=self.rows.warps)
            return
        for each in wide_norm_passes(spec):
            # Sums and maxima of rows come by columns: a pass writes those of its chunk, the next reads all.
            made = [name for name in each.tensors if name.startswith("sum_") or name == "maximum"]
            for name in made:
                found[name] = first.new_empty((first.shape[0], self.rows.across), dtype=torch.float32)
            taken = [found[name] for name in each.tensors]
            kernel = getattr(kernels, f"_{each.function}")
            launch(kernel, (parts * self.rows.across,), *taken, *sizes, parts, num_warps=self.rows.warps)
            if each.kind == SUMS:
                found |= {name.replace("sum", "mean"): found[name].sum(1) / spec.width for name in made}
            elif each.kind == MAXIMA:
                found["amax"] = found["maximum"].amax(1)


@dataclass(frozen=True)
class FusedCastTransposeOperator(_NormOperator):
    """A kernel that writes values and their transpose, tile by tile."""

    spec: FusedCastTranspose
    tile: TransposeTile

    def _parts(self, first: Tensor) -> int:
        """How many tiles there are one below the other: each has programs of its own."""
        return operators.programs(first, self.tile.rows, MOST_TILES)

    def outputs(self, *arguments: Any) -> Any:
        checks.check_rows(arguments[0], self.spec.width)
        self.check(arguments, self.spec.width)
        parts = self._parts(arguments[0])
        return self.allocated(arguments, self.spec.width, parts, parts)

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        tensors = self.contiguous(arguments)
        programs = self._parts(tensors[0]) * -(-self.spec.width // self.tile.columns)
        kernel = getattr(kernels, f"_{self.function}")
        sizes = (tensors[0].stride(0), tensors[0].shape[0])
        launch(kernel, (programs,), *tensors, *results, *sizes, num_warps=self.tile.warps)
