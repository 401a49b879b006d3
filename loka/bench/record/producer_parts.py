"""Prepared parts other than GEMMs: arguments, one call for all launches of a part, and the check of its results.

A kernel is compared with its reference on evenly spaced rows of up to 16 million elements; sums over rows are compared
only if that is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from loka.bench.kernel_speed import norm_arguments, requantize_arguments
from loka.bench.record.check_numbers import LEAST_SUM_DB, Check, check_values, spaced
from loka.bench.record.gemm_parts import DTYPES, PreparedCall
from loka.bench.record.part_specs import TRANSPOSED_PER_LAUNCH, specs_of
from loka.bench.timing import SEED
from loka.errors import InputError
from loka.kernels.fused.matrix_kernels import Reduce
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward, Spec
from loka.kernels.measurements.parts import Part, PartKind
from loka.numerics.enums import Scaling
from loka.numerics.quantize import FORMATS, Quantized, quantize, requantize_transpose

SAMPLED = 2**24  # most elements of a matrix that are compared with the reference
FORMAT_OF = {info.dtype: format for format, info in FORMATS.items()}
BY_ROWS = frozenset({"x", "grad", "mean", "rstd"})  # parameters with a row or an element for each row of x

Module = Callable[[], ModuleType]  # module of the rendered kernels, imported on first use


@dataclass(frozen=True, slots=True)
class Producers:
    """Prepares parts other than GEMMs. `module` gives the rendered kernels that `specs_of` describes."""

    module: Module
    device: str = "cuda"

    def prepare(self, part: Part) -> PreparedCall:
        """Prepare a part's call. Raises InputError if no kernel is rendered for it."""
        torch.manual_seed(SEED)
        if part.dtype not in DTYPES:
            raise InputError(f"no kernel takes {part.dtype!r}; it can be {', '.join(DTYPES)}")
        if part.work is PartKind.COPY:
            return self._copy(part)
        specs = specs_of(part)
        launch = [self._operator(spec) for spec in specs]
        if part.work is PartKind.REQUANTIZE_TRANSPOSE:
            arguments = requantize_arguments(*[(part.rows, part.columns)] * TRANSPOSED_PER_LAUNCH, device=self.device)
            return PreparedCall(launch[0], arguments, partial(_check_transposed, arguments), TRANSPOSED_PER_LAUNCH)
        first = specs[0]
        if not isinstance(first, NormForward | NormBackward):
            raise InputError(f"{part} has no arguments to be measured with")
        arguments = norm_arguments(first, part.rows, self.device, DTYPES[part.dtype])
        second = specs[1] if len(specs) > 1 else None
        if isinstance(second, Reduce):
            call: Callable[..., Any] = partial(with_sums, launch[0], launch[1], second.count, DTYPES[part.dtype])
        elif second is not None:
            call = partial(_in_two, launch[0], launch[1])
        else:
            call = launch[0]
        if first.quantize and first.how.scaling == "maximum":
            return PreparedCall(call, arguments, partial(_check_tensorwise, arguments[0]))
        return PreparedCall(call, arguments, partial(self._check, first, arguments))

    def _operator(self, spec: Spec) -> Any:
        return getattr(self.module(), spec.function)

    def _copy(self, part: Part) -> PreparedCall:
        x = torch.randn(part.rows, part.columns, device=self.device).to(DTYPES[part.dtype])
        if part.recipe not in DTYPES:
            raise InputError(f"a copy is written as {', '.join(DTYPES)}, not as {part.recipe!r}")
        if part.recipe == part.dtype:
            return PreparedCall(_transposed, (x,), lambda found: Check(wrong=check_values("the copy", found, x.t())))
        dtype = DTYPES[part.recipe]
        return PreparedCall(
            lambda x: x.to(dtype), (x,), lambda found: Check(wrong=check_values("the copy", found.float(), x.float()))
        )

    def _check(self, spec: NormForward | NormBackward, arguments: Sequence[Any], made: Any) -> Check:
        """Compare results with the reference on sampled rows; sums only if all rows are sampled."""
        results = made if isinstance(made, tuple | list) else (made,)
        rows = arguments[0].shape[0]
        places = spaced(rows, max(SAMPLED // spec.width, 1)).to(arguments[0].device)
        named = zip(spec.parameters, arguments, strict=True)
        sampled = [value[places] if name in BY_ROWS else value for name, value in named]
        expected = self._operator(spec).reference(*sampled)
        wanted = dict(zip(spec.results, expected if isinstance(expected, tuple | list) else (expected,), strict=True))
        found = dict(zip(spec.results, results, strict=False))
        wrong = [check_values("its result", _values(found, places), _values(wanted, slice(None)))]
        if len(places) == rows:
            for name in ("dweight", "dbias"):
                if name in wanted:
                    total, right = found[name].double().sum(0), wanted[name].double().sum(0)
                    wrong.append(check_values(name, total, right, LEAST_SUM_DB))
        return Check(wrong="; ".join(reason for reason in wrong if reason))


def _values(results: dict[str, Tensor], places: Tensor | slice) -> Tensor:
    """Rows `places` of the first result in float32; FP8 values are dequantized."""
    name, first = next(iter(results.items()))
    if name != "values":
        return first[places].float()
    scale, values = results["scale"][places], first[places].float()
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(128, dim=1)[:, : values.shape[1]]
    return values * scale


def with_sums(
    backward: Callable[..., Any], reduce: Callable[..., Any], count: int, dtype: torch.dtype, *arguments: Any
) -> Any:
    """Call a backward kernel, then the kernel that reduces the last `count` of its results, which are partial sums.

    Returns the results of the backward kernel.
    """
    results = backward(*arguments)
    reduce(*(item for sums in results[-count:] for item in (sums, dtype)))
    return results


def _in_two(maximum: Callable[..., Any], write: Callable[..., Any], *arguments: Any) -> Any:
    """Call the kernel that finds the maximum, then the one that quantizes with it."""
    found = maximum(*arguments)
    return write(*arguments, found[0] if isinstance(found, tuple | list) else found)


def _check_tensorwise(x: Tensor, made: Any) -> Check:
    values, scale = made[0], made[1]
    places = spaced(x.shape[0], max(SAMPLED // x.shape[1], 1)).to(x.device)
    largest = float(x.abs().max())
    right = quantize(
        x[places], format=FORMAT_OF[values.dtype], scaling=Scaling.TENSORWISE, power_of_two=True, amax=largest
    )
    return Check(wrong=check_values("its result", values[places].float() * scale, right.values.float() * right.scale))


def _check_transposed(arguments: Sequence[Tensor], made: Sequence[Tensor]) -> Check:
    """Check each matrix; `arguments` hold values, scales and maximum of each, `made` values and scales."""
    reasons = []
    for index in range(TRANSPOSED_PER_LAUNCH):
        values, scale = arguments[3 * index : 3 * index + 2]
        right = requantize_transpose(Quantized(values, scale))
        transposed, spread = made[2 * index : 2 * index + 2]
        reasons += [
            check_values("its result", transposed.float(), right.values.float()),
            check_values("its scale", spread.float(), right.scale),
        ]
    return Check(wrong="; ".join(dict.fromkeys(reason for reason in reasons if reason)))


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()
