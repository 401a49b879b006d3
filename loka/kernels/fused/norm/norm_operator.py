"""The host's side of norms and quantizers: checks, results, launches and references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loka.kernels.fused import checks, operators
from loka.kernels.fused.kernel_values import padded_width
from loka.kernels.fused.launching import Launch, launch_by_name
from loka.kernels.fused.norm import norm_reference
from loka.kernels.fused.norm.fused_cast_transpose import MOST_TILES, FusedCastTranspose, TransposeTile
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.norm_values import Rows
from loka.kernels.fused.operators import SpecOperator
from loka.kernels.fused.quantization import Quantization
from loka.numerics.quantize import FORMATS

VECTORS = ("add", "weight", "bias", "mean_dn", "mean_dn_n")
MATRICES = ("residual_grad_in", "x", "times", "residual", "multiplier")  # beside the first parameter
SUMS_OF_COLUMNS = ("dweight", "dbias", "dadd")
_WITH_SUMS_OF_ROWS = ("dweight", "dbias")  # of a backward of wide rows
_OUT = ("values", "out", "dx")  # of a kernel `out_ptr`


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
            elif name == "mask" and tensor is not None:
                checks.check_mask(tensor, arguments[0])

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
            "dmultiplier": ((m, width), first.dtype),
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
        norm |= {"dropout": spec.dropout}
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
            found |= {"dmultiplier": backward.multiplier.to(arguments[0].dtype)}
            found |= {"dweight": backward.weight, "dbias": backward.bias, "dadd": backward.add}
        if spec.quantize:
            found |= dict(zip(how.results, quantized(how, y, *quantizing.values()), strict=True))
        if "transposed" in results:
            found["transposed"] = norm_reference.transpose(found["values"])
        made = tuple(found[name] for name in results)
        return made if len(made) > 1 else made[0]

    def contiguous(self, arguments: Sequence[Any]) -> list[Any]:
        """The tensors among the arguments as a kernel reads them: two matrices by whole rows, the others contiguous."""
        parameters, found = self.spec.parameters, list[Any]()
        for place, tensor in enumerate(arguments[: len(parameters)]):
            by_rows = place == 0 or parameters[place] == "multiplier"
            if tensor is not None:  # as a mask may be
                tensor = checks.whole_rows(tensor) if by_rows else tensor.contiguous()
            found.append(tensor)
        return found


def quantized(how: Quantization, y: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    """The results of a quantization of y (M, width), in the order of `how.results`; `given` are its parameters."""
    words: dict[str, Any] = {} if how.scaling == "maximum" else {"format": how.format.value}
    if how.found:
        words["power_of_two"] = how.power_of_two
    made = getattr(norm_reference, how.reference)(y, *given, **words)
    return made if isinstance(made, tuple) else (made,)


@dataclass(frozen=True)
class NormOperator(_NormOperator):
    """A norm's forward or backward of rows, of each width in `launches`."""

    spec: NormForward | NormBackward
    launches: Mapping[int, Rows]  # by width

    @property
    def kernel(self) -> str:  # type: ignore[override]
        rows = "wide" if any(it.chunk for it in self.launches.values()) else "norm"
        return f"{rows}_forward" if isinstance(self.spec, NormForward) else f"{rows}_backward"

    @property
    def opaque(self) -> bool:  # type: ignore[override]
        """The compiler would add up the sums of wide rows in another order than torch."""
        return self.kernel == "wide_backward"

    def _programs(self, first: Tensor, width: int) -> tuple[int, int]:
        """The programs, and the parts of the rows: each is shared by as many programs as there are chunks."""
        it = self.launches[width]
        if not it.chunk or isinstance(self.spec, NormForward):
            programs = operators.programs(first, it.least, it.programs)
            return programs, programs
        across = -(-width // it.chunk)
        parts = operators.row_parts(first, it.least, across, it.programs)
        return parts * across, parts

    def outputs(self, *arguments: Any) -> Any:
        width = checks.width_of(arguments[0], self.launches)
        self.check(arguments, width)
        return self.allocated(arguments, width, *self._programs(arguments[0], width))

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        spec, how, tensors = self.spec, self.spec.how, self.contiguous(arguments)
        m, width = tensors[0].shape[0], int(tensors[0].shape[1])  # a width may be symbolic
        it, forward = self.launches[width], isinstance(spec, NormForward)
        programs, parts = self._programs(tensors[0], width)
        values: dict[str, Any] = dict(zip(spec.parameters, tensors, strict=True))
        gives = {"out" if name in _OUT else name: x for name, x in zip(spec.results, results, strict=True)}
        values |= {"m": m, f"{spec.parameters[0]}_stride": tensors[0].stride(0), "WIDTH": width, "STAGES": it.stages}
        values |= {"NORM": spec.norm, "EPS": spec.eps, "BLOCK": spec.block, "ACTIVATION": spec.activation}
        values |= {"SCALING": how.scaling if spec.quantize else None, "LIMIT": how.limit}
        values |= {"POWER_OF_TWO": how.power_of_two}
        kernel = getattr(kernels, self.kernel)
        if it.chunk and forward:
            values |= {"CHUNK": it.chunk}
        elif it.chunk:
            values |= {"parts": parts, "CHUNK": it.chunk, "ROWS": it.rows}
            self._launch_passes(kernel, programs, values, gives, launch)
            return
        else:
            columns = spec.columns if spec.columns != spec.width else width
            values |= {"PADDED": padded_width(columns), "ROWS": it.rows, "HELD": it.held}
            values |= {"parts": values["maxima"].shape[0] if "maxima" in values else 0}
            values |= {"COLUMNS": columns, "k": width} if forward else {}
            values |= {"DROPOUT": spec.dropout}
            values |= {"multiplier_stride": values["multiplier"].stride(0) if spec.multiplied else None}
        launch_by_name(launch, kernel, (programs,), values | gives, it.warps)

    def _launch_passes(
        self, kernel: Any, programs: int, values: dict[str, Any], gives: dict[str, Tensor], launch: Launch
    ) -> None:
        """A backward of wide rows: sums of rows and columns, then maxima of rows for their scales, then the result.

        Sums and maxima of rows come by columns: a pass writes those of its chunk, the next reads all.
        """
        width, averages, warps = values["WIDTH"], self.norm.traits.averages, self.launches[values["WIDTH"]].warps
        by_column = {name: gives.pop(name) for name in _WITH_SUMS_OF_ROWS if name in gives}
        size = (values["m"], -(-width // values["CHUNK"]))
        if averages or by_column:
            sums = {f"sum_{name}": values["grad"].new_empty(size, dtype=torch.float32) for name in averages}
            given = {name: value for name, value in values.items() if name not in self.norm.how.parameters}
            given |= {**by_column, **sums, "PASS": "sums", "SCALING": None}
            launch_by_name(launch, kernel, (programs,), given, warps)
            values = values | {f"mean_{name}": sums[f"sum_{name}"].sum(1) / width for name in averages}
        if values["SCALING"] == "rowwise":
            maximum = values["grad"].new_empty(size, dtype=torch.float32)
            launch_by_name(launch, kernel, (programs,), {**values, "maximum": maximum, "PASS": "maxima"}, warps)
            values = {**values, "amax_of_row": maximum.amax(1)}
        launch_by_name(launch, kernel, (programs,), {**values, **gives, "PASS": "write"}, warps)


@dataclass(frozen=True)
class FusedCastTransposeOperator(_NormOperator):
    """A kernel that writes values and their transpose, tile by tile."""

    spec: FusedCastTranspose
    tile: TransposeTile
    kernel = "norm_cast_transpose"

    def _parts(self, first: Tensor) -> int:
        """How many tiles there are one below the other: each has programs of its own."""
        return operators.programs(first, self.tile.rows, MOST_TILES)

    def outputs(self, *arguments: Any) -> Any:
        checks.check_rows(arguments[0], self.spec.width)
        self.check(arguments, self.spec.width)
        parts = self._parts(arguments[0])
        return self.allocated(arguments, self.spec.width, parts, parts)

    def launch(self, kernels: Any, results: Sequence[Tensor], arguments: Sequence[Any], launch: Launch) -> None:
        tensors, norm, tile = self.contiguous(arguments), self.norm, self.tile
        values: dict[str, Any] = dict(
            zip((*self.spec.parameters, *self.spec.results), (*tensors, *results), strict=True)
        )
        values |= {"stride": tensors[0].stride(0), "m": tensors[0].shape[0], "WIDTH": norm.width}
        values |= {"COLUMNS": tile.columns, "ROWS": tile.rows, "NORM": norm.norm, "EPS": norm.eps, "BLOCK": norm.block}
        values |= {"ACTIVATION": norm.activation, "LIMIT": norm.how.limit, "POWER_OF_TWO": norm.how.power_of_two}
        programs = self._parts(tensors[0]) * -(-norm.width // tile.columns)
        launch_by_name(launch, kernels.norm_cast_transpose, (programs,), values, tile.warps)
