"""What the templates of batched and grouped products are given, laid out as ruff lays it out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from loka.devices.launches import Tiling
from loka.kernels.fused.cast_transpose.matrix_spec import numbered
from loka.kernels.fused.norm.norm_text import WIDTH, Views, opened
from loka.kernels.fused.triton_gemm.gemm_spec import BatchedGemm, GroupedGemm
from loka.kernels.fused.triton_gemm.gemm_text import body_call, header, operand_words, operator_views, promotion
from loka.kernels.fused.triton_gemm.gemm_tiling import is_aligned


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """One tile of one product of fixed N and K."""

    n: int
    k: int
    across: int  # tiles in a row of the result
    masked: bool  # whether the last of them reaches beyond the columns
    pointers: list[str]
    loads: list[str]
    before_row: str  # rows and columns of the products that come first, in one batch of them
    before_column: str
    row_in_all: str  # a row's place in all of the results, 64 bits
    header: str = ""
    call: str = ""


def batched_gemm_views(spec: BatchedGemm, tiling: Tiling) -> Views:
    """Views of products of one shape."""
    tma = is_aligned(spec.k, spec.operands)
    tile = _tile(spec.n, spec.k, tiling, tma, batched=True)
    tiles = f" * {tile.across}" if tile.across > 1 else ""
    launch_lines = ["batches = a.shape[0]"] if not tma else [
        "batches = a.shape[0]",
        f"rows, columns = a.reshape(batches * m, {spec.k}), b.reshape(batches * {spec.n}, {spec.k})",
        _descriptor("a", "rows", tiling.rows, tiling),
        _descriptor("b", "columns", tiling.columns, tiling),
    ]  # fmt: skip
    grid = f"(batches * triton.cdiv(m, {tiling.rows}){tiles},)"
    quantised = spec.operands == "e4m3"
    shown = f"Batch of {operand_words(spec.operands, spec.accumulation)} products -> {spec.out}"
    checks = [
        f'gemm_launch.check_batch("a", a, None, {spec.k}, None)',
        f'gemm_launch.check_batch("b", b, {spec.n}, {spec.k}, a.shape[0])',
    ]
    if quantised:
        checks.append('gemm_launch.check_batch("scale_a", scale_a, a.shape[1], 1, a.shape[0])')
        checks.append(f'gemm_launch.check_batch("scale_b", scale_b, {spec.n}, 1, a.shape[0])')
    allocations = ["m = a.shape[1]", f"out = a.new_empty((a.shape[0], m, {spec.n}), dtype=torch.{spec.out})"]
    items = ["a", "b", "scale_a=scale_a", "scale_b=scale_b"] if quantised else ["a", "b"]
    comment = textwrap.wrap(f"{_batched_shapes(spec)}.", WIDTH - 4)
    arguments = [*_passed(spec.parameters, tma), "out", "m", *_options(tiling)]
    kernel: dict[str, object] = {
        **_common(spec, tiling),
        "t": tile,
        "title": shown,
        "shapes": textwrap.indent("\n".join(comment), "    "),
        "kernel_header": opened(f"def _{spec.function}", [*_inside(spec.parameters, tma), "out_ptr", "m"], ":"),
        "checks": checks,
        "allocations": allocations,
        "launch_lines": launch_lines,
        "launch": opened(f"_{spec.function}[{grid}]", arguments, "", 4),
    }
    call = f"return gemm_reference.batched_product({', '.join(items)}).to(torch.{spec.out})"
    operator = operator_views(
        spec, [*checks, call], [*checks, *allocations], shown, textwrap.wrap(comment[0], WIDTH - 4)
    )
    return Views(kernel, operator)


def grouped_gemm_views(spec: GroupedGemm, tiling: Tiling) -> Views:
    """Views of products of several shapes in one launch."""
    quantised = spec.operands == "e4m3"
    names = ("a", "scale_a", "b", "scale_b", "out", "m", "tiles") if quantised else ("a", "b", "out", "m", "tiles")
    every = numbered(names, spec.count)
    operands = [dict(zip(names, every[len(names) * i :], strict=False)) for i in range(spec.count)]
    tiles, checks, allocations, lines, arguments, inside, reference = [], [], [], [], [], [], []
    for index, (o, (n, k)) in enumerate(zip(operands, spec.shapes, strict=True)):
        tma = is_aligned(k, spec.operands)
        before = [operands[i]["tiles"] for i in range(index)]
        parameters = tuple(o[name] for name in names[:-3])
        own = [*_inside(parameters, tma), f"{o['out']}_ptr", o["m"]]
        plain = [*_inside(names[:-3], tma), "out_ptr", "m"]
        function = f"_{spec.function}_product_{index}" if spec.count > 1 else f"_{spec.function}_product"
        call = opened(function, [" - ".join(["tile", *before]), *own], "", 4 if spec.count == 1 else 8)
        tiles.append(_tile(n, k, tiling, tma, False, opened(f"def {function}", ["tile", *plain], ":"), call))
        inside += own
        checks += _checks(o, n, k, quantised)
        allocations.append(f"{o['m']} = {o['a']}.shape[0]")
        allocations.append(f"{o['out']} = {o['a']}.new_empty(({o['m']}, {n}), dtype=torch.{spec.out})")
        if tma:
            lines.append(_descriptor(o["a"], f"gemm_launch.with_rows({o['a']})", tiling.rows, tiling))
            lines.append(_descriptor(o["b"], o["b"], tiling.columns, tiling))
        across = f" * {tiles[-1].across}" if tiles[-1].across > 1 else ""
        lines.append(f"{o['tiles']} = triton.cdiv({o['m']}, {tiling.rows}){across}")
        arguments += [*_passed(parameters, tma), o["out"], o["m"]]
        items = [o["a"], o["b"], *([f"scale_a={o['scale_a']}", f"scale_b={o['scale_b']}"] if quantised else [])]
        reference += body_call(f"{o['out']} = gemm_reference.product", items, f".to(torch.{spec.out})")
    counts = [o["tiles"] for o in operands]
    total = " + ".join(counts)
    shown = f"{spec.count} {operand_words(spec.operands, spec.accumulation)} products -> {spec.out}"
    shapes = textwrap.wrap(f"{'; '.join(_shape(o, n, k) for o, (n, k) in zip(operands, spec.shapes, strict=True))}.",
                           WIDTH - 4)  # fmt: skip
    returned = f"return {', '.join(spec.results)}"
    kernel: dict[str, object] = {
        **_common(spec, tiling),
        "tiles": tiles,
        "counts": counts,
        "title": shown,
        "shapes": textwrap.indent("\n".join(shapes), "    "),
        "decorator": _decorator([*(o["m"] for o in operands), *counts[:-1]]),
        "kernel_header": opened(f"def _{spec.function}", [*inside, *counts[:-1]], ":"),
        "checks": checks,
        "allocations": allocations,
        "launch_lines": [
            *lines,
            *(["tiles = " + total] if spec.count > 1 else []),
            "if tiles == 0:",
            f"    {returned}",
        ],
        "launch": opened(f"_{spec.function}[(tiles,)]", [*arguments, *counts[:-1], *_options(tiling)], "", 4),
        "returned": f"    {returned}",
    }
    operator = operator_views(spec, [*checks, *reference, returned], [*checks, *allocations], shown, shapes)
    return Views(kernel, operator)


def _decorator(free: list[str]) -> str:
    """That of a kernel with numbers that are worth no compilation of their own."""
    names = [f'"{name}"' for name in free]
    listed = f"do_not_specialize=[{', '.join(names)}]"
    if len(f"@triton.jit({listed})") <= WIDTH:
        return f"@triton.jit({listed})"
    if 4 + len(listed) <= WIDTH:
        return f"@triton.jit(\n    {listed}\n)"
    lines = "".join(f"        {name},\n" for name in names)
    return f"@triton.jit(\n    do_not_specialize=[\n{lines}    ]\n)"


def _common(spec: BatchedGemm | GroupedGemm, tiling: Tiling) -> dict[str, object]:
    return {
        "spec": spec,
        "tiling": tiling,
        "quantised": spec.operands == "e4m3",
        "promotion": promotion(spec.operands, spec.accumulation, tiling),
        "cast": "" if spec.out == "float32" else f".to(tl.{spec.out})",
        "host_header": header(spec.function, spec.parameters, len(spec.results)),
    }


def _tile(n: int, k: int, tiling: Tiling, tma: bool, batched: bool, function: str = "", call: str = "") -> GroupedTile:
    across = -(-n // tiling.columns)
    row, column = "first_row", "first_column" if across > 1 else "0"
    rows, columns = ("batch * m + ", f"batch * {n} + ") if batched else ("", "")
    pointers: list[str] = []
    if tma:
        start = columns.removesuffix(" + ") if batched and column == "0" else f"{columns}{column}"
        loads = [f"a = a_desc.load([{rows}{row}, first])", f"b = b_desc.load([{start}, first])"]
    else:
        every_row, every_column = ("(batch * m + row)", f"(batch * {n} + column)") if batched else ("row", "column")
        pointers = [
            f"a_rows = a_ptr + {every_row}[:, None].to(tl.int64) * {k}",
            f"b_rows = b_ptr + {every_column}[:, None].to(tl.int64) * {k}",
        ]
        loads = [
            f"element = first + tl.arange(0, {tiling.depth})",
            f"there = (element < {k})[None, :]",
            "a = tl.load(a_rows + element[None, :], mask=valid[:, None] & there, other=0.0)",
            f"b = tl.load(b_rows + element[None, :], mask=(column < {n})[:, None] & there, other=0.0)",
        ]
    return GroupedTile(
        n=n,
        k=k,
        across=across,
        masked=n % tiling.columns != 0,
        pointers=pointers,
        loads=loads,
        before_row=rows,
        before_column=columns,
        row_in_all="(tl.cast(batch, tl.int64) * m + row)" if batched else "row.to(tl.int64)",
        header=function,
        call=call,
    )


def _descriptor(name: str, matrix: str, rows: int, tiling: Tiling) -> str:
    return f"{name}_desc = TensorDescriptor.from_tensor(gemm_launch.aligned({matrix}), [{rows}, {tiling.depth}])"


def _inside(parameters: tuple[str, ...], tma: bool) -> list[str]:
    """The kernel's parameters of these operands."""
    return [f"{name}_{'desc' if tma and not name.startswith('scale') else 'ptr'}" for name in parameters]


def _passed(parameters: tuple[str, ...], tma: bool) -> list[str]:
    return [f"{n}_desc" if tma and not n.startswith("scale") else f"{n}.contiguous()" for n in parameters]


def _options(tiling: Tiling) -> list[str]:
    return [f"num_warps={tiling.warps}", f"num_stages={tiling.stages}"]


def _checks(o: dict[str, str], n: int, k: int, quantised: bool) -> list[str]:
    lines = [
        f'gemm_launch.check_matrix("{o["a"]}", {o["a"]}, None, {k})',
        f'gemm_launch.check_matrix("{o["b"]}", {o["b"]}, {n}, {k})',
    ]
    if quantised:
        lines.append(f'gemm_launch.check_matrix("{o["scale_a"]}", {o["scale_a"]}, {o["a"]}.shape[0], 1)')
        lines.append(f'gemm_launch.check_matrix("{o["scale_b"]}", {o["scale_b"]}, {n}, 1)')
    return lines


def _shape(o: dict[str, str], n: int, k: int) -> str:
    scales = f", {o['scale_a']} (M, 1), {o['scale_b']} ({n}, 1)" if "scale_a" in o else ""
    return f"{o['a']} (M, {k}), {o['b']} ({n}, {k}){scales} -> {o['out']} (M, {n})"


def _batched_shapes(spec: BatchedGemm) -> str:
    scales = f", scale_a (G, M, 1), scale_b (G, {spec.n}, 1)" if spec.operands == "e4m3" else ""
    return f"a (G, M, {spec.k}), b (G, {spec.n}, {spec.k}){scales} -> out (G, M, {spec.n})"
