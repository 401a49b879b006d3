"""What the template of products that are split over their contraction is given, laid out as ruff lays it out."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from loka.devices.launches import Tiling
from loka.kernels.fused.norm.norm_text import WIDTH, Views, opened
from loka.kernels.fused.triton_gemm import gemm_tiling
from loka.kernels.fused.triton_gemm.gemm_spec import SplitGemm
from loka.kernels.fused.triton_gemm.gemm_text import header, operand_words, operator_views, promotion
from loka.kernels.fused.triton_gemm.gemm_tiling import is_aligned, tiles_of


@dataclass(frozen=True, slots=True)
class Parts:
    """One kernel that writes the sums of the parts."""

    tiling: Tiling
    tiles: int
    across: int
    header: str
    tile_lines: list[str]
    loads: list[str]
    promotion: str
    store_mask: str
    launch: str


def split_gemm_views(spec: SplitGemm, tiling: Tiling) -> Views:
    """Views of a split product: a kernel by descriptors where rows can be aligned, one by pointers where not."""
    quantised = spec.operands == "e4m3"
    name = f"_{spec.function}"
    if quantised:  # rows are M long, so it is known at run time
        unaligned = gemm_tiling.SPLIT_POINTERS
        kernels = [_parts(spec, tiling, name, True), _parts(spec, unaligned, f"{name}_pointers", False)]
    else:
        aligned = is_aligned(spec.n, spec.operands) and is_aligned(spec.k, spec.operands)
        kernels = [_parts(spec, tiling, name, aligned)]
    scales = ["scale_a.contiguous()", "scale_b.contiguous()"] if quantised else []
    size = spec.n * spec.k
    checks, allocations = _checks(spec), _allocations(spec)
    shown = f"{operand_words(spec.operands, spec.accumulation)} product of long operands -> {spec.out}"
    kernel: dict[str, object] = {
        "spec": spec,
        "depth": tiling.depth,
        "kernels": kernels,
        "aligned": 16 if quantised else 0,
        "product": "a, b.T" if quantised else "a.T, b",
        "size": size,
        "sum_columns": gemm_tiling.SUM_COLUMNS,
        "sum_masked": size % gemm_tiling.SUM_COLUMNS != 0,
        "sum_header": opened(
            f"def {name}_sums",
            ["partial_ptr", *(["scale_a_ptr", "scale_b_ptr"] if quantised else []), "out_ptr", "splits"],
            ":",
        ),
        "sum_launch": opened(
            f"{name}_sums[({-(-size // gemm_tiling.SUM_COLUMNS)},)]",
            ["partial", *scales, "out", "splits", f"num_warps={gemm_tiling.SUM_WARPS}"],
            "",
            4,
        ),
        "quantised": quantised,
        "cast": "" if spec.out == "float32" else f".to(tl.{spec.out})",
        "most": gemm_tiling.most_parts(spec, tiling),
        "least": gemm_tiling.LEAST_CHUNK,
        "title": shown,
        "host_header": header(spec.function, spec.parameters, 1),
        "shapes": textwrap.indent("\n".join(_shapes(spec)), "    "),
        "checks": checks,
        "allocations": allocations,
    }
    reference = [*checks, *_reference(spec)]
    return Views(kernel, operator_views(spec, reference, [*checks, *allocations], shown, _shapes(spec)))


def _parts(spec: SplitGemm, tiling: Tiling, name: str, tma: bool) -> Parts:
    ends = "desc" if tma else "ptr"
    masked = spec.n % tiling.rows != 0, spec.k % tiling.columns != 0
    places = [
        f"row = first_row + tl.arange(0, {tiling.rows})",
        f"column = first_column + tl.arange(0, {tiling.columns})",
    ]
    if spec.operands == "e4m3":
        tile_lines = [
            "a_rows = a_ptr + row[:, None].to(tl.int64) * m",
            "b_rows = b_ptr + column[:, None].to(tl.int64) * m",
        ]
        loads = ["a = a_desc.load([first_row, first])", "b = b_desc.load([first_column, first])"]
        element = [
            f"element = first + tl.arange(0, {tiling.depth})",
            "there = (element < m)[None, :]",
            f"a = tl.load(a_rows + element[None, :], mask=(row < {spec.n})[:, None] & there, other=0.0)",
            f"b = tl.load(b_rows + element[None, :], mask=(column < {spec.k})[:, None] & there, other=0.0)",
        ]
    else:
        tile_lines = []
        loads = ["a = a_desc.load([first, first_row])", "b = b_desc.load([first, first_column])"]
        element = [
            f"element = (first + tl.arange(0, {tiling.depth})).to(tl.int64)",
            "there = (element < m)[:, None]",
            f"a_ptrs = a_ptr + element[:, None] * {spec.n} + row[None, :]",
            f"b_ptrs = b_ptr + element[:, None] * {spec.k} + column[None, :]",
            f"a = tl.load(a_ptrs, mask=there & (row < {spec.n})[None, :], other=0.0)",
            f"b = tl.load(b_ptrs, mask=there & (column < {spec.k})[None, :], other=0.0)",
        ]
    tests = []
    if masked[0]:
        tests.append(f"(row < {spec.n})[:, None]")
    if masked[1]:
        tests.append(f"(column < {spec.k})[None, :]")
    return Parts(
        tiling=tiling,
        tiles=tiles_of(spec, tiling),
        across=-(-spec.k // tiling.columns),
        header=opened(f"def {name}", [f"a_{ends}", f"b_{ends}", "partial_ptr", "m", "chunk"], ":"),
        tile_lines=places + ([] if tma else tile_lines),
        loads=loads if tma else element,
        promotion=promotion(spec.operands, spec.accumulation, tiling),
        store_mask=f", mask={' & '.join(tests)}" if tests else "",
        launch=_launch(spec, tiling, name, tma),
    )


def _launch(spec: SplitGemm, tiling: Tiling, name: str, tma: bool) -> str:
    """The statements that launch the kernel, without indentation."""
    lines = []
    if tma:
        for operand, side in (("a", tiling.rows), ("b", tiling.columns)):
            block = [side, tiling.depth] if spec.operands == "e4m3" else [tiling.depth, side]
            lines.append(f"{operand}_desc = TensorDescriptor.from_tensor(gemm_launch.aligned({operand}), {block})")
    tiles = tiles_of(spec, tiling)
    operands = ["a_desc", "b_desc"] if tma else ["a.contiguous()", "b.contiguous()"]
    arguments = [*operands, "partial", "m", "chunk", f"num_warps={tiling.warps}", f"num_stages={tiling.stages}"]
    grid = f"({tiles} * splits,)" if tiles > 1 else "(splits,)"
    indent = 4 if spec.operands == "bfloat16" else 8
    lines.append(opened(f"{name}[{grid}]", arguments, "", indent)[indent:])
    return "\n".join(" " * indent + line for line in lines)


def _checks(spec: SplitGemm) -> list[str]:
    if spec.operands == "e4m3":
        return [
            f'gemm_launch.check_matrix("a", a, {spec.n}, None)',
            f'gemm_launch.check_matrix("b", b, {spec.k}, a.shape[1])',
        ]
    return [
        f'gemm_launch.check_matrix("a", a, None, {spec.n})',
        f'gemm_launch.check_matrix("b", b, a.shape[0], {spec.k})',
    ]


def _allocations(spec: SplitGemm) -> list[str]:
    return [f"out = a.new_empty(({spec.n}, {spec.k}), dtype=torch.{spec.out})"]


def _shapes(spec: SplitGemm) -> list[str]:
    if spec.operands == "e4m3":
        takes = f"a ({spec.n}, M), scale_a (S, 1), b ({spec.k}, M), scale_b (S, 1); the first scale of each counts"
    else:
        takes = f"a (M, {spec.n}), b (M, {spec.k})"
    return textwrap.wrap(f"{takes} -> out ({spec.n}, {spec.k}).", WIDTH - 4)


def _reference(spec: SplitGemm) -> list[str]:
    if spec.operands == "e4m3":
        product = "gemm_reference.split_product(a, scale_a, b, scale_b)"
    else:
        product = "gemm_reference.product(a.t(), b.t())"
    return [f"return {product}.to(torch.{spec.out})"]
