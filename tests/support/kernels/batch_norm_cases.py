"""What the tests of BatchNorm's kernels share: specs, data, and a float64 oracle by torch's own batch_norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loka.kernels.fused.norm.norm_spec import NormBackward, NormForward
from tests.support.kernels.rendered_cases import exact_activation

EPS = 1e-5
ACTIVATIONS = (None, "relu", "silu", "gelu", "leaky_relu(0.2)")
SUMS = ("dweight", "dbias")
KINK = 1e-5  # of the largest term of its column: what z rounds by, in float32 and with x far from zero, and some more


def specs(width: int) -> list[NormForward | NormBackward]:
    """Every forward, backward, and kernel of sums: with and without a bias, quantized and not, with a dropout."""
    made: list[NormForward | NormBackward] = []
    for activation in ACTIVATIONS:
        for bias, dropout in ((True, 0.0), (False, 0.0), (True, 0.25)):
            what = (width, "batch_norm", True, bias, EPS, activation, True)
            for quantize in (True, False):
                made.append(NormForward(*what, quantize, dropout=dropout))
                made.append(NormBackward(*what, quantize, dropout=dropout))
            made.append(NormBackward(*what, sums_only=True, dropout=dropout))
    return made


@dataclass(frozen=True)
class Case:
    """Arguments of a spec's kernel by name, and its results in float64."""

    arguments: dict[str, Tensor]
    exact: dict[str, Tensor]  # y of a forward, dx, dweight and dbias of a backward
    terms: dict[str, Tensor]  # the largest term of a column of y and of dx, (width,): terms may cancel
    kinked: Tensor  # (rows, width): so near the kink of a ReLU that rounding decides its gradient
    unsure: dict[str, Tensor]  # (width,): what those could change of dweight and dbias

    def given(self, spec: NormForward | NormBackward) -> list[Tensor]:
        return [self.arguments[name] for name in spec.parameters]


def case_of(
    spec: NormForward | NormBackward, rows: int, dtype: torch.dtype, device: str = "cpu", evaluation: bool = False
) -> Case:
    """Columns differ in size and lie far from zero; in evaluation the statistics do not depend on x."""
    generator = torch.Generator().manual_seed(7919 * rows + spec.width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    columns = (torch.arange(spec.width) % 7 - 3.0).exp2()
    x = ((normal(rows, spec.width) + 30.0) * columns).to(device, dtype)
    grad = (normal(rows, spec.width) / columns).to(device, dtype)
    gamma, beta = (0.5 + normal(spec.width).abs()).to(device), normal(spec.width).to(device)
    leaves = [each.double().requires_grad_() for each in (x, gamma, beta)]
    exact_x, exact_gamma, exact_beta = leaves
    mean, var = exact_x.detach().mean(0), exact_x.detach().var(0, correction=0)
    running = (mean, var) if evaluation else (None, None)
    z = F.batch_norm(exact_x, *running, exact_gamma, exact_beta if spec.bias else None, not evaluation, 0.0, EPS)
    mask = (torch.rand(rows, spec.width, generator=generator) > spec.dropout).to(device, torch.uint8)
    kept = mask.double() / (1.0 - spec.dropout) if spec.dropout else torch.ones_like(mask, dtype=torch.float64)
    y = exact_activation(spec.activation, z) * kept
    dx, dgamma, dbeta = torch.autograd.grad(y, leaves, grad.double(), allow_unused=True, retain_graph=True)
    (dz,) = torch.autograd.grad(y, z, grad.double())
    rstd = (var + EPS).rsqrt()
    scale = rstd * gamma.double()
    dbias, dweight = dz.sum(0), dgamma / rstd  # of n = x - mean
    means = (scale * dbias / rows, scale * rstd * rstd * dweight / rows)
    means = tuple(map(torch.zeros_like, means)) if evaluation else means
    arguments = {"x": x, "grad": grad, "add": -mean, "weight": scale, "bias": beta}
    arguments |= dict(zip(("mean_dn", "mean_dn_n"), means, strict=True))
    taken = {name: each if name in ("x", "grad") else each.float() for name, each in arguments.items()}
    taken["mask"] = mask
    assert dbeta is None or torch.allclose(dbeta, dbias)
    n = ((exact_x.detach() - mean) * scale).abs().amax(0)
    terms = {"y": n + beta.double().abs() if spec.bias else n, "dx": (grad.double() * scale).abs().amax(0)}
    kinked = (z.detach().abs() <= KINK * terms["y"]) & (spec.activation in ("relu", "leaky_relu(0.2)"))
    of_z = (grad.double() * kinked).abs() * kept
    unsure = {"dweight": (of_z * (exact_x.detach() - mean).abs()).sum(0), "dbias": of_z.sum(0)}
    return Case(taken, {"y": y.detach(), "dx": dx, "dweight": dweight, "dbias": dbias}, terms, kinked, unsure)


def check(spec: NormForward | NormBackward, got: dict[str, Tensor], case: Case, noise: float) -> None:
    """Results within `noise` of their column's largest term, and of rounding to what they are written as."""
    exact = case.exact
    if isinstance(spec, NormBackward) and spec.sums_only:
        for name in SUMS:
            size = exact[name].abs().max()
            far = (got[name].double().sum(0) - exact[name]).abs() > noise * size + case.unsure[name]
            assert not far.any(), (spec, name)
        return
    forward = isinstance(spec, NormForward)
    what = "y" if forward else "dx"
    wanted, allowed = exact[what], noise * case.terms[what]
    if spec.quantize:
        value = got["values"].double() * got["scale"].double()
        allowed = allowed + 2.0**-4 * wanted.abs() + 2.0**-9 * got["scale"].double()
    else:
        value = got["out" if forward else "dx"].double()
        allowed = allowed + torch.finfo(got[spec.results[0]].dtype).eps * wanted.abs()
    far = (value - wanted).abs() > allowed
    if not forward:
        far &= ~case.kinked
    assert not far.any(), (spec, int(far.sum()))
