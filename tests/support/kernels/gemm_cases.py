"""What the tests of rendered products share: specs, packages of them, operands, and a float64 oracle."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.devices.launches import Tiling
from loka.kernels.fused.rendering import render, render_files
from loka.kernels.fused.triton_gemm.gemm_spec import Epilogue, GemmSpec, GroupedGemm, TiledGemm
from loka.numerics.enums import Accumulation, Format, Scaling
from loka.numerics.quantize import quantize
from loka.templating.templates import load_templates
from tests.support.importing import import_folder
from tests.support.kernels.rendered_cases import Package

FAST, PRECISE = Accumulation.FAST, Accumulation.PRECISE
ADDED = Epilogue(add=True)
NORM = Epilogue(add=True, norm="layer_norm", weight=True, bias=True, activation="sigmoid", keep=True)
ROWS = Epilogue(norm="layer_norm", weight=True, bias=True, activation="silu", out="e4m3")
EPILOGUES = [
    ADDED,
    Epilogue(add=True, activation="relu", keep=True),
    Epilogue(activation="gelu", out="float16"),
    Epilogue(add=True, out="float32"),
    NORM,
    ROWS,
    Epilogue(norm="rms_norm", weight=True, activation="hardswish", out="float32", keep=True),
    Epilogue(norm="rms_norm", eps=1e-6, activation="sigmoid", out="e4m3", keep=True),
    Epilogue(add=True, out="e4m3"),
]


def blocked(block: int, out: str = "bfloat16") -> Epilogue:
    """A block_norm with a weight, Hard Swish, and what a backward needs."""
    return Epilogue(norm="block_norm", weight=True, block=block, activation="hardswish", out=out, keep=True)


def write_products(folder: Path, specs: Sequence[GemmSpec], tiling: Tiling | None = None) -> Package:
    """Render `specs` into a package in `folder`, whose last part names it, and import that."""
    templates = load_templates()
    kernels = [render(spec, templates, launched=tiling) for spec in specs]
    folder.mkdir(parents=True)
    for name, text in {**render_files(kernels, templates, "a test"), "__init__.py": ""}.items():
        (folder / name).write_text(text)
    import_folder(folder)
    fused = importlib.import_module(f"{folder.name}.fused")
    return Package(fused, {kernel.function: kernel for kernel in kernels})


@dataclass(frozen=True)
class Operand:
    """A matrix as a kernel takes it, with its scale where it is e4m3, and its values in float64."""

    values: Tensor
    scale: Tensor | None
    exact: Tensor

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Values, and scale where there is one."""
        return (self.values,) if self.scale is None else (self.values, self.scale)


@dataclass(frozen=True)
class Case:
    """The arguments of one call, and what it should give in float64 before the epilogue, by result of a group."""

    arguments: tuple[Tensor, ...]
    products: tuple[Tensor, ...]
    sizes: tuple[Tensor, ...]  # sums of absolute products, which rounding is small beside
    vectors: dict[str, Tensor]


def operand(
    rows: int,
    columns: int,
    operands: str,
    scaling: Scaling = Scaling.ROWWISE,
    device: str = "cpu",
    heavy: bool = False,
    seed: int = 0,
) -> Operand:
    """A random matrix whose rows differ in size; `heavy` ones have far outliers, and a row of zeros."""
    generator = torch.Generator().manual_seed(seed + 7919 * rows + columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-1, 1, rows)[:, None]
    if heavy:
        x = x / torch.randn(rows, columns, generator=generator).abs().sqrt().clamp(min=1e-3)
        x[rows // 2] = 0.0
    if operands != "e4m3":
        values = x.to(torch.bfloat16).to(device)
        return Operand(values, None, values.double())
    made = quantize(x, format=Format.E4M3, scaling=scaling, power_of_two=True)
    values, scale = made.values.to(device), made.scale.to(device)
    return Operand(values, scale, values.double() * scale.double())


def case(spec: GemmSpec, m: int, device: str = "cpu", heavy: bool = False, seed: int = 0) -> Case:
    """Arguments of a spec for M rows."""
    match spec:
        case TiledGemm():
            a = operand(m, spec.k, spec.operands, spec.scaling_a, device, heavy, seed)
            b = operand(spec.n, spec.k, spec.operands, spec.scaling_b, device, heavy, seed + 1)
            generator = torch.Generator().manual_seed(seed)
            vectors = {
                name: (0.5 + torch.randn(spec.n, generator=generator)).to(device)
                for name in ("add", "weight", "bias")
                if getattr(spec.epilogue, name)
            }
            arguments = (*a.arguments, *b.arguments, *vectors.values())
            return Case(arguments, (a.exact @ b.exact.T,), (a.exact.abs() @ b.exact.abs().T,), vectors)
        case GroupedGemm():
            arguments, products, sizes = [], [], []
            for index, (n, k) in enumerate(spec.shapes):
                a = operand(m + 5 * index, k, spec.operands, Scaling.ROWWISE, device, heavy, seed + 2 * index)
                b = operand(n, k, spec.operands, Scaling.ROWWISE, device, heavy, seed + 2 * index + 1)
                arguments += [*a.arguments, *b.arguments]
                products.append(a.exact @ b.exact.T)
                sizes.append(a.exact.abs() @ b.exact.abs().T)
            return Case(tuple(arguments), tuple(products), tuple(sizes), {})


def exact_epilogue(epilogue: Epilogue, product: Tensor, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The result y and the statistics of the norm in float64, by torch's own functions."""
    n = product.shape[1]
    add, weight, bias = (vectors[name].double() if name in vectors else None for name in ("add", "weight", "bias"))
    y = product if add is None else product + add
    results: dict[str, Tensor] = {}
    if epilogue.norm == "layer_norm":
        results["mean"] = y.mean(1)
        results["rstd"] = ((y - y.mean(1, keepdim=True)).square().mean(1) + epilogue.eps).rsqrt()
        y = F.layer_norm(y, (n,), weight, bias, epilogue.eps)
    elif epilogue.norm is not None:
        width = n if epilogue.norm == "rms_norm" else epilogue.block
        blocks = y.reshape(y.shape[0], n // width, width)
        rstd = (blocks.square().mean(2) + epilogue.eps).rsqrt()
        results["rstd"] = rstd[:, 0] if epilogue.norm == "rms_norm" else rstd
        y = (blocks * rstd[:, :, None]).reshape(product.shape)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    functions = {
        "relu": F.relu, "silu": F.silu, "sigmoid": torch.sigmoid, "hardswish": F.hardswish, "gelu": F.gelu
    }  # fmt: skip
    results["y"] = functions[epilogue.activation](y) if epilogue.activation else y
    return results
