"""Launch configurations and template values of FM interactions."""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.interaction.fm_spec import FmBackward, FmForward, padded
from loka.kernels.fused.kernel_values import KernelValues


@dataclass(frozen=True, slots=True)
class FmConfiguration:
    """Launch configuration."""

    chunk: int  # columns of a sample per step of the backward, a power of two
    stages: int  # samples being loaded into shared memory
    warps: int  # of a program
    programs: int  # per multiprocessor, at most


def fm_configuration(spec: FmForward | FmBackward, device: DeviceSpec = DEFAULT) -> FmConfiguration:
    """The launch configuration for a spec."""
    launch = device.launches.fm_interaction
    n, d = padded(spec.sizes.embeddings), padded(spec.sizes.dim)
    if isinstance(spec, FmForward):
        return FmConfiguration(d, 3 if n * d <= launch.fetched else 2, *launch.forward)
    return FmConfiguration(min(d, launch.chunk), 3, *(launch.backward_few if n <= launch.few else launch.backward))


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
