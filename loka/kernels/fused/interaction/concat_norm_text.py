"""What the templates of join kernels are given."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.interaction.concat_norm_spec import ConcatNormBackward, ConcatNormForward, part_names
from loka.kernels.fused.norm.norm_launch import padded_width
from loka.kernels.fused.norm.norm_text import WIDTH, Views, header, indented, opened

_TITLES = {"layer_norm": "LayerNorm", "rms_norm": "RMSNorm"}


@dataclass(frozen=True, slots=True)
class ConcatNormConfiguration:
    """How a join kernel is launched."""

    rows: int  # that a program takes at a step, a power of two
    warps: int  # of a program
    programs: int  # on each multiprocessor, at most


def concat_norm_configuration(
    spec: ConcatNormForward | ConcatNormBackward, device: DeviceSpec = DEFAULT
) -> ConcatNormConfiguration:
    """The choice for a spec: so many rows at a step.

    A backward kernel with sums for a weight or a bias keeps them in registers: fewer rows, and fewer warps, then.
    """
    launch, padded = device.launches.concat_norm, padded_width(spec.width)
    if padded > launch.wide:
        warps = min(launch.most_warps, padded // launch.wide_warp_elements)
        return ConcatNormConfiguration(1, warps, max(1, launch.wide_elements // padded))
    if isinstance(spec, ConcatNormForward) or not (spec.weight or spec.bias):
        return ConcatNormConfiguration(launch.elements // padded, *launch.launch)
    return ConcatNormConfiguration(launch.summed_elements // padded, *launch.summed)


def concat_norm_views(spec: ConcatNormForward | ConcatNormBackward, launched: ConcatNormConfiguration) -> Views:
    """Views of a join kernel."""
    padded, forward = padded_width(spec.width), isinstance(spec, ConcatNormForward)
    statistics = [name for name in ("mean", "rstd") if name in spec.parameters + spec.results]
    masked = padded != spec.width
    parameters = [f"{name}: Tensor" for name in spec.parameters] + (["dtype: torch.dtype"] if forward else [])
    counts = [f"n_{index}" for index in range(spec.parts)] if spec.parts > 1 else []
    pointers = [f"{name}_ptr" for name in (*spec.parameters, *spec.results)]
    allocations = _allocations(spec, launched)
    loads = ", mask=inside, other=0.0" if masked else ""
    kernel: dict[str, object] = {
        "spec": spec,
        "rows": launched.rows,
        "padded": padded,
        "masked": masked,
        "parts": [{"name": f"part_{index}", "rows": count} for index, count in enumerate(counts)],
        "statistics": statistics,
        "sums": [name for name in spec.results if name in ("dweight", "dbias")],
        "vector_loads": [
            f"{name} = tl.load({name}_ptr + columns{loads}).to(tl.float32)"
            for name in ("weight", "bias")
            if name in spec.parameters
        ],
        "title": _title(spec),
        "shapes": indented(_shapes(spec)),
        "kernel_header": opened(f"def _{spec.function}", [*pointers, *counts, *(["n"] if counts else []), "m"], ":"),
        "host_header": header(spec.function, parameters, len(spec.results)),
        "allocations": allocations,
        "launch": opened(f"_{spec.function}[(programs,)]", _arguments(spec, launched, statistics), "", 4),
        "results": ", ".join(spec.results),
    }
    uses_programs = any(name in ("dweight", "dbias") for name in spec.results)
    unread = () if uses_programs else ("programs = ",) if forward else ("programs = ", "m = ")
    operator: dict[str, object] = {
        "title": _title(spec),
        "comment": _shapes(spec),
        "reference_header": header(f"_{spec.function}_reference", parameters, len(spec.results)),
        "reference": _reference(spec),
        "fake_header": header(f"_{spec.function}_shapes", parameters, len(spec.results)),
        "allocations": [line for line in allocations if not line.startswith(unread)],
        "returned": f"    return {', '.join(spec.results)}",
    }
    return Views(kernel, operator)


def _title(spec: ConcatNormForward | ConcatNormBackward) -> str:
    eps = f" (eps {spec.eps})" if isinstance(spec, ConcatNormForward) else ""
    what = f"{spec.parts} parts joined" if spec.parts > 1 else "a residual added"
    if spec.parts > 1 and spec.residual:
        what += ", a residual added"
    said = f"{what} -> {_TITLES[spec.norm]}{eps}"
    return said[0].upper() + said[1:] if isinstance(spec, ConcatNormForward) else f"Gradient of {said}"


def _shapes(spec: ConcatNormForward | ConcatNormBackward) -> list[str]:
    w = spec.width
    known = {f"part_{i}": f"(B, {f'n_{i}' if spec.parts > 1 else 'n'}, {w})" for i in range(spec.parts)}
    known |= dict.fromkeys(("residual", "grad", "out", "dx"), f"(B, n, {w})")
    known |= dict.fromkeys(("weight", "bias"), f"({w},)") | dict.fromkeys(("mean", "rstd"), "(B * n,)")
    known |= dict.fromkeys(("dweight", "dbias"), f"(P, {w})")
    takes = ", ".join(f"{name} {known[name]}" for name in spec.parameters)
    gives = ", ".join(f"{name} {known[name]}" for name in spec.results)
    return textwrap.wrap(f"{takes} -> {gives}.", WIDTH - 4)


def _allocations(spec: ConcatNormForward | ConcatNormBackward, launched: ConcatNormConfiguration) -> list[str]:
    parts = part_names(spec.parts)
    whole = "residual" if spec.residual else "grad" if isinstance(spec, ConcatNormBackward) else ""
    lines = [f"operators.check_joined({', '.join(parts)}, width={spec.width})"]
    if whole:
        lines.append(f"shape = {whole}.shape")
    else:
        rows = " + ".join(f"{part}.shape[1]" for part in parts)
        lines.append(f"shape = (part_0.shape[0], {rows}, {spec.width})")
    lines.append("m = shape[0] * shape[1]")
    limits = f"rows={launched.rows}, per_multiprocessor={launched.programs}"
    lines.append(f"programs = operators.programs_for(m, part_0.device, {limits})")
    if isinstance(spec, ConcatNormForward):
        lines.append("out = part_0.new_empty(shape, dtype=dtype)")
    else:
        widest = "part_0.dtype" if not spec.residual else "torch.promote_types(part_0.dtype, residual.dtype)"
        lines.append(f"dx = part_0.new_empty(shape, dtype={widest})")
    makers = dict.fromkeys(("mean", "rstd"), "(m,)") | dict.fromkeys(("dweight", "dbias"), f"(programs, {spec.width})")
    made = [name for name in spec.results if name in makers]
    return lines + [f"{name} = part_0.new_empty({makers[name]}, dtype=torch.float32)" for name in made]


def _arguments(
    spec: ConcatNormForward | ConcatNormBackward, launched: ConcatNormConfiguration, statistics: Sequence[str]
) -> list[str]:
    tensors = [name if name in statistics else f"{name}.contiguous()" for name in spec.parameters]
    counts = [f"{part}.shape[1]" for part in part_names(spec.parts)] + ["shape[1]"] if spec.parts > 1 else []
    return [*tensors, *spec.results, *counts, "m", f"num_warps={launched.warps}"]


def _reference(spec: ConcatNormForward | ConcatNormBackward) -> list[str]:
    comma = "," if spec.parts == 1 else ""
    parts = f"({', '.join(part_names(spec.parts))}{comma})"
    named = [f"{name}={name}" for name in spec.parameters if not name.startswith(("part_", "grad"))]
    keywords = [*named, f'norm="{spec.norm}"']
    if isinstance(spec, ConcatNormForward):
        keywords.append(f"eps={spec.eps}")
        call = _body("forward = concat_norm_reference.concat_norm_forward", [parts, *keywords])
        saved = "".join(f", forward.{name}" for name in spec.results[1:])
        total = " + ".join(f"{part}.shape[1]" for part in part_names(spec.parts))
        shape = f"(part_0.shape[0], {total}, {spec.width})"
        return [*call, f"out = forward.y.reshape({shape}).to(dtype)", f"return out{saved}"]
    call = _body("backward = concat_norm_reference.concat_norm_backward", ["grad", parts, *keywords])
    widest = "part_0.dtype" if not spec.residual else "torch.promote_types(part_0.dtype, residual.dtype)"
    sums = "".join(f", backward.{name[1:]}" for name in spec.results[1:])
    return [*call, f"dx = backward.x.reshape(grad.shape).to({widest})", f"return dx{sums}"]


def _body(before: str, items: list[str]) -> list[str]:
    """A call as a function's body has it, without the indentation that the template gives each line."""
    return [line[4:] for line in opened(before, items, "", 4).split("\n")]
