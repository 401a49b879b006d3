"""What the tests of interactions' kernels share: sizes, inputs, and float64 oracles by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.fused.interaction.concat_norm import ConcatNormBackward, ConcatNormForward
from loka.kernels.fused.interaction.dot import DotSpec
from loka.kernels.fused.interaction.fm import FmBackward, FmForward, FmSizes

SIZES = [
    FmSizes(16, 16, 16, 16),
    FmSizes(20, 48, 6, 10),
    FmSizes(20, 40, 6, 0),
    FmSizes(64, 128, 32, 32),
    FmSizes(27, 200, 16, 13),
    FmSizes(128, 136, 64, 64),
]
LARGE = FmSizes(128, 256, 64, 64)
LARGEST = [LARGE, FmSizes(128, 256, 128, 100), FmSizes(256, 128, 64, 64), FmSizes(256, 100, 128, 0)]  # of their kinds
DOTS = [(27, 128), (16, 16), (9, 64), (40, 100), (1, 5), (128, 128), (101, 24), (16, 1000)]  # embeddings, dimension
# width, parts, residual, norm, weight, bias
CONCAT_NORMS = [
    (16, (3, 5), True, "layer_norm", True, True),
    (128, (32, 32), True, "layer_norm", True, True),
    (100, (1, 7, 2), False, "layer_norm", True, False),
    (100, (9,), True, "rms_norm", True, False),
    (24, (2, 3, 4, 5), True, "rms_norm", False, False),
    (600, (4,), True, "layer_norm", False, False),
    (5000, (1, 1), True, "layer_norm", True, True),
]
ConcatNorm = tuple[int, tuple[int, ...], bool, str, bool, bool]


def fm_inputs(sizes: FmSizes, samples: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """x, rank, compress and the gradients of both results and of what passes, in `dtype`."""
    generator = torch.Generator().manual_seed(samples + sizes.embeddings)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    n, d, r, c = sizes.embeddings, sizes.dim, sizes.rank, sizes.made
    return {
        "x": normal(samples, n, d),
        "rank": normal(n, r) / n**0.5,
        "compress": normal(c, n) / n**0.5,
        "dproducts": normal(samples, n, r) / d**0.5,
        "dcompressed": normal(samples, c, d),
        "passed": normal(samples, n, d),
    }


def exact_fm(sizes: FmSizes, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of forward and backward in float64, by torch's own functions and autograd."""
    leaves = {name: inputs[name].double().requires_grad_() for name in ("x", "rank", "compress")}
    x = leaves["x"]
    products = torch.matmul(x, torch.matmul(x.transpose(1, 2), leaves["rank"]))
    compressed = torch.matmul(leaves["compress"], x)
    outputs, names = [products], ["dproducts"]
    if passes(sizes):
        outputs, names = [*outputs, x * 1.0], [*names, "passed"]
    if sizes.made:
        outputs, names = [*outputs, compressed], [*names, "dcompressed"]
    wanted = ["x", "rank", *(["compress"] if sizes.made else [])]
    gradients = torch.autograd.grad(outputs, [leaves[n] for n in wanted], [inputs[name].double() for name in names])
    return {
        "products": products.detach(),
        "compressed": compressed.detach(),
        **{f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)},
    }


def fm_specs(sizes: FmSizes) -> tuple[FmForward, FmBackward]:
    """Both directions."""
    return FmForward(sizes), FmBackward(sizes, passes(sizes))


def passes(sizes: FmSizes) -> bool:
    """Whether x is handed on, in some of the cases."""
    return sizes.rank != 16


def concat_norm_specs(case: ConcatNorm) -> tuple[ConcatNormForward, ConcatNormBackward]:
    """Both directions."""
    width, parts, residual, norm, weight, bias = case
    fields = (width, len(parts), residual, norm, weight, bias, 1e-5)
    return ConcatNormForward(*fields), ConcatNormBackward(*fields)


def concat_norm_inputs(case: ConcatNorm, samples: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """The parts, residual, weight, bias and the output's gradient, in `dtype`."""
    width, parts, *_ = case
    generator = torch.Generator().manual_seed(samples + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return {
        **{f"part_{index}": normal(samples, rows, width) for index, rows in enumerate(parts)},
        "residual": normal(samples, sum(parts), width),
        "weight": 0.5 + normal(width).abs(),
        "bias": normal(width),
        "grad": normal(samples, sum(parts), width),
    }


def exact_concat_norm(case: ConcatNorm, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of forward and backward in float64, by torch's own functions and autograd."""
    width, parts, residual, norm, weight, bias = case
    concatenated = torch.cat([inputs[f"part_{index}"].double() for index in range(len(parts))], 1)
    concatenated = (concatenated + inputs["residual"].double() if residual else concatenated).requires_grad_()
    leaves = {"x": concatenated}
    leaves |= {"weight": inputs["weight"].double().requires_grad_()} if weight else {}
    leaves |= {"bias": inputs["bias"].double().requires_grad_()} if bias else {}
    if norm == "layer_norm":
        out = F.layer_norm(concatenated, (width,), leaves.get("weight"), leaves.get("bias"), 1e-5)
    else:
        out = F.rms_norm(concatenated, (width,), leaves.get("weight"), 1e-5)
    gradients = torch.autograd.grad(out, list(leaves.values()), inputs["grad"].double())
    rows = concatenated.detach().reshape(-1, width)
    mean = rows.mean(1) if norm == "layer_norm" else torch.zeros(rows.shape[0], dtype=torch.float64, device=rows.device)
    rstd = torch.rsqrt((rows - mean[:, None]).square().mean(1) + 1e-5)
    return {
        "out": out.detach(),
        "mean": mean,
        "rstd": rstd,
        **{f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)},
    }


def dot_specs(sizes: tuple[int, int]) -> tuple[DotSpec, DotSpec]:
    """Both directions."""
    return DotSpec(*sizes), DotSpec(*sizes, backward=True)


def dot_inputs(sizes: tuple[int, int], samples: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """x and the gradient of the products, which is not symmetric, in `dtype`."""
    generator = torch.Generator().manual_seed(samples + sum(sizes))
    n, d = sizes
    x, grad = torch.randn(samples, n, d, generator=generator), torch.randn(samples, n, n, generator=generator)
    return {"x": x.to(device, dtype), "dproducts": grad.to(device, dtype)}


def exact_dot(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results of forward and backward in float64, by torch's own functions and autograd."""
    x = inputs["x"].double().requires_grad_()
    products = torch.matmul(x, x.transpose(1, 2))
    (dx,) = torch.autograd.grad(products, x, inputs["dproducts"].double())
    return {"products": products.detach(), "dx": dx}


def summed(name: str, result: Tensor, expected: Tensor) -> Tensor:
    """A result, or the sum of its parts in the shape of what it is compared with."""
    partial = name in ("drank", "dcompress", "dweight", "dbias")
    return result.sum(0).reshape(expected.shape) if partial else result
