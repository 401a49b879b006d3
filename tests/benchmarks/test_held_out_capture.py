"""Captured operands against the gradients of the rankers, and sites that cannot be captured."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.held_out.held_out_capture import capture
from loka import zoo
from loka.errors import InputError
from loka.graph.sites.discover import find_sites
from loka.graph.sites.site import Site
from loka.model.build_model import BuiltModel
from loka.numerics.enums import Gemm

B, C, K, N = 5, 3, 4, 2


class One(nn.Module):
    """One product with the Parameter `p` of (rows, columns), written as `product(x, p)`."""

    def __init__(self, shape: tuple[int, int], product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape))
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.p)


def sites_of(model: nn.Module, *inputs: Tensor) -> tuple[Site, ...]:
    return find_sites(BuiltModel(model, inputs, {}, inputs[0].shape[0])).sites


def weighed(out: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradient with respect to the output is the target."""
    return (out * target).sum()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["movietweetings_ranker", "movietweetings_dlrm"])
def test_every_site_of_the_rankers_is_captured_and_nothing_changes(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = getattr(zoo, name)(), zoo.movietweetings_inputs(8)
    sites = sites_of(model, *inputs)
    target = torch.ones(8)
    zoo.click_loss(model(*inputs), target).backward()
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    gradients = {n: p.grad for n, p in model.named_parameters()}
    values = {n: None if grad is None else grad.clone() for n, grad in gradients.items()}
    found = capture(model, sites, inputs, target, zoo.click_loss)
    called = [site for site in sites if site.blocked is None and site.calls]
    assert list(found) == [site.name for site in called]
    parameters = dict(model.named_parameters())
    for site in called:
        (operands,) = found[site.name]
        a, b = operands.of(Gemm.WGRAD)
        gradient, made = parameters[site.weight or ""].grad, a @ b.t()
        assert gradient is not None
        torch.testing.assert_close(made if made.shape == gradient.shape else made.t(), gradient, atol=1e-6, rtol=1e-3)
    assert all(p.grad is gradients[n] and torch.equal(p, weights[n]) for n, p in parameters.items())
    assert all(grad is None or torch.equal(grad, values[n]) for n, grad in gradients.items())


def test_a_site_written_otherwise_is_refused() -> None:
    model, x = One((K, N), lambda x, p: torch.einsum("bk,kn->bn", x, p)), torch.randn(B, K)
    with pytest.raises(InputError, match="site 'p' was not seen"):
        capture(model, sites_of(model, x), (x,), torch.randn(B, N), weighed)


def test_an_output_that_the_loss_does_not_use_is_refused() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(K, N), nn.Linear(K, N)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            out: Tensor = self.used(x)
            return out

    model, x = Unused(), torch.randn(B, K)
    with pytest.raises(InputError, match="no gradient reached the output of site 'unused'"):
        capture(model, sites_of(model, x), (x,), torch.randn(B, N), weighed)
