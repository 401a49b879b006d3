"""What the tests of kernels with products and residuals share: specs, data, and a float64 oracle by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from loka.kernels.fused.matrix_kernels import Products
from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward, Spec
from tests.support.kernels.rendered_cases import exact_forward

# norm, weight, bias, activation, add, times, residual
PARTS = [
    (None, False, False, None, True, True, True),
    (None, False, False, None, True, False, True),
    (None, False, False, None, False, True, False),
    (None, False, False, "silu", True, True, True),
    ("layer_norm", True, True, "silu", True, False, True),
    ("layer_norm", True, True, None, True, True, True),
    ("rms_norm", True, False, None, False, False, True),
    ("layer_norm", True, True, "gate_sigmoid", True, True, True),
]
BLOCK_PARTS = [
    ("block_norm", False, False, "hardswish", True, True, True),
    ("block_norm", False, False, None, False, False, True),
    ("block_norm", False, False, "gate_hardsigmoid", True, True, True),
]
PRODUCTS = [(2, (True, True, False)), (0, (True,)), (0, (False, True)), (3, ()), (1, (False,))]


def parts_of(width: int) -> list[tuple[str | None, bool, bool, str | None, bool, bool, bool]]:
    """The parts that a kernel of that width can have."""
    return PARTS if width % 256 else PARTS + BLOCK_PARTS


def forwards(width: int) -> list[NormForward]:
    """Every forward of these parts: quantized and not, and with the sum kept where there is another result."""
    specs = []
    for norm, weight, bias, activation, add, times, residual in parts_of(width):
        for quantize in (True, False):
            for keep in (False, True) if quantize or norm or activation else (False,):
                affine = (width, norm, weight, bias, 1e-5, activation, add, quantize, True)
                specs.append(NormForward(*affine, times=times, residual=residual, keep=keep))
    return specs


def backwards(width: int) -> list[NormBackward]:
    """Every backward of these parts: with and without a gradient of the sum from elsewhere, and one that goes on."""
    specs = []
    for norm, weight, bias, activation, add, times, residual in PARTS:
        summed = bool(norm or activation) and (times or residual)
        for quantize, carried in ((True, True), (True, False), (False, True)):
            affine = (width, norm, weight, bias, 1e-5, activation, add, quantize)
            carry = residual and (quantize or times) and (carried or bool(norm or activation))
            specs.append(
                NormBackward(*affine, times=times, summed=summed, residual_grad_in=carried, residual_grad_out=carry)
            )
    return specs


def products(width: int) -> list[Products]:
    return [Products(width, plain, adds) for plain, adds in PRODUCTS]


def every(width: int) -> list[Spec]:
    return [*forwards(width), *backwards(width), *products(width)]


def inputs_of(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Arguments by name; rows differ in size."""
    generator = torch.Generator().manual_seed(7919 * rows + width)
    sizes = torch.logspace(-2, 2, max(rows, 1))[:rows, None]
    made = {
        name: torch.randn(rows, width, generator=generator)
        for name in ("x", "times", "residual", "grad", "residual_grad_in")
    }
    made["x"], made["grad"] = made["x"] * sizes.sqrt(), made["grad"] * sizes.flip(0)
    made |= {name: 0.5 + torch.randn(width, generator=generator).abs() for name in ("add", "weight", "bias")}
    return {name: tensor.to(device, dtype) for name, tensor in made.items()}


def exact(spec: NormForward | NormBackward, tensors: dict[str, Tensor], residual: bool) -> dict[str, Tensor]:
    """Results and gradients in float64 by autograd: y, kept, mean, rstd, dx, dsum, dweight, dbias, dadd."""
    leaves = {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}
    product = leaves["x"] + leaves["add"] if spec.add else leaves["x"]
    product = product * leaves["times"] if spec.times else product
    kept = product + leaves["residual"] if residual else product
    y = exact_forward(_bare(spec), {**leaves, "x": kept})
    carried = (
        leaves["residual_grad_in"]
        if isinstance(spec, NormBackward) and spec.residual_grad_in
        else torch.zeros_like(kept)
    )
    loss = (y * leaves["grad"].detach()).sum() + (kept * carried.detach()).sum()
    wanted = {
        "dx": leaves["x"],
        "residual_grad_out": kept,
        **{f"d{name}": leaves[name] for name in ("weight", "bias", "add")},
    }
    found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    gradients = {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}
    mean = kept.mean(1) if spec.norm == "layer_norm" else torch.zeros_like(kept[:, 0])
    rstd = ((kept - mean[:, None]).square().mean(1) + 1e-5).rsqrt()
    values = {"y": y, "kept": kept, "mean": mean, "rstd": rstd, **gradients}
    return {name: value.detach() for name, value in values.items()}


def _bare(spec: NormForward | NormBackward) -> NormForward:
    """The norm and activation alone."""
    affine = (spec.width, spec.norm, spec.weight, spec.bias, spec.eps, spec.activation)
    return NormForward(*affine, add=False, quantize=True, save=True, block=spec.block)


def arguments(spec: NormForward | NormBackward, tensors: dict[str, Tensor], known: dict[str, Tensor]) -> list[Tensor]:
    """An operator's tensor arguments, without those of its quantization; `known` holds what the forward found."""
    given = {**tensors, "mean": known["mean"].float(), "rstd": known["rstd"].float()}
    if isinstance(spec, NormBackward) and spec.summed:
        given["x"] = known["kept"].to(tensors["x"].dtype)
    return [given[name] for name in spec.parameters if name not in spec.how.parameters]


def exact_products(spec: Products, tensors: dict[str, Tensor]) -> Tensor:
    values = {name: tensor.double() for name, tensor in tensors.items()}
    total = sum((values[f"plain_{index}"] for index in range(spec.plain)), torch.zeros(()))
    for index, add in enumerate(spec.adds):
        factor = values[f"x_{index}"] + values[f"add_{index}"] if add else values[f"x_{index}"]
        total = total + values[f"grad_{index}"] * factor
    return total


def product_inputs(spec: Products, rows: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows + spec.width)
    shapes = {name: (spec.width,) if name.startswith("add") else (rows, spec.width) for name in spec.parameters}
    return {name: torch.randn(*shape, generator=generator).to(device, dtype) for name, shape in shapes.items()}
