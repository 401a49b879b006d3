"""What the template of `Products` is given."""

from __future__ import annotations

import textwrap

from loka.kernels.fused.cast_transpose.matrix_spec import Products
from loka.kernels.fused.norm import norm_launch
from loka.kernels.fused.norm.norm_text import WIDTH, Views, header, opened


def product_views(spec: Products) -> Views:
    """Views of sums of products."""
    block = min(norm_launch.padded_width(spec.width), norm_launch.PRODUCTS_COLUMNS)
    masked = spec.width % block != 0
    vectors = [name for name in spec.parameters if name.startswith("add_")]
    matrices = [name for name in spec.parameters if name not in vectors]
    title = "Products" if spec.adds else "Sum of matrices"
    if spec.adds and spec.plain:
        title = "Products and sums"
    shapes = textwrap.wrap(
        f"{', '.join(matrices)} (M, {spec.width}){''.join(f', {name} ({spec.width},)' for name in vectors)} -> "
        f"out (M, {spec.width}) of dtype.",
        WIDTH - 4,
    )
    parameters = [*(f"{name}: Tensor" for name in spec.parameters), "dtype: torch.dtype"]
    grid = f"(m, {-(-spec.width // block)})"
    passed = [*(f"{name}.contiguous()" for name in spec.parameters), "out"]
    arguments = [*passed, f"num_warps={max(1, block // 256)}"]
    allocations = [f"out = {matrices[0]}.new_empty(({matrices[0]}.shape[0], {spec.width}), dtype=dtype)"]
    kernel: dict[str, object] = {
        "spec": spec,
        "title": title,
        "block": block,
        "masked": masked,
        "matrices": matrices,
        "terms": _terms(spec, masked),
        "shapes": "\n".join(f"    {line}" for line in shapes),
        "kernel_header": opened(f"def _{spec.function}", [f"{name}_ptr" for name in (*spec.parameters, "out")], ":"),
        "host_header": header(spec.function, parameters, 1),
        "allocations": [f"out = {matrices[0]}.new_empty((m, {spec.width}), dtype=dtype)"],
        "launch": opened(f"_{spec.function}[{grid}]", arguments, "", 8),
    }
    checks = [f"operators.check_rows({name}, {spec.width})" for name in matrices]
    operator: dict[str, object] = {
        "reference_header": header(f"_{spec.function}_reference", parameters, 1),
        "fake_header": header(f"_{spec.function}_shapes", parameters, 1),
        "reference": [*checks, *_reference(spec)],
        "allocations": [*checks, *allocations],
        "returned": "    return out",
        "title": title,
        "comment": shapes,
    }
    return Views(kernel, operator)


def _terms(spec: Products, masked: bool) -> list[str]:
    """The lines that add up `total` in float32."""
    mask = ", mask=inside, other=0.0" if masked else ""

    def load(name: str, place: str = "offsets") -> str:
        return f"tl.load({name}_ptr + {place}{mask}).to(tl.float32)"

    lines = [f"total {'+=' if index else '='} {load(f'plain_{index}')}" for index in range(spec.plain)]
    for index, add in enumerate(spec.adds):
        lines.append(f"x = {load(f'x_{index}')}")
        lines += [f"x += {load(f'add_{index}', 'column')}"] if add else []
        lines.append(f"total {'+=' if index or spec.plain else '='} x * {load(f'grad_{index}')}")
    return lines


def _reference(spec: Products) -> list[str]:
    plain = ", ".join(f"plain_{index}" for index in range(spec.plain))
    pairs = [f"(grad_{i}, x_{i}, {f'add_{i}' if add else 'None'})" for i, add in enumerate(spec.adds)]
    listed = f"[{', '.join(pairs)}]"
    call = opened("return norm_reference.products", [f"[{plain}]", listed, "dtype"], "", 4)
    return [line[4:] for line in call.split("\n")]
