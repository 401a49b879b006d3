"""The part of a norm kernel's text that its quantisation decides: values for the templates, allocations, references."""

from __future__ import annotations

from loka.kernels.fused.norm import norm_launch
from loka.kernels.fused.norm.norm_launch import Configuration
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.quantisation import Quantisation
from loka.numerics.quantize import BLOCK

_LANE = 8  # neighbours in a row that a thread holds, where it reads bfloat16: a maximum over them needs no other thread


def quantised_views(spec: NormForward | NormBackward, launched: Configuration) -> dict[str, object]:
    """What quantise_*.py.j2 read beside the values of every norm kernel."""
    padded = norm_launch.padded_width(spec.width)
    group = min(BLOCK, padded)
    elements = launched.rows * padded
    lane = min(_LANE, elements)
    return {
        "how": spec.how,
        "limit": int(spec.how.limit),
        "group": group,
        "groups": padded // group,  # of a row
        "filled": blocks_of(spec.width),
        "lane": lane,
        "lanes": elements // lane,
        "chunk": norm_launch.REQUANTIZE_PARTS,
    }


def blocks_of(width: int) -> int:
    """Scales of a row that is quantised blockwise."""
    return -(-width // BLOCK)


def shapes_of(how: Quantisation, width: int) -> dict[str, str]:
    """Shapes, for comments, of what only a quantisation takes or gives."""
    scale = {"rowwise": "(M, 1)", "blockwise": f"(M, {blocks_of(width)})"}.get(how.scaling, "(1, 1)")
    return {"scale": scale, "maxima": "(Q,)", "amax": "(P,)", "overflow": "(P,)", "record": "(2,)"}


def makers(how: Quantisation, matrix: str, width: int) -> dict[str, str]:
    """How the host function allocates each result."""
    rows = {"rowwise": "m, 1", "blockwise": f"m, {blocks_of(width)}"}.get(how.scaling, "1, 1")
    return {
        "values": f"{matrix}.new_empty((m, {width}), dtype={how.torch_type})",
        "scale": f"{matrix}.new_empty(({rows}), dtype=torch.float32)",
        "largest": f"{matrix}.new_empty((programs,), dtype=torch.float32)",
        "amax": f"{matrix}.new_empty((programs,), dtype=torch.float32)",
        "overflow": f"{matrix}.new_empty((programs,), dtype=torch.int32)",
    }


def reference_line(how: Quantisation, source: str) -> str:
    """The statement of the CPU implementation that quantises `source`."""
    given = [source, *how.parameters]
    modes = [f'format="{how.format.value}"'] if how.format.value != "e4m3" else []
    if how.record:
        return f"values = norm_reference.quantise_static_counted({', '.join([*given, *modes])})"
    if not how.power_of_two and how.scaling != "known":
        modes.append("power_of_two=False")
    function = {
        "rowwise": "quantise_rows",
        "blockwise": "quantise_blocks",
        "known": "quantise_static",
        "tensorwise": "quantise_tensor",
        "maximum": "largest_magnitude",
    }[how.scaling]
    return f"{', '.join(how.results)} = norm_reference.{function}({', '.join([*given, *modes])})"
