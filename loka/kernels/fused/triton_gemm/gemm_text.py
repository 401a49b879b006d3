"""What the template of products with an epilogue is given, laid out as ruff lays it out."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from loka.devices.launches import Tiling
from loka.kernels.fused.norm.norm_text import TITLES, WIDTH, Views, opened
from loka.kernels.fused.triton_gemm import gemm_pieces
from loka.kernels.fused.triton_gemm.gemm_pieces import PieceLayout
from loka.kernels.fused.triton_gemm.gemm_spec import Epilogue, GemmSpec, TiledGemm
from loka.numerics.enums import Accumulation, Scaling


def gemm_views(spec: TiledGemm, tiling: Tiling) -> Views:
    """Views of a product with its epilogue."""
    shape = gemm_pieces.layout(spec, tiling)
    descriptors = _descriptors(spec, shape)
    pointers = [f"{n}_{'desc' if n in descriptors else 'ptr'}" for n in (*spec.parameters, *spec.results)]
    allocations = _allocations(spec, tiling)
    checks = _checks(spec)
    pieces = gemm_pieces.pieces(spec, tiling, shape)
    kernel: dict[str, object] = {
        "spec": spec,
        "tiling": tiling,
        "across": shape.across,
        "pieces": pieces,
        "title": title(spec),
        "kernel_header": opened(f"def _{spec.function}", [*pointers, "m"], ":"),
        "scalar_loads": _scalar_loads(spec),
        "tile_lines": gemm_pieces.before_loop(spec, tiling, shape, pieces),
        "operand_loads": gemm_pieces.loads_of_a(spec, tiling, shape),
        "promotion": promotion(spec.operands, spec.accumulation, tiling),
        "epilogue_loads": gemm_pieces.after_loop(spec, tiling, shape),
        "norm_width": spec.epilogue.block if spec.epilogue.norm == "block_norm" else spec.n,
        "statistics_offsets": _statistics_offsets(spec, shape),
        "host_header": header(spec.function, spec.parameters, len(spec.results)),
        "shapes": textwrap.indent("\n".join(_shapes(spec)), "    "),
        "checks": checks,
        "allocations": allocations,
        "launch_lines": _launch_lines(spec, tiling, shape),
        "launch": opened(f"_{spec.function}[(programs,)]", _arguments(spec, tiling, shape, descriptors), "", 4),
        "results": ", ".join(spec.results),
    }
    reference = [*checks, *_reference(spec)]
    return Views(kernel, operator_views(spec, reference, [*checks, *allocations], title(spec), _shapes(spec)))


def title(spec: TiledGemm) -> str:
    """What the kernel does, in words."""
    e = spec.epilogue
    steps = [f"{operand_words(spec.operands, spec.accumulation)} product"]
    if e.add:
        steps.append("addition")
    if e.norm == "block_norm":
        steps.append(f"RMSNorm over blocks of {e.block} (eps {e.eps})")
    elif e.norm is not None:
        steps.append(f"{TITLES[e.norm]} (eps {e.eps})")
    if e.activation is not None:
        steps.append(TITLES[e.activation])
    return " -> ".join([*steps, "e4m3 rows" if e.quantise else e.out])


def operand_words(operands: str, accumulation: Accumulation) -> str:
    """`bfloat16`, or `e4m3 (precise)`."""
    return operands if operands != "e4m3" else f"e4m3 ({accumulation.value})"


def promotion(operands: str, accumulation: Accumulation, tiling: Tiling) -> str:
    """The argument of `tl.dot` that has it add up the tensor core's sums in float32, at each step."""
    if operands != "e4m3" or accumulation is Accumulation.FAST:
        return ""
    return f", max_num_imprecise_acc={tiling.depth}"


def header(function: str, parameters: Sequence[str], results: int) -> str:
    """A function of tensors."""
    gives = "Tensor" if results == 1 else f"tuple[{', '.join(['Tensor'] * results)}]"
    return opened(f"def {function}", [f"{name}: Tensor" for name in parameters], f" -> {gives}:")


def operator_views(
    spec: GemmSpec, reference: list[str], allocations: list[str], shown: str, comment: list[str]
) -> dict[str, object]:
    """What the operator's template is given."""
    count = len(spec.results)
    return {
        "reference_header": header(f"_{spec.function}_reference", spec.parameters, count),
        "fake_header": header(f"_{spec.function}_shapes", spec.parameters, count),
        "reference": reference,
        "allocations": allocations,
        "returned": f"    return {', '.join(spec.results)}",
        "title": shown,
        "comment": comment,
    }


def body_call(before: str, items: Sequence[str], after: str = "") -> list[str]:
    """A call as a function's body has it, without the indentation that the template gives each line."""
    return [line[4:] for line in opened(before, items, after, 4).split("\n")]


def _descriptors(spec: TiledGemm, shape: PieceLayout) -> set[str]:
    """The parameters and results that the kernel takes as descriptors."""
    names = {"a", "b"} if shape.loads_tma else set()
    if shape.stores_tma:
        names |= {"out", "values"}
    if shape.keeps_tma:
        names.add("product")
    return names.intersection(spec.parameters + spec.results)


def _shape_of(spec: TiledGemm, name: str) -> str:
    n, e = spec.n, spec.epilogue
    rstd = f"(M, {n // e.block})" if e.norm == "block_norm" else "(M,)"
    return {
        "a": f"(M, {spec.k})", "b": f"({n}, {spec.k})",
        "scale_a": "(M, 1)" if spec.scaling_a is Scaling.ROWWISE else "(1, 1)",
        "scale_b": f"({n}, 1)" if spec.scaling_b is Scaling.ROWWISE else "(1, 1)",
        "add": f"({n},)", "weight": f"({n},)", "bias": f"({n},)", "out": f"(M, {n})", "values": f"(M, {n})",
        "scale": "(M, 1)", "largest": "(P,)", "product": f"(M, {n})", "mean": "(M,)", "rstd": rstd,
    }[name]  # fmt: skip


def _shapes(spec: TiledGemm) -> list[str]:
    takes, gives = (", ".join(f"{n} {_shape_of(spec, n)}" for n in names) for names in (spec.parameters, spec.results))
    return textwrap.wrap(f"{takes} -> {gives}.", WIDTH - 4)


def _checks(spec: TiledGemm) -> list[str]:
    lines = [
        f'gemm_launch.check_matrix("a", a, None, {spec.k})',
        f'gemm_launch.check_matrix("b", b, {spec.n}, {spec.k})',
    ]
    if spec.operands == "e4m3":
        rows = "a.shape[0]" if spec.scaling_a is Scaling.ROWWISE else "1"
        columns = spec.n if spec.scaling_b is Scaling.ROWWISE else 1
        lines.append(f'gemm_launch.check_matrix("scale_a", scale_a, {rows}, 1)')
        lines.append(f'gemm_launch.check_matrix("scale_b", scale_b, {columns}, 1)')
    return lines


def _allocations(spec: TiledGemm, tiling: Tiling) -> list[str]:
    n, e = spec.n, spec.epilogue
    rstd = f"(m, {n // e.block})" if e.norm == "block_norm" else "(m,)"
    makers = {
        "values": f"(m, {n}), dtype=torch.float8_e4m3fn", "scale": "(m, 1), dtype=torch.float32",
        "largest": "(programs,), dtype=torch.float32", "out": f"(m, {n}), dtype=torch.{e.out}",
        "product": f"(m, {n}), dtype=torch.bfloat16", "mean": "(m,), dtype=torch.float32",
        "rstd": f"{rstd}, dtype=torch.float32",
    }  # fmt: skip
    lines = ["m = a.shape[0]"]
    if e.quantise:
        limits = f"rows={tiling.rows}, per_multiprocessor={tiling.programs}"
        lines.append(f"programs = operators.programs(a, {limits})")
    return lines + [f"{name} = a.new_empty({makers[name]})" for name in spec.results]


def _launch_lines(spec: TiledGemm, tiling: Tiling, shape: PieceLayout) -> list[str]:
    lines = []
    if shape.loads_tma:
        for name, rows in (("a", tiling.rows), ("b", tiling.columns)):
            block = f"[{rows}, {tiling.depth}]"
            lines.append(f"{name}_desc = TensorDescriptor.from_tensor(gemm_launch.aligned({name}), {block})")
    block = f"[{tiling.rows}, {tiling.columns}]"
    for name in sorted(_descriptors(spec, shape) - {"a", "b"}):
        lines.append(f"{name}_desc = TensorDescriptor.from_tensor({name}, {block})")
    if not spec.epilogue.quantise:
        across = f" * {shape.across}" if shape.across > 1 else ""
        tiles = f"triton.cdiv(m, {tiling.rows}){across}"
        lines.append(f"programs = gemm_launch.programs(a, {tiles}, {tiling.programs})")
    return lines


def _arguments(spec: TiledGemm, tiling: Tiling, shape: PieceLayout, descriptors: set[str]) -> list[str]:
    passed = [f"{n}_desc" if n in descriptors else f"{n}.contiguous()" for n in spec.parameters]
    results = [f"{n}_desc" if n in descriptors else n for n in spec.results]
    return [*passed, *results, "m", f"num_warps={tiling.warps}", f"num_stages={tiling.stages}"]


def _scalar_loads(spec: TiledGemm) -> list[str]:
    if spec.operands != "e4m3":
        return []
    pairs = (("scale_a", spec.scaling_a), ("scale_b", spec.scaling_b))
    return [f"{name} = tl.load({name}_ptr)" for name, scaling in pairs if scaling is Scaling.TENSORWISE]


def _statistics_offsets(spec: TiledGemm, shape: PieceLayout) -> str:
    if spec.epilogue.norm != "block_norm" or shape.across == 1:
        return "row"
    return f"row.to(tl.int64) * {shape.across} + first_column // {spec.epilogue.block}"


def _reference(spec: TiledGemm) -> list[str]:
    e = spec.epilogue
    items = [name if name in ("a", "b") else f"{name}={name}" for name in _ordered(spec)]
    lines = body_call("product = gemm_reference.product", items)
    lines += body_call("forward = gemm_reference.epilogue", ["product", *_epilogue_keywords(e)])
    kept = ["product.to(torch.bfloat16)", *(f"forward.{name}" for name in spec.statistics)] if e.keep else []
    if e.quantise:
        lines.append("values, scale, largest = norm_reference.quantise_rows(forward.y)")
        return [*lines, f"return {', '.join(['values', 'scale', 'largest', *kept])}"]
    return [*lines, f"return {', '.join([f'forward.y.to(torch.{e.out})', *kept])}"]


def _ordered(spec: TiledGemm) -> list[str]:
    """Operands before their scales, as the reference takes them."""
    names = [n for n in spec.parameters if n in ("a", "b", "scale_a", "scale_b")]
    return sorted(names, key=lambda name: (name.startswith("scale"), name))


def _epilogue_keywords(e: Epilogue) -> list[str]:
    keywords = [f"{name}={name}" for name in ("add", "weight", "bias") if getattr(e, name)]
    if e.norm is not None:
        keywords += [f'norm="{e.norm}"', f"eps={e.eps}"]
    if e.norm == "block_norm":
        keywords.append(f"block={e.block}")
    return [*keywords, f'activation="{e.activation}"'] if e.activation is not None else keywords
