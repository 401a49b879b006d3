"""What the templates of transpositions and column sums are given: several matrices share out one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loka.kernels.fused.cast_transpose.matrix_spec import Reduce, RequantizeTranspose, Transpose, numbered
from loka.kernels.fused.norm import norm_launch
from loka.kernels.fused.norm.norm_text import Views, header, indented, opened, operator_views


@dataclass(frozen=True, slots=True)
class _Parts:
    """What transpositions and column sums have in common: several operands, each with its share of the programs."""

    program: str  # what a program takes: a tile or a block
    title: str
    shapes: list[str]  # of each operand
    counts: Sequence[str]  # the names of how many programs each operand has
    allocations: list[str]
    count_lines: list[str]
    inside: Sequence[Sequence[str]]  # each operand's parameters in the kernel
    passed: Sequence[Sequence[str]]  # each operand's arguments
    reference: list[str]
    free: Sequence[str]  # numbers that follow the batch: one that is 1 or divides by 16 is worth no compilation


def requantize_transpose_views(spec: RequantizeTranspose) -> Views:
    """Views of transpositions."""
    names = [numbered(("values", "scale", "largest", "transposed", "spread", "m", "n", "parts"), spec.count)]
    operands = [names[0][8 * i : 8 * i + 8] for i in range(spec.count)]
    tiles = numbered(("tiles",), spec.count)
    allocations, tile_lines, shapes = [], [], []
    for (values, scale, largest, transposed, spread, m, n, _), count in zip(operands, tiles, strict=True):
        allocations += [
            f"{m}, {n} = {values}.shape",
            f"{transposed} = {values}.new_empty(({n}, {m}))",
            f"{spread} = {values}.new_empty(({n}, 1), dtype=torch.float32)",
        ]
        side = norm_launch.REQUANTIZE_TILE
        tile_lines.append(f"{count} = max(triton.cdiv({m}, {side}), 1) * max(triton.cdiv({n}, {side}), 1)")
        shapes.append(f"{values} (R, C) e4m3, {scale} (R, 1), {largest} (P,) -> {transposed} (C, R), {spread} (C, 1)")
    inside = [[*(f"{name}_ptr" for name in operand[:5]), *operand[5:]] for operand in operands]
    passed = [[f"{operand[0]}.contiguous()", *operand[1:7], f"{operand[2]}.shape[0]"] for operand in operands]
    reference = [
        f"{transposed}, {spread} = norm_reference.requantize_transpose({values}, {scale})"
        for values, scale, _, transposed, spread, *_ in operands
    ]
    title = "The transposed copy of an e4m3 matrix"
    if spec.count > 1:
        title = f"Transposed copies of {spec.count} e4m3 matrices"
    free = [*numbered(("parts",), spec.count), *tiles[: spec.count - 1]]
    parts = _Parts("tile", title, shapes, tiles, allocations, tile_lines, inside, passed, reference, free)
    kernel, operator = _counted(
        spec, parts, [f"{name}: Tensor" for name in spec.parameters], norm_launch.REQUANTIZE_WARPS
    )
    return Views({**kernel, "tile": norm_launch.REQUANTIZE_TILE, "chunk": norm_launch.REQUANTIZE_PARTS}, operator)


def transpose_views(spec: Transpose) -> Views:
    """Views of transpositions under one scale."""
    operands = [numbered(("values", "transposed", "m", "n"), spec.count)[4 * i : 4 * i + 4] for i in range(spec.count)]
    tiles, side = numbered(("tiles",), spec.count), norm_launch.REQUANTIZE_TILE
    allocations, tile_lines = [], []
    for (values, transposed, m, n), count in zip(operands, tiles, strict=True):
        allocations += [f"{m}, {n} = {values}.shape", f"{transposed} = {values}.new_empty(({n}, {m}))"]
        tile_lines.append(f"{count} = max(triton.cdiv({m}, {side}), 1) * max(triton.cdiv({n}, {side}), 1)")
    parts = _Parts(
        "tile",
        "The transposed copy of a matrix" if spec.count == 1 else f"Transposed copies of {spec.count} matrices",
        [f"{values} (R, C) e4m3 -> {transposed} (C, R)" for values, transposed, *_ in operands],
        tiles,
        allocations,
        tile_lines,
        [[f"{values}_ptr", f"{transposed}_ptr", m, n] for values, transposed, m, n in operands],
        [[f"{values}.contiguous()", transposed, m, n] for values, transposed, m, n in operands],
        [f"{transposed} = norm_reference.transpose({values})" for values, transposed, *_ in operands],
        tiles[: spec.count - 1],
    )
    kernel, operator = _counted(
        spec, parts, [f"{name}: Tensor" for name in spec.parameters], norm_launch.REQUANTIZE_WARPS
    )
    return Views({**kernel, "tile": side}, operator)


def reduce_views(spec: Reduce) -> Views:
    """Views of column sums."""
    names = numbered(("partial", "dtype", "total", "p", "n"), spec.count)
    operands = [names[5 * i : 5 * i + 5] for i in range(spec.count)]
    blocks = numbered(("blocks",), spec.count)
    allocations, block_lines, shapes, parameters, reference = [], [], [], [], []
    for (partial, dtype, total, *_), count in zip(operands, blocks, strict=True):
        allocations.append(f"{total} = {partial}.new_empty(({partial}.shape[1],), dtype={dtype})")
        block_lines.append(f"{count} = triton.cdiv({partial}.shape[1], {norm_launch.REDUCE_COLUMNS})")
        shapes.append(f"{partial} (P, N) float32 -> {total} (N,) of {dtype}")
        parameters += [f"{partial}: Tensor", f"{dtype}: torch.dtype"]
        reference.append(f"{total} = norm_reference.reduce({partial}, {dtype})")
    inside = [[f"{partial}_ptr", f"{total}_ptr", p, n] for partial, _, total, p, n in operands]
    passed = [[f"{partial}.contiguous()", total, f"*{partial}.shape"] for partial, _, total, *_ in operands]
    title = f"Column sums of {spec.count} matrices" if spec.count > 1 else "Column sums of a matrix"
    free = numbered(("p",), spec.count)
    parts = _Parts("block", title, shapes, blocks, allocations, block_lines, inside, passed, reference, free)
    kernel, operator = _counted(spec, parts, parameters, norm_launch.REDUCE_WARPS)
    return Views({**kernel, "rows": norm_launch.REDUCE_ROWS, "columns": norm_launch.REDUCE_COLUMNS}, operator)


def _counted(
    spec: RequantizeTranspose | Transpose | Reduce, parts: _Parts, parameters: list[str], warps: int
) -> tuple[dict[str, object], dict[str, object]]:
    function = f"_{spec.function}_{'columns' if isinstance(spec, Reduce) else 'tile'}"
    counts = parts.counts[: spec.count - 1]
    indent = 4 if spec.count == 1 else 8
    calls = [
        opened(function, [" - ".join([parts.program, *parts.counts[:i]]), *operand], "", indent)
        for i, operand in enumerate(parts.inside)
    ]
    grid = f"({parts.counts[0]},)" if spec.count == 1 else f"({' + '.join(parts.counts)},)"
    arguments = [name for operand in parts.passed for name in operand] + [*counts, f"num_warps={warps}"]
    returned = f"    return {', '.join(spec.results)}"
    kernel: dict[str, object] = {
        "spec": spec,
        "title": parts.title,
        "shapes": indented([f"{line}." if i + 1 == spec.count else f"{line};" for i, line in enumerate(parts.shapes)]),
        "kernel_header": opened(f"def _{spec.function}", [n for o in parts.inside for n in o] + [*counts], ":"),
        "host_header": header(spec.function, parameters, len(spec.results)),
        "allocations": parts.allocations,
        "tile_lines": parts.count_lines,
        "unspecialised": "[" + ", ".join(f'"{name}"' for name in parts.free) + "]",
        "tile_calls": calls,
        "tile_counts": counts,
        "launch": opened(f"_{spec.function}[{grid}]", arguments, "", 4),
        "returned": returned,
    }
    reference = [*parts.reference, f"return {', '.join(spec.results)}"]
    operator = operator_views(spec, parameters, reference, parts.allocations, [])
    return kernel, {**operator, "title": parts.title, "comment": parts.shapes}
