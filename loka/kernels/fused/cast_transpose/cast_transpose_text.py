"""What the template of `CastTranspose` is given."""

from __future__ import annotations

from loka.kernels.fused.cast_transpose.matrix_spec import CastTranspose
from loka.kernels.fused.norm import norm_launch, quantised_text
from loka.kernels.fused.norm.norm_text import Views, opened


def cast_transpose_views(spec: CastTranspose) -> Views:
    """Views of a matrix's two FP8 copies under one scale."""
    how, side = spec.how, norm_launch.QUANTISE_TILE
    tensorwise = how.scaling == "tensorwise"
    pointers = [f"{name}_ptr" for name in (*spec.parameters, *spec.results)]
    sizes = ["m", "n", "parts"] if tensorwise else ["m", "n"]
    passed = ["m", "n", "maxima.shape[0]"] if tensorwise else ["m", "n"]
    given = list(spec.parameters[1:])
    made = {
        "values": f"x.new_empty((m, n), dtype={how.torch_type})",
        "transposed": f"x.new_empty((n, m), dtype={how.torch_type})",
        "scale": "x.new_empty((1, 1), dtype=torch.float32)",
        "amax": "x.new_empty((tiles,), dtype=torch.float32)",
        "overflow": "x.new_empty((tiles,), dtype=torch.int32)",
    }
    checks = ["operators.check_matrix(x)", *([] if tensorwise else ["operators.check_scale(scale)"])]
    checks += ["operators.check_overflow_stats(record)"] if how.record else []
    tiles = [f"tiles = operators.tiles(x, {side})"]
    allocations = ["m, n = x.shape", *tiles, *(f"{name} = {made[name]}" for name in spec.results)]
    arguments = ["x.contiguous()", *given, *spec.results, *passed, f"num_warps={norm_launch.QUANTISE_WARPS}"]
    title = f"To {how.words}, and transposed"
    known = {"values": "(R, C)", "transposed": "(C, R)", **quantised_text.shapes_of(how, 1)}
    gives = ", ".join(f"{name} {known[name]}" for name in spec.results)
    shapes = f"x (R, C), {', '.join(f'{name} {known[name]}' for name in given)} -> {gives}."
    parameters = [f"{name}: Tensor" for name in spec.parameters]
    returns = f" -> tuple[{', '.join(['Tensor'] * len(spec.results))}]:"
    kernel: dict[str, object] = {
        "how": how,
        "limit": int(how.limit),
        "tile": side,
        "chunk": norm_launch.REQUANTIZE_PARTS,
        "title": title,
        "shapes": shapes,
        "unspecialised": '(do_not_specialize=["parts"])' if tensorwise else "",
        "kernel_header": opened(f"def _{spec.function}", [*pointers, *sizes], ":"),
        "host_header": opened(f"def {spec.function}", parameters, returns),
        "checks": checks,
        "allocations": allocations,
        "launch": opened(f"_{spec.function}[(tiles,)]", arguments, "", 4),
        "results": ", ".join(spec.results),
    }
    operator: dict[str, object] = {
        "reference_header": opened(f"def _{spec.function}_reference", parameters, returns),
        "fake_header": opened(f"def _{spec.function}_shapes", parameters, returns),
        "reference": [*checks, *_reference(spec), f"return {', '.join(spec.results)}"],
        "allocations": [*checks, *(line for line in allocations if "amax" in spec.results or line not in tiles)],
        "returned": f"    return {', '.join(spec.results)}",
        "title": title,
        "comment": [shapes],
    }
    return Views(kernel, operator)


def _reference(spec: CastTranspose) -> list[str]:
    how = spec.how
    modes = [f'format="{how.format.value}"'] if how.format.value != "e4m3" else []
    if how.scaling == "tensorwise":
        modes += [] if how.power_of_two else ["power_of_two=False"]
        call = f"values, scale = norm_reference.quantise_tensor({', '.join(['x', 'maxima', *modes])})"
    elif how.record:
        call = f"values = norm_reference.quantise_static_counted({', '.join(['x', 'scale', 'record', *modes])})"
    else:
        call = f"values, amax, overflow = norm_reference.quantise_static({', '.join(['x', 'scale', *modes])})"
    return [call, "transposed = values.t().clone(memory_format=torch.contiguous_format)"]
