"""What the tests of the cross layers' kernel share: specs, inputs, and a float64 oracle by autograd."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from loka.kernels.fused.cross.cross_kernel import CrossBackward

FLAGS = list(itertools.product((True, False), repeat=3))  # bias, itself, passed
SPECS = [
    *(CrossBackward(96, *flags) for flags in FLAGS),
    *(CrossBackward(width, True, False, True) for width in (1, 13, 512, 600, 1100)),
]
LARGE = CrossBackward(3456, True, False, True)


def inputs_of(spec: CrossBackward, rows: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """All that a cross layer reads, and the gradients of what it gives."""
    generator = torch.Generator().manual_seed(rows + spec.width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    matrices = {name: normal(rows, spec.width) for name in ("grad", "product", "factor", "residual", "passed")}
    return {**matrices, "bias": normal(spec.width)}


def exact(spec: CrossBackward, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients in float64; that of the bias is summed over the rows."""
    leaves = {name: inputs[name].double().requires_grad_() for name in ("product", "factor", "bias")}
    product = leaves["product"] + leaves["bias"] if spec.bias else leaves["product"]
    residual = leaves["factor"] if spec.itself else inputs["residual"].double()
    outputs, gradients = [leaves["factor"] * product + residual], [inputs["grad"].double()]
    if spec.passed:
        outputs, gradients = [*outputs, leaves["factor"] * 1.0], [*gradients, inputs["passed"].double()]
    wanted = [name for name in ("product", "factor", "bias") if f"d{name}" in spec.results]
    found = torch.autograd.grad(outputs, [leaves[name] for name in wanted], gradients)
    return {f"d{name}": gradient for name, gradient in zip(wanted, found, strict=True)}


def check(spec: CrossBackward, got: dict[str, Tensor], inputs: dict[str, Tensor], limit: float) -> None:
    """That results are near the oracle's; NaN, from memory that was never written, is near nothing."""
    expected = exact(spec, inputs)
    assert list(got) == list(spec.results)
    for name, result in got.items():
        found = result.double().sum(0) if name == "dbias" else result.double()
        error = (found - expected[name]).norm() / expected[name].norm().clamp(min=1e-30)
        assert error < limit, (spec, name, float(error))
