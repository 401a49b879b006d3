"""Launch configurations and template values of FM interactions."""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.errors import InputError
from loka.kernels.fused.interaction.fm_spec import SMALLEST_SIDE, FmBackward, FmForward, padded
from loka.kernels.fused.kernel_values import KernelValues


@dataclass(frozen=True, slots=True)
class FmConfiguration:
    """Launch configuration."""

    chunk: int  # columns of a sample per step of the backward, a power of two
    stages: int  # steps being loaded into shared memory
    stages_wide: int  # the same where `passed` is float32, as it is under autocast
    warps: int  # of a program
    programs: int  # per multiprocessor, at most


def fm_configuration(spec: FmForward | FmBackward, device: DeviceSpec = DEFAULT) -> FmConfiguration:
    """The launch configuration for a spec: as many stages as were measured to be fast and shared memory holds.

    Raises InputError if the device's shared memory holds no step of it.
    """
    launch = device.launches.fm_interaction
    n, d = padded(spec.sizes.embeddings), padded(spec.sizes.dim)
    if isinstance(spec, FmForward):
        stages = _stages(spec, d, 3 if n * d <= launch.fetched else 2, device)
        return FmConfiguration(d, stages, stages, *launch.forward)
    chunk = min(d, launch.chunk)
    while chunk > SMALLEST_SIDE and shared_bytes(spec, chunk, 1, wide=True) > device.shared_bytes:
        chunk //= 2
    stages, stages_wide = (_stages(spec, chunk, launch.stages, device, wide) for wide in (False, True))
    return FmConfiguration(chunk, stages, stages_wide, *(launch.backward_few if n <= launch.few else launch.backward))


def shared_bytes(spec: FmForward | FmBackward, chunk: int, stages: int, wide: bool = False) -> int:
    """Upper bound of a kernel's shared memory, bytes: what is being loaded, both matrices, and small products."""
    sizes = spec.sizes
    n, r = padded(sizes.embeddings), padded(sizes.rank)
    c = padded(sizes.made) if sizes.made else 0
    loaded = n * chunk
    if isinstance(spec, FmBackward):
        loaded += n * r + c * chunk + (n * chunk * (2 if wide else 1) if spec.passed else 0)
    products = r * chunk * (1 if isinstance(spec, FmForward) else 2)
    return 2 * (stages * loaded + n * (r + c) + products)


def _stages(spec: FmForward | FmBackward, chunk: int, most: int, device: DeviceSpec, wide: bool = False) -> int:
    for stages in range(most, 0, -1):
        if shared_bytes(spec, chunk, stages, wide) <= device.shared_bytes:
            return stages
    raise InputError(
        f"no kernel computes the FM interaction {spec.sizes.name} on {device.name}: it takes "
        f"{shared_bytes(spec, chunk, 1, wide)} bytes of shared memory, and a block can have {device.shared_bytes}"
    )


def fm_values(spec: FmForward | FmBackward, launch: FmConfiguration) -> KernelValues:
    """Template values of either kernel: the padded size of each side, and the sides that need masks."""
    sizes = spec.sizes
    sides = {"n": sizes.embeddings, "d": sizes.dim, "r": sizes.rank, "c": max(sizes.made, 1)}
    room = {name: padded(size) for name, size in sides.items()}
    pads = {name for name in sides if room[name] != sides[name]} - {"d"}
    if sizes.dim % launch.chunk:
        pads.add("d")
    forward = isinstance(spec, FmForward)
    return KernelValues(
        family=f"interaction/fm_{'forward' if forward else 'backward'}",
        spec=spec,
        launch=launch,
        title=_title(spec),
        shapes=_shapes(spec),
        numbers={
            **{f"{name}_room": size for name, size in room.items()},
            "padded": pads,
            "chunks": -(-sizes.dim // launch.chunk),
            "reference": ("fm" if sizes.made else "fm_products") + ("_backward" if not forward else "_forward"),
        },
    )


def _title(spec: FmForward | FmBackward) -> str:
    sizes = spec.sizes
    products = f"pairwise products at rank {sizes.rank}"
    what = f"{products} and {sizes.made} weighted sums" if sizes.made else products
    return what[0].upper() + what[1:] if isinstance(spec, FmForward) else f"Gradients of {what}"


def _shapes(spec: FmForward | FmBackward) -> dict[str, str]:
    n, d, r, c = spec.sizes.embeddings, spec.sizes.dim, spec.sizes.rank, spec.sizes.made
    shapes = dict.fromkeys(("x", "passed", "dx"), f"(B, {n}, {d})")
    shapes |= dict.fromkeys(("products", "dproducts"), f"(B, {n}, {r})")
    shapes |= dict.fromkeys(("compressed", "dcompressed"), f"(B, {c}, {d})")
    shapes |= {"rank": f"({n}, {r})", "compress": f"({c}, {n})"}
    return shapes | {"drank": f"(P, {n} * {r})", "dcompress": f"(P, {c} * {n})"}
