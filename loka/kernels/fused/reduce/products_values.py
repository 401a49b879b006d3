"""Launch and template values of `Products`."""

from __future__ import annotations

from dataclasses import dataclass

from loka.devices.spec import DeviceSpec
from loka.devices.targets import DEFAULT
from loka.kernels.fused.cast_transpose.matrix_spec import Products
from loka.kernels.fused.kernel_values import KernelValues
from loka.kernels.fused.norm.norm_launch import padded_width


@dataclass(frozen=True, slots=True)
class ProductsLaunch:
    """Launch configuration: one program per block of columns of a row."""

    columns: int  # of a block, a power of two
    warps: int  # of a program


def products_values(spec: Products, device: DeviceSpec = DEFAULT) -> KernelValues:
    """Template values of sums of products."""
    columns = min(padded_width(spec.width), device.launches.products_columns)
    vectors = [name for name in spec.parameters if name.startswith("add_")]
    matrices = [name for name in spec.parameters if name not in vectors]
    title = "Products and sums" if spec.plain else "Products"
    shapes = dict.fromkeys(matrices, f"(M, {spec.width})") | dict.fromkeys(vectors, f"({spec.width},)")
    return KernelValues(
        family="reduce/products",
        spec=spec,
        launch=ProductsLaunch(columns, max(1, columns // 256)),
        title=title if spec.adds else "Sum of matrices",
        shapes=shapes | {"out": f"(M, {spec.width}) of dtype"},
        numbers={"matrices": matrices, "blocks": -(-spec.width // columns)},
    )
