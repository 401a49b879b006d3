"""What the templates of norms are given; headers, allocations and launches of any kernel, laid out as ruff does it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from loka.kernels.fused.norm import norm_launch, quantised_text
from loka.kernels.fused.norm.norm_launch import Configuration
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward, Spec

WIDTH = 120  # of a line

TITLES = {
    "layer_norm": "LayerNorm",
    "rms_norm": "RMSNorm",
    "block_norm": "BlockNorm",
    "relu": "ReLU",
    "silu": "SiLU",
    "sigmoid": "sigmoid",
    "hardswish": "Hard Swish",
    "gelu": "GELU",
    "gate_sigmoid": "sigmoid gate",
    "gate_hardsigmoid": "hard gate",
}
_SHAPES = {
    "add": "({w},)", "weight": "({w},)", "bias": "({w},)", "x": "(M, {w})", "grad": "(M, {w})", "out": "(M, {w})",
    "dx": "(M, {w})", "values": "(M, {w})", "largest": "(P,)", "mean": "(M,)", "rstd": "(M,)",
    "dweight": "(P, {w})", "dbias": "(P, {w})", "dadd": "(P, {w})", "times": "(M, {w})", "residual": "(M, {w})",
    "carried": "(M, {w})", "kept": "(M, {w})", "dsum": "(M, {w})",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Views:
    """The values of a family's template, and of the operator's."""

    kernel: dict[str, object]
    operator: dict[str, object]


def opened(before: str, items: Sequence[str], after: str, indent: int = 0) -> str:
    """`before(items)after` at `indent` columns, on one line: what renders it wraps it."""
    return f"{' ' * indent}{before}({', '.join(items)}){after}"


def registration(function: str, name: str, changes: Sequence[str] = ()) -> str:
    """The statement that makes the operator; `changes` are the parameters that it writes into."""
    deferred = opened("operators.deferred", ["__package__", f'"{function}"'], ",", 4)  # an item on a line of its own
    arguments = [
        f'"{name}"',
        deferred.strip().removesuffix(","),
        f"_{function}_reference",
        f"_{function}_shapes",
        *([f"changes=({', '.join(quoted)},)"] if (quoted := [f'"{name}"' for name in changes]) else []),
    ]
    return opened(f"{function} = operators.operator", arguments, "")


def norm_views(spec: NormForward | NormBackward, launched: Configuration) -> Views:
    """Views of a norm's forward or backward."""
    columns = spec.columns if isinstance(spec, NormForward) else spec.width  # of what is written
    padded = norm_launch.padded_width(columns)
    masked, several = padded != spec.width, launched.rows > 1
    matrices = ("x", "times", "residual") if isinstance(spec, NormForward) else ("grad", "carried", "x", "times")
    statistics = [name for name in ("mean", "rstd") if name in spec.parameters + spec.results]
    allocations = _norm_allocations(spec, matrices[0], launched)
    pointers = [f"{name}_ptr" for name in (*spec.parameters, *spec.results)]
    asis = (*statistics, "scale", "record", "maxima", matrices[0])  # of kernels, a number or two, rows with a stride
    passed = [name if name in asis else f"{name}.contiguous()" for name in spec.parameters]
    counted = ["m", "maxima.shape[0]"] if "maxima" in spec.parameters else ["m"]
    arguments = [*passed, *spec.results, f"{matrices[0]}.stride(0)", *counted, f"num_warps={launched.warps}"]
    sizes, stride = ["m", "parts"] if "maxima" in spec.parameters else ["m"], f"{matrices[0]}_stride"
    inner = str(spec.width)
    if columns != spec.width:
        # The width as an argument: with zeros that are known when a kernel is compiled, ptxas (of Triton 3.6) writes
        # the upper of two packed FP8 values wrongly.
        inner, arguments, sizes = "k", [*arguments[:-1], inner, arguments[-1]], [*sizes, "k"]
    parameters = [f"{name}: Tensor" for name in spec.parameters]
    if isinstance(spec, NormForward) and spec.takes_dtype:
        parameters.append("dtype: torch.dtype | None = None")
    maximum = spec.quantise and spec.how.scaling == "maximum"  # writes no matrix
    mask = {(False, False): "", (False, True): "inside", (True, False): "valid[:, None]", (True, True): "mask"}
    by_element = mask[several, masked]
    written = by_element
    if columns != spec.width:  # zeros behind the rows are written too
        valid, inside = "valid[:, None]" if several else "", "written[None, :]" if several else "written"
        written = " & ".join(part for part in (valid, inside if columns != padded else "") if part)
    kernel: dict[str, object] = {
        "spec": spec,
        "rows": launched.rows,
        "stages": launched.stages,
        "padded": padded,
        "masked": masked,
        "inner": inner,
        "load_mask": f", mask={by_element}, other=0.0" if by_element else "",
        "store_mask": f", mask={written}" if written else "",
        "pitch": columns,
        "own_offsets": f"row[:, None].to(tl.int64) * {stride} + columns[None, :]"
        if several
        else f"tl.cast(row, tl.int64) * {stride} + columns",
        "uses_offsets": not maximum or any(name in spec.parameters for name in matrices[1:]),
        "held": launched.held,
        "blocks": f"[{launched.rows * padded // spec.block}, {spec.block}]",
        "whole": f"[{launched.rows}, {padded}]" if several else f"[{padded}]",
        "vector_loads": [
            f"{name} = tl.load({name}_ptr + columns{', mask=inside, other=0.0' if masked else ''}).to(tl.float32)"
            for name in spec.parameters
            if name in ("add", "weight", "bias")
        ],
        "statistics": statistics,
        "checked": [name for name in matrices if name in spec.parameters],
        "sums": [name for name in spec.results if name in ("dweight", "dbias", "dadd")],
        "title": norm_title(spec),
        "shapes": indented(_norm_shapes(spec)),
        "kernel_header": opened(f"def _{spec.function}", [*pointers, stride, *sizes], ":"),
        "unspecialised": "[" + ", ".join(f'"{name}"' for name in sizes) + "]",
        **quantised_text.quantised_views(spec, launched),
        "host_header": header(spec.function, parameters, len(spec.results)),
        "allocations": allocations,
        "launch": opened(f"_{spec.function}[(programs,)]", arguments, "", 4),
        "results": ", ".join(spec.results),
    }
    reference = _forward_reference(spec) if isinstance(spec, NormForward) else _backward_reference(spec)
    checks = [f"operators.check_rows({name}, {spec.width})" for name in matrices if name in spec.parameters]
    checks += ["operators.check_scale(scale)"] if "scale" in spec.parameters else []
    checks += ["operators.check_overflow_stats(record)"] if "record" in spec.parameters else []
    uses_programs = any(_shape(spec, name).startswith("(P") for name in spec.results)
    uses_rows = any("(m, " in line or "(m,)" in line for line in allocations)
    unused = (*(() if uses_programs else ("programs = ",)), *(() if uses_rows else ("m = ",)))
    shapes = [line for line in allocations if not line.startswith(unused)]
    return Views(kernel, operator_views(spec, parameters, [*checks, *reference], shapes, checks))


def operator_views(
    spec: Spec, parameters: list[str], reference: list[str], allocations: list[str], checks: list[str]
) -> dict[str, object]:
    """The values of the operator's template: its reference, and `checks` and `allocations` for its shapes."""
    count = len(spec.results)
    shown: dict[str, object] = {}
    if isinstance(spec, NormForward | NormBackward):
        shown = {"title": norm_title(spec), "comment": _norm_shapes(spec)}
    return {
        "reference_header": header(f"_{spec.function}_reference", parameters, count),
        "fake_header": header(f"_{spec.function}_shapes", parameters, count),
        "reference": reference,
        "allocations": [*checks, *allocations],
        "returned": f"    return {', '.join(spec.results)}",
        **shown,
    }


def header(function: str, parameters: Sequence[str], results: int) -> str:
    """The header of a function of these parameters that returns so many tensors."""
    gives = "Tensor" if results == 1 else f"tuple[{', '.join(['Tensor'] * results)}]"
    return opened(f"def {function}", parameters, f" -> {gives}:")


def norm_title(spec: NormForward | NormBackward) -> str:
    """What a kernel does, in words."""
    steps = ["addition"] if spec.add else []
    steps += ["product"] if spec.times else []
    steps += ["residual"] if isinstance(spec, NormForward) and spec.residual else []
    if spec.norm is not None:
        eps = f" (eps {spec.eps})" if isinstance(spec, NormForward) else ""
        block = f" {spec.block}" if spec.norm == "block_norm" else ""
        steps.append(TITLES[spec.norm] + block + eps)
    if spec.activation is not None:
        steps.append(TITLES[spec.activation])
    said = _said(spec, steps, spec.how.description)
    if len(said) > WIDTH - len(f'    """ for grad (m, {spec.width})."""'):
        said = _said(spec, steps, spec.how.short_description)
    return said


def _said(spec: NormForward | NormBackward, steps: list[str], result: str) -> str:
    rows = [result] if spec.quantise else []
    if isinstance(spec, NormForward):
        said = " -> ".join(steps + rows)
    else:
        said = " -> ".join([f"Gradient of {', '.join(steps)}" if steps else "Gradient", *rows])
    return said[0].upper() + said[1:] if said != "".join(rows) else f"To {said}"


def _norm_shapes(spec: NormForward | NormBackward) -> list[str]:
    takes = ", ".join(f"{name} {_shape(spec, name)}" for name in spec.parameters)
    gives = ", ".join(f"{name} {_shape(spec, name)}" for name in spec.results)
    return textwrap.wrap(f"{takes} -> {gives}.", WIDTH - 4)


def _shape(spec: NormForward | NormBackward, name: str) -> str:
    known = quantised_text.shapes_of(spec.how, spec.width)
    if name == "values" and isinstance(spec, NormForward):
        return f"(M, {spec.columns})"
    return known[name] if name in known else _SHAPES[name].format(w=spec.width)


def indented(lines: Sequence[str]) -> str:
    """Lines of a docstring in a function's body."""
    return "\n".join(f"    {line}" for line in lines)


def _norm_allocations(spec: NormForward | NormBackward, matrix: str, launched: Configuration) -> list[str]:
    """Lines that make a norm's outputs, from the matrix that comes first."""
    width = spec.width
    if isinstance(spec, NormBackward):
        out = f"{matrix}.new_empty((m, {width}))"
    else:
        out = f"{matrix}.new_empty((m, {width}), dtype={matrix}.dtype if dtype is None else dtype)"
    kept = f"{'carried' if isinstance(spec, NormBackward) and spec.carried else matrix}.new_empty((m, {width}))"
    makers = {
        **quantised_text.makers(spec.how, matrix, spec.columns if isinstance(spec, NormForward) else width),
        "out": out,
        "dx": out,
        "kept": out,
        "dsum": kept,
        "mean": f"{matrix}.new_empty((m,), dtype=torch.float32)",
        "rstd": f"{matrix}.new_empty((m,), dtype=torch.float32)",
    }
    sums = f"{matrix}.new_empty((programs, {width}), dtype=torch.float32)"
    summed = any(name in spec.results for name in ("dweight", "dbias", "dadd"))
    least = launched.rows * (norm_launch.LEAST_SUMMED if summed else 1)
    limits = f"rows={least}, per_multiprocessor={launched.programs}"
    return [
        f"m = {matrix}.shape[0]",
        f"programs = operators.programs({matrix}, {limits})",
        *(f"{name} = {makers.get(name, sums)}" for name in spec.results),
    ]


def _keywords(spec: NormForward | NormBackward, names: Sequence[str]) -> list[str]:
    keywords = [f"{name}={name}" for name in names]
    if spec.norm is not None:
        keywords.append(f'norm="{spec.norm}"')
        if isinstance(spec, NormForward) or spec.norm == "block_norm":
            keywords.append(f"eps={spec.eps}")
        if spec.norm == "block_norm":
            keywords.append(f"block={spec.block}")
    if spec.activation is not None:
        keywords.append(f'activation="{spec.activation}"')
    return keywords


def _forward_reference(spec: NormForward) -> list[str]:
    items = ["x", *_keywords(spec, _computed(spec)[1:])]
    lines = _body_line("forward = norm_reference.norm_forward", items)
    dtype = "x.dtype if dtype is None else dtype"
    lines += [f"kept = forward.kept.to({dtype})"] if spec.keep else []
    saved = ["kept"] if spec.keep else []
    saved += [f"forward.{name}" for name in spec.results if name in ("mean", "rstd")]
    if spec.quantise:
        rows = f"torch.nn.functional.pad(forward.y, (0, {spec.aligned - spec.width}))" if spec.aligned else "forward.y"
        lines.append(quantised_text.reference_line(spec.how, rows))
        return [*lines, f"return {', '.join([*spec.how.results, *saved])}"]
    return [*lines, f"return {', '.join([f'forward.y.to({dtype})', *saved])}"]


def _backward_reference(spec: NormBackward) -> list[str]:
    items = ["grad", *_keywords(spec, _computed(spec)[1:])]
    lines = _body_line("backward = norm_reference.norm_backward", items)
    sums = [f"backward.sum.to({'carried' if spec.carried else 'grad'}.dtype)"] if spec.carry else []
    sums += [f"backward.{name[1:]}" for name in spec.results if name in ("dweight", "dbias", "dadd")]
    if spec.quantise:
        lines.append(quantised_text.reference_line(spec.how, "backward.x"))
        return [*lines, f"return {', '.join([*spec.how.results, *sums])}"]
    return [*lines, f"return {', '.join(['backward.x.to(grad.dtype)', *sums])}"]


def _computed(spec: NormForward | NormBackward) -> tuple[str, ...]:
    """The parameters that what is quantised is computed from."""
    return tuple(name for name in spec.parameters if name not in spec.how.parameters)


def _body_line(before: str, items: Sequence[str]) -> list[str]:
    """A call as a function's body has it, without the indentation that the template gives each line."""
    return [line[4:] for line in opened(before, items, "", 4).split("\n")]
