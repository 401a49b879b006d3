"""What the templates of mixing kernels are given."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.interaction.fm_spec import FmBackward, FmForward, padded
from loka.kernels.fused.norm.norm_text import WIDTH, Views, header, indented, opened

_SHAPES = {
    "x": "(B, {n}, {d})", "passed": "(B, {n}, {d})", "dx": "(B, {n}, {d})",
    "rank": "({n}, {r})", "compress": "({c}, {n})",
    "products": "(B, {n}, {r})", "dproducts": "(B, {n}, {r})",
    "compressed": "(B, {c}, {d})", "dcompressed": "(B, {c}, {d})",
    "drank": "(P, {n} * {r})", "dcompress": "(P, {c} * {n})",
}  # fmt: skip
_PARTS = ("dcompressed", "passed")  # may be parts of wider tensors


@dataclass(frozen=True, slots=True)
class FmConfiguration:
    """How a mixing kernel is launched."""

    chunk: int  # columns of a sample that the backward takes at a step, a power of two
    stages: int  # samples on their way into shared memory
    warps: int  # of a program
    programs: int  # on each multiprocessor, at most


def fm_configuration(spec: FmForward | FmBackward, device: DeviceSpec = DEFAULT) -> FmConfiguration:
    """The choice for a spec."""
    launch = device.launches.mix
    n, d = padded(spec.sizes.embeddings), padded(spec.sizes.dim)
    if isinstance(spec, FmForward):
        return FmConfiguration(d, 3 if n * d <= launch.fetched else 2, *launch.forward)
    return FmConfiguration(min(d, launch.chunk), 3, *(launch.backward_few if n <= launch.few else launch.backward))


def fm_views(spec: FmForward | FmBackward, launched: FmConfiguration) -> Views:
    """Views of a mixing kernel."""
    sizes = spec.sizes
    n, d, r, c = sizes.embeddings, sizes.dim, sizes.rank, sizes.made
    chunks = -(-d // launched.chunk)
    allocations = _allocations(spec, launched)
    parameters = [f"{name}: Tensor" for name in spec.parameters]
    reference = f"fm_reference.{_reference(spec)}({', '.join(spec.parameters)})"
    shapes = _shapes(spec)
    kernel: dict[str, object] = {
        "n": n, "d": d, "r": r, "c": c,
        "n_padded": padded(n), "d_padded": padded(d), "r_padded": padded(r), "c_padded": padded(max(c, 1)),
        "chunk": launched.chunk,
        "chunks": chunks,
        "stages": launched.stages,
        "title": _title(spec),
        "shapes": indented(shapes),
        "kernel_header": opened(f"def _{spec.function}", _kernel_parameters(spec), ":"),
        "host_header": header(spec.function, parameters, len(spec.results)),
        "passed": isinstance(spec, FmBackward) and spec.passed,
        "reference": reference,
        "allocations": allocations,
        "launch": opened(f"_{spec.function}[(programs,)]", _arguments(spec, launched), "", 4),
        "results": ", ".join(spec.results),
        **_masks(spec, launched),
    }  # fmt: skip
    check = f"operators.check_sample(x, {n}, {d})"
    counted = [line for line in allocations if isinstance(spec, FmBackward) or not line.startswith("programs = ")]
    operator: dict[str, object] = {
        "title": _title(spec),
        "comment": shapes,
        "reference_header": header(f"_{spec.function}_reference", parameters, len(spec.results)),
        "reference": [check, f"return {reference}"],
        "fake_header": header(f"_{spec.function}_shapes", parameters, len(spec.results)),
        "allocations": [check, *counted],
        "returned": f"    return {', '.join(spec.results)}",
    }
    return Views(kernel, operator)


def _title(spec: FmForward | FmBackward) -> str:
    sizes = spec.sizes
    products = f"pairwise products at rank {sizes.rank}"
    what = f"{products} and {sizes.made} weighted sums" if sizes.made else products
    return what[0].upper() + what[1:] if isinstance(spec, FmForward) else f"Gradients of {what}"


def _shapes(spec: FmForward | FmBackward) -> list[str]:
    sizes = spec.sizes
    values = {"n": sizes.embeddings, "d": sizes.dim, "r": sizes.rank, "c": sizes.made}
    takes = [f"{name} {_SHAPES[name].format_map(values)}" for name in spec.parameters]
    gives = [f"{name} {_SHAPES[name].format_map(values)}" for name in spec.results]
    return textwrap.wrap(f"{', '.join(takes)} -> {', '.join(gives)}.", WIDTH - 4)


def _reference(spec: FmForward | FmBackward) -> str:
    what = "fm" if spec.sizes.made else "fm_products"
    if isinstance(spec, FmForward):
        return "fm_forward" if spec.sizes.made else what
    return f"{what}_backward"


def _strided(spec: FmForward | FmBackward) -> list[str]:
    return [name for name in spec.parameters if name in _PARTS]


def _kernel_parameters(spec: FmForward | FmBackward) -> list[str]:
    pointers = [f"{name}_ptr" for name in (*spec.parameters, *spec.results)]
    return [*pointers, *(f"{name}_stride" for name in _strided(spec)), "batch"]


def _arguments(spec: FmForward | FmBackward, launched: FmConfiguration) -> list[str]:
    strided = _strided(spec)
    tensors = [name if name in strided else f"{name}.contiguous()" for name in spec.parameters]
    strides = [f"{name}.stride(0)" for name in strided]
    return [*tensors, *spec.results, *strides, "x.shape[0]", f"num_warps={launched.warps}"]


def _allocations(spec: FmForward | FmBackward, launched: FmConfiguration) -> list[str]:
    sizes = spec.sizes
    n, d, r, c = sizes.embeddings, sizes.dim, sizes.rank, sizes.made
    programs = f"operators.programs(x, rows=1, per_multiprocessor={launched.programs})"
    if isinstance(spec, FmForward):
        made = [f"compressed = x.new_empty((x.shape[0], {c}, {d}))"] if c else []
        return [f"programs = {programs}", f"products = x.new_empty((x.shape[0], {n}, {r}))", *made]
    lines = [f"{name} = operators.whole_samples({name})" for name in _strided(spec)]
    lines += [
        f"programs = {programs} if x.dtype.itemsize == 2 else 1",
        f"dx = x.new_empty((x.shape[0], {n}, {d}){', dtype=passed.dtype' if spec.passed else ''})",
        f"drank = x.new_empty((programs, {n * r}), dtype=torch.float32)",
    ]
    return lines + ([f"dcompress = x.new_empty((programs, {c * n}), dtype=torch.float32)"] if c else [])


def _masks(spec: FmForward | FmBackward, launched: FmConfiguration) -> dict[str, object]:
    """What the loads and stores of each operand take where a side is padded, and which sides are."""
    sizes = spec.sizes
    sides = {"n": sizes.embeddings, "r": sizes.rank, "c": sizes.made, "d": sizes.dim}
    whole = {name: padded(max(side, 1)) == side for name, side in sides.items()}
    whole["d"] = sizes.dim % launched.chunk == 0

    def inside(row: str, column: str) -> str:
        tests = []
        if not whole[row]:
            tests.append(f"{row}_in[:, None]")
        if not whole[column]:
            tests.append(f"{column}_in[None, :]")
        return " & ".join(tests)

    def load(row: str, column: str) -> str:
        mask = inside(row, column)
        return f", mask={mask}, other=0.0" if mask else ""

    def store(row: str, column: str) -> str:
        mask = inside(row, column)
        return f", mask={mask}" if mask else ""

    masked = {name: not there for name, there in whole.items()}
    shared = {"masked": masked, "x_mask": load("n", "d"), "compress_mask": load("c", "n")}
    if isinstance(spec, FmForward):
        return {
            **shared,
            "rank_t_mask": load("r", "n"),
            "products_mask": store("n", "r"),
            "compressed_mask": store("c", "d"),
        }
    return {
        **shared,
        "rank_mask": load("n", "r"),
        "products_mask": load("n", "r"),
        "compressed_mask": load("c", "d"),
        "x_store_mask": store("n", "d"),
        "rank_store_mask": store("n", "r"),
        "compress_store_mask": store("c", "n"),
    }
