"""What the templates of norms over wide rows are given: rows that no program holds whole (`wide_configs`).

A forward's program takes whole rows, one after another, each chunk by chunk: once for the statistics of its norm, and
once for the result. Its values are written under the scale of the row before, while the maximum is found, and written
again where the row's own scale is another: after a LayerNorm of 123200 elements never for normal rows, for Student's
t with three degrees of freedom every second time. Scales that are no powers of two are nearly all different, so there
the maximum is found first. The row that one program on a multiprocessor works on stays in the L2 cache meanwhile. A
backward's program keeps to its columns, whose parameters and sums it holds, and goes down the rows; one launch finds
the sums of rows, by columns, with those of the columns, one the maxima, and one writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from loka.kernels.fused.norm.norm_launch import LEAST_SUMMED, Configuration
from loka.kernels.fused.norm.norm_spec import SAVING, NormBackward, NormForward
from loka.kernels.fused.norm.norm_text import Views, norm_title, norm_views, opened
from loka.kernels.fused.norm.wide_norm_launch import WideConfiguration

_VECTORS = ("add", "weight", "bias")
_BY_COLUMNS = ("dweight", "dbias")  # found with the sums of rows
_AS_THEY_ARE = ("grad", "scale", "record", "maxima", "mean", "rstd")  # of kernels, a number or two, rows with a stride
_LANE = 8  # neighbours that a thread holds, as in quantised_text


def wide_forward_views(spec: NormForward, launched: WideConfiguration) -> Views:
    """Views of a norm's forward over wide rows."""
    views = norm_views(spec, Configuration(1, launched.warps, launched.programs, held=False))
    chunk, masked = launched.chunk, spec.width % launched.chunk != 0
    steps = f"0, {spec.width}, {chunk}"
    kernel = {
        **views.kernel,
        **_lanes(chunk),
        "chunk": chunk,
        "chunks": f"tl.range({steps}, num_stages={launched.stages})" if launched.stages > 1 else f"range({steps})",
        "masked": masked,
        "load_mask": ", mask=inside, other=0.0" if masked else "",
        "store_mask": ", mask=inside" if masked else "",
        "whole": f"[{chunk}]",
        "blocks": f"[{chunk // spec.block}, {spec.block}]",
        "guesses": spec.quantise and spec.how.scaling == "rowwise" and spec.how.power_of_two,
        "writes_rows": views.kernel["uses_offsets"],
    }
    return Views(kernel, views.operator)


@dataclass(frozen=True, slots=True)
class Pass:
    """One launch of a backward."""

    header: str
    title: str
    launch: str
    before: tuple[str, ...]  # lines before the launch
    vector_loads: tuple[str, ...]
    sums: tuple[str, ...]  # over columns
    uses_offsets: bool
    finds_sums: bool = False
    finds_maxima: bool = False

    @property
    def writes(self) -> bool:
        """Whether it is the last."""
        return not (self.finds_sums or self.finds_maxima)


def wide_backward_views(spec: NormBackward, launched: WideConfiguration) -> Views:
    """Views of a norm's backward over wide rows."""
    views = norm_views(spec, Configuration(1, launched.warps, launched.programs, held=False))
    chunk, rows, masked = launched.chunk, launched.rows, spec.width % launched.chunk != 0
    across = -(-spec.width // chunk)
    mask = "mask" if masked else "valid[:, None]"
    allocations = _allocations(launched, across, _lines(views.kernel["allocations"]))
    kernel = {
        **views.kernel,
        **_lanes(rows * chunk),
        "allocations": [*allocations, *_contiguous(spec)],
        "unspecialised": '["m", "parts"]',
        "passes": _passes(spec, launched, across, masked),
        "across": across,
        "chunk": chunk,
        "rows": rows,
        "stages": launched.stages,
        "masked": masked,
        "load_mask": f", mask={mask}, other=0.0",
        "store_mask": f", mask={mask}",
        "own_offsets": "row[:, None].to(tl.int64) * grad_stride + columns[None, :]",
        "whole": f"[{rows}, {chunk}]",
        "blocks": f"[{rows * chunk // spec.block}, {spec.block}]",
    }
    checks = [line for line in _lines(views.operator["allocations"]) if line.startswith("operators.check_")]
    unused = [name for name in ("programs", "parts", "m") if not _reads(allocations, name)]
    shapes = [line for line in allocations if line.partition(" ")[0] not in unused]
    return Views(kernel, {**views.operator, "allocations": [*checks, *shapes]})


def _allocations(launched: WideConfiguration, across: int, lines: Sequence[str]) -> list[str]:
    """A backward's lines that make its outputs: sums of columns by parts of the rows, the rest by programs."""
    found = [line.replace("new_empty((programs, ", "new_empty((parts, ") for line in lines]
    place = next(index for index, line in enumerate(found) if line.startswith("programs = "))
    least = launched.rows * LEAST_SUMMED
    parts = f"parts = operators.row_parts(grad, rows={least}, across={across}, per_multiprocessor={launched.programs})"
    found[place] = parts
    if any("(programs,)" in line for line in found):
        found.insert(place + 1, f"programs = parts * {across}")
    return found


def _reads(lines: Sequence[str], name: str) -> bool:
    return any(re.search(rf"\b{name}\b", line.partition(" = ")[2]) for line in lines)


def _contiguous(spec: NormBackward) -> list[str]:
    named = [name for name in spec.parameters if name not in _AS_THEY_ARE]
    return [f"{name} = {name}.contiguous()" for name in named]


def _passes(spec: NormBackward, launched: WideConfiguration, across: int, masked: bool) -> tuple[Pass, ...]:
    found = []
    title = norm_title(spec)
    means: list[str] = []  # of rows
    if spec.norm in SAVING:
        means = ["mean_dn", "mean_dn_n"] if spec.norm == "layer_norm" else ["mean_dn_n"]
        sums = [name.replace("mean_", "sum_") for name in means]
        columns = [name for name in spec.results if name in _BY_COLUMNS]
        takes = [name for name in spec.parameters if name in ("grad", "x", *_VECTORS, "mean", "rstd")]
        before = tuple(f"{name} = grad.new_empty((m, {across}), dtype=torch.float32)" for name in sums)
        found.append(_pass(spec, "sums", "Sums", [*takes, *columns, *sums], columns, before, launched, across, masked))
    before = tuple(f"{name} = {name.replace('mean_', 'sum_')}.sum(1) / {spec.width}" for name in means)
    takes = [name for name in spec.parameters if name not in spec.how.parameters]
    makes = [name for name in spec.results if name not in _BY_COLUMNS]
    if spec.quantise and spec.how.scaling == "rowwise":
        lines = (*before, f"maximum = grad.new_empty((m, {across}), dtype=torch.float32)")
        given = [*takes, *means, "maximum"]
        found.append(_pass(spec, "maxima", "Maxima", given, [], lines, launched, across, masked))
        before, means = ("amax = maximum.amax(1)",), [*means, "amax"]
    given = [*takes, *spec.how.parameters * spec.quantise, *means, *makes]
    columns = [name for name in makes if name == "dadd"]
    found.append(_pass(spec, "", title, given, columns, before, launched, across, masked))
    return tuple(found)


def _pass(
    spec: NormBackward,
    kind: str,
    title: str,
    given: Sequence[str],
    sums: Sequence[str],
    before: tuple[str, ...],
    launched: WideConfiguration,
    across: int,
    masked: bool,
) -> Pass:
    function = "_".join(filter(None, (f"_{spec.function}", kind)))
    pointers = [f"{name}_ptr" for name in given]
    arguments = [*given, "grad.stride(0)", "m", "parts", f"num_warps={launched.warps}"]
    mask = ", mask=inside, other=0.0" if masked else ""
    loads = [f"{name} = tl.load({name}_ptr + columns{mask}).to(tl.float32)" for name in given if name in _VECTORS]
    matrices = ("carried", "x", "times", "values", "dx", "dsum")
    return Pass(
        header=opened(f"def {function}", [*pointers, "grad_stride", "m", "parts"], ":"),
        title=title,
        launch=opened(f"{function}[(parts * {across},)]", arguments, "", 4),
        before=before,
        vector_loads=tuple(loads),
        sums=tuple(sums),
        uses_offsets=any(name in given for name in matrices),
        finds_sums=kind == "sums",
        finds_maxima=kind == "maxima",
    )


def _lanes(elements: int) -> dict[str, object]:
    """What quantise_*.py.j2 read of a step's elements."""
    return {"lane": _LANE, "lanes": elements // _LANE}


def _lines(found: object) -> list[str]:
    return [str(line) for line in found] if isinstance(found, list) else []
