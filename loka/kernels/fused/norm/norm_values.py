"""What the templates of norms are given."""

from __future__ import annotations

from loka.devices.spec import DeviceSpec, RowLaunch
from loka.devices.targets import DEFAULT
from loka.kernels.fused.kernel_values import KernelValues
from loka.kernels.fused.norm.norm_launch import padded_width
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from loka.kernels.fused.norm.wide_norm_launch import WideConfiguration
from loka.kernels.fused.norm.wide_norm_passes import wide_norm_passes
from loka.numerics.quantize import BLOCK

_ACTIVATIONS = {
    "relu": "ReLU",
    "silu": "SiLU",
    "sigmoid": "sigmoid",
    "hardswish": "Hard Swish",
    "gelu": "GELU",
    "gate_sigmoid": "sigmoid gate",
    "gate_hardsigmoid": "hard gate",
}
_MATRICES = ("x", "grad", "out", "dx", "values", "times", "residual", "residual_grad_in", "kept", "residual_grad_out")
_VECTORS = ("add", "weight", "bias")
_SUMS = ("dweight", "dbias", "dadd")


def norm_values(spec: NormForward | NormBackward, launch: RowLaunch, device: DeviceSpec = DEFAULT) -> KernelValues:
    """Values of a norm's forward or backward, of rows that a program holds whole."""
    family = "norm/forward" if isinstance(spec, NormForward) else "norm/backward"
    summed = isinstance(spec, NormBackward) and any(name in spec.results for name in _SUMS)
    padded = padded_width(spec.columns)
    constants = {} if spec.columns != spec.width else {"WIDTH": spec.width}
    constants |= {"PADDED": padded} if padded != spec.width else {}
    constants |= {"ROWS": launch.rows} if launch.rows > 1 else {}
    constants |= {"STAGES": launch.stages} if launch.stages > 1 else {}
    words = {
        "masked": padded != spec.width,
        "single_row": launch.rows == 1,
        "prefetching": launch.stages > 1,
        "rereading": not launch.held,
    }
    numbers = {
        "producer": spec,
        "padded_width": padded,
        "maxima_chunk": device.launches.maxima_chunk,
        "least_rows": launch.rows * (device.launches.rows.least_summed if summed else 1),
        "most_programs": launch.programs,
    }
    return KernelValues(
        family=family,
        spec=spec,
        launch=launch,
        title=norm_title(spec),
        shapes=norm_shapes(spec),
        numbers=numbers,
        width=spec.width,
        constants=constants,
        structure=tuple(word for word, holds in words.items() if holds),
    )


def wide_norm_values(
    spec: NormForward | NormBackward, launch: WideConfiguration, device: DeviceSpec = DEFAULT
) -> KernelValues:
    """Values of a norm's forward or backward, of rows that programs take in chunks."""
    numbers: dict[str, object] = {
        "producer": spec,
        "maxima_chunk": device.launches.maxima_chunk,
        "least_rows": 1,
        "most_programs": launch.programs,
    }
    if isinstance(spec, NormForward):
        return KernelValues("norm/wide_forward", spec, launch, norm_title(spec), norm_shapes(spec), numbers)
    numbers |= {
        "least_rows": launch.rows * device.launches.rows.least_summed,
        "across": -(-spec.width // launch.chunk),
        "passes": wide_norm_passes(spec),
    }
    return KernelValues("norm/wide_backward", spec, launch, norm_title(spec), norm_shapes(spec), numbers)


def norm_title(spec: NormForward | NormBackward) -> str:
    """What a kernel computes: "Addition -> LayerNorm (eps 1e-05) -> SiLU -> e4m3 with one power-of-two scale a row"."""
    steps = ["addition"] if spec.add else []
    steps += ["product"] if spec.times else []
    steps += ["residual"] if isinstance(spec, NormForward) and spec.residual else []
    if spec.norm is not None:
        eps = f" (eps {spec.eps})" if isinstance(spec, NormForward) else ""
        block = f" {spec.block}" if spec.traits.over_blocks else ""
        steps.append(spec.traits.title + block + eps)
    if spec.activation is not None:
        steps.append(_ACTIVATIONS[spec.activation])
    title = _title(spec, steps, spec.how.description)
    room = 120 - len('    """ for grad (m, WIDTH)."""')
    return title if len(title) <= room else _title(spec, steps, spec.how.short_description)


def norm_shapes(spec: NormForward | NormBackward, several: bool = False) -> dict[str, str]:
    """Shapes of a kernel's parameters and results, by name; W stands for one of `several` widths."""
    width = "W" if several else str(spec.width)
    blocks = f"ceil(W / {BLOCK})" if several else str(-(-spec.width // BLOCK))
    scale = {"rowwise": "(M, 1)", "blockwise": f"(M, {blocks})"}.get(spec.how.scaling, "(1, 1)")
    shapes = dict.fromkeys(_MATRICES, f"(M, {width})") | dict.fromkeys(_VECTORS, f"({width},)")
    shapes |= dict.fromkeys(_SUMS, f"(P, {width})") | dict.fromkeys(("mean", "rstd"), "(M,)")
    shapes |= dict.fromkeys(("scale_max", "amax", "overflow"), "(P,)")
    shapes |= {"scale": scale, "maxima": "(Q,)", "overflow_stats": "(2,)"}
    if isinstance(spec, NormForward) and spec.aligned:
        shapes["values"] = f"(M, {spec.columns})"
    return shapes


def _title(spec: NormForward | NormBackward, steps: list[str], quantized: str) -> str:
    rows = [quantized] if spec.quantize else []
    if isinstance(spec, NormBackward):
        steps = [f"gradient of {', '.join(steps)}" if steps else "gradient"]
    elif not steps:
        return f"To {quantized}"
    title = " -> ".join([*steps, *rows])
    return title[0].upper() + title[1:]
