"""Kernels that write what they quantise as is and transposed, in one pass, tile by tile.

Under a known scale an element needs nothing of its row but what the operations around it ask for. Where these are a
vector, a norm of blocks and an activation, a tile of the matrix is enough, and its transposed copy is written with it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.norm.norm_launch import configuration
from loka.kernels.fused.norm.norm_spec import SAVING, NormBackward, NormForward
from loka.kernels.fused.norm.norm_text import WIDTH, Views, header, indented, norm_title, norm_views, opened

WIDEST_BLOCK = 512  # of a block_norm: a tile holds whole blocks
_MOST = 2**16  # programs on a multiprocessor: every row of tiles has programs of its own


@dataclass(frozen=True, slots=True)
class FusedCastTranspose:
    """The kernel of a spec, which also returns `transposed`, its values transposed: (width, M), after the values.

    Everything else is as with the spec itself. Raises InputError for a spec that a tile is not enough for.
    """

    spec: NormForward | NormBackward

    def __post_init__(self) -> None:
        if not fits(self.spec):
            raise InputError(
                f"{self.spec.function} cannot be written as is and transposed from a tile: that takes a known scale "
                f"and a record, blocks of {WIDEST_BLOCK} at most or no norm, and no matrices in sums and products"
            )

    @property
    def function(self) -> str:
        """The host function's name."""
        return f"{self.spec.function}_cast_transpose"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The host function's parameters, all tensors."""
        return self.spec.parameters

    @property
    def results(self) -> tuple[str, ...]:
        """What the host function returns."""
        values, *rest = self.spec.results
        return (values, "transposed", *rest)


def fits(spec: NormForward | NormBackward) -> bool:
    """Whether a tile is enough for a spec."""
    if not (spec.quantise and spec.how.record) or spec.norm in SAVING or spec.times:
        return False
    if spec.norm == "block_norm" and spec.block > WIDEST_BLOCK:
        return False
    more = spec.residual or spec.keep if isinstance(spec, NormForward) else spec.summed or spec.carried or spec.carry
    return not more


@dataclass(frozen=True, slots=True)
class TransposeTile:
    """What a program takes, and its warps."""

    rows: int
    columns: int
    warps: int


def tile_of(spec: NormForward | NormBackward, device: DeviceSpec = DEFAULT) -> TransposeTile:
    """The choice for a spec: whole blocks, and registers for two programs on a multiprocessor; not measured yet."""
    launch = device.launches.tiles
    columns = max(launch.cast_columns, spec.block if spec.norm else 0)
    return TransposeTile(launch.cast_elements // columns, columns, launch.cast_warps)


def fused_cast_transpose_views(both: FusedCastTranspose, tile: TransposeTile) -> Views:
    """What the template is given, and what the operator's is."""
    spec, operator = both.spec, norm_views(both.spec, configuration(both.spec)).operator
    first = "x" if isinstance(spec, NormForward) else "grad"
    across = -(-spec.width // tile.columns)
    checks = [str(line) for line in _lines(operator, "allocations") if str(line).startswith("operators.check_")]
    allocations = _allocations(both, first, tile.rows)
    shapes = " ".join(_lines(operator, "comment"))
    shapes = shapes.replace(f"values (M, {spec.width})", f"values (M, {spec.width}), transposed ({spec.width}, M)")
    title = f"{norm_title(spec)}, and transposed"
    parameters = [f"{name}: Tensor" for name in both.parameters]
    pointers = [f"{name}_ptr" for name in (*both.parameters, *both.results)]
    passed = [name if name in (first, "scale", "record") else f"{name}.contiguous()" for name in both.parameters]
    arguments = [*passed, *both.results, f"{first}.stride(0)", "m", f"num_warps={tile.warps}"]
    grid = "parts" if across == 1 else f"parts * {across}"
    kernel: dict[str, object] = {
        "spec": spec,
        "how": spec.how,
        "limit": int(spec.how.limit),
        "first": first,
        "rows": tile.rows,
        "columns": tile.columns,
        "across": across,
        "masked": bool(spec.width % tile.columns),
        "blocks": f"[{tile.rows * tile.columns // spec.block}, {spec.block}]",
        "whole": f"[{tile.rows}, {tile.columns}]",
        "title": title,
        "shapes": indented(textwrap.wrap(shapes, WIDTH - 4)),
        "kernel_header": opened(f"def _{both.function}", [*pointers, f"{first}_stride", "m"], ":"),
        "host_header": header(both.function, parameters, len(both.results)),
        "checks": checks,
        "allocations": allocations,
        "launch": opened(f"_{both.function}[({grid},)]", arguments, "", 4),
        "results": ", ".join(both.results),
    }
    *reference, returned = _lines(operator, "reference")
    copied = [
        "transposed = norm_reference.transpose(values)",
        returned.replace("return values", "return values, transposed"),
    ]
    unused = () if "dadd" in both.results else ("parts = ",)
    registered: dict[str, object] = {
        "reference_header": header(f"_{both.function}_reference", parameters, len(both.results)),
        "fake_header": header(f"_{both.function}_shapes", parameters, len(both.results)),
        "reference": [*reference, *copied],
        "allocations": [*checks, *(line for line in allocations if not line.startswith(unused))],
        "returned": f"    return {', '.join(both.results)}",
        "title": title,
        "comment": textwrap.wrap(shapes, WIDTH - 4),
    }
    return Views(kernel, registered)


def _allocations(both: FusedCastTranspose, first: str, rows: int) -> list[str]:
    width, dtype = both.spec.width, both.spec.how.torch_type
    lines = [
        f"m = {first}.shape[0]",
        f"parts = operators.programs({first}, rows={rows}, per_multiprocessor={_MOST})",
        f"values = {first}.new_empty((m, {width}), dtype={dtype})",
        f"transposed = {first}.new_empty(({width}, m), dtype={dtype})",
    ]
    if "dadd" in both.results:
        lines.append(f"dadd = {first}.new_empty((parts, {width}), dtype=torch.float32)")
    return lines


def _lines(views: Mapping[str, object], name: str) -> list[str]:
    found = views[name]
    return [str(line) for line in found] if isinstance(found, list) else []
