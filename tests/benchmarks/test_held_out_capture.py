"""Captured operands against those written down by hand, in every way that a site's Parameter can stand in a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.held_out.held_out_capture import CapturedOperands, capture
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


def captured(model: nn.Module, x: Tensor, dy: Tensor) -> CapturedOperands:
    (site,) = sites_of(model, x)
    (operands,) = capture(model, (site,), (x,), dy, weighed)[site.name]
    assert (operands.input.shape[1], operands.weight.shape[0]) == (site.k, site.n)
    assert operands.input.shape[0] == operands.grad_output.shape[0] == site.rows.at(x.shape[0])
    return operands


@pytest.mark.parametrize(
    ("shape", "product"),
    [
        ((K, N), lambda x, p: x @ p),
        ((K, N), torch.matmul),
        ((N, K), lambda x, p: x @ p.t()),
        ((N, K), F.linear),
        ((N, K), lambda x, p: torch.matmul(x, p.T)),
    ],
)
def test_a_parameter_behind(shape: tuple[int, int], product: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x, dy = One(shape, product), torch.randn(B, C, K), torch.randn(B, C, N)
    found = captured(model, x, dy)
    weight = model.p if shape == (N, K) else model.p.t()
    assert torch.equal(found.input, x.reshape(B * C, K))
    assert torch.equal(found.weight, weight.detach())
    assert torch.equal(found.grad_output, dy.reshape(B * C, N))


@pytest.mark.parametrize("batched", [True, False])
def test_a_parameter_in_front_is_read_from_the_other_side(batched: bool) -> None:
    torch.manual_seed(0)
    lead = (B,) if batched else ()
    model, x, dy = One((N, K), lambda x, p: p @ x), torch.randn(*lead, K, C), torch.randn(*lead, N, C)
    site = Site(
        name="p", kind="matmul", owner="", weight="p", bias=None, rows=None, k=K, n=N, calls=1, calls_eval=1,
        share=1.0, input_grad=False, fed_by=(), followed_by=(), where="",
    )  # type: ignore[arg-type]  # fmt: skip
    (found,) = capture(model, (site,), (x,), dy, weighed)["p"]
    whole_x, whole_dy = (x, dy) if batched else (x[None], dy[None])
    rows = [(whole_x[i, :, c], whole_dy[i, :, c]) for i in range(whole_x.shape[0]) for c in range(C)]
    assert torch.equal(found.input, torch.stack([row for row, _ in rows]))
    assert torch.equal(found.grad_output, torch.stack([row for _, row in rows]))
    assert torch.equal(found.weight, model.p.detach())


def test_an_nn_linear_and_its_three_products_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, 6), nn.ReLU(), nn.Linear(6, N))
    x, dy = torch.randn(B, K, requires_grad=True), torch.randn(B, N)
    found = capture(model, sites_of(model, x), (x,), dy, weighed)
    x.grad = None
    weighed(model(x), dy).backward()
    (first,), (last,) = found["0"], found["2"]
    assert torch.equal(last.input, F.relu(model[0](x)).detach())
    assert torch.equal(last.grad_output, dy)

    def product(operands: CapturedOperands, gemm: Gemm) -> Tensor:
        a, b = operands.of(gemm)
        return a @ b.t()

    torch.testing.assert_close(product(last, Gemm.FPROP) + model[2].bias, model(x))
    torch.testing.assert_close(product(last, Gemm.WGRAD), model[2].weight.grad)
    torch.testing.assert_close(product(first, Gemm.WGRAD), model[0].weight.grad)
    torch.testing.assert_close(product(first, Gemm.DGRAD), x.grad)


def test_a_linear_called_twice_has_two_calls_each_with_its_own_gradient() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(K, K, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x))

    torch.manual_seed(0)
    model, x, dy = Twice(), torch.randn(B, K), torch.randn(B, K)
    first, second = capture(model, sites_of(model, x), (x,), dy, weighed)["linear"]
    assert torch.equal(first.input, x)
    torch.testing.assert_close(second.input, x @ model.linear.weight.detach().t())
    assert torch.equal(second.grad_output, dy)
    torch.testing.assert_close(first.grad_output, dy @ model.linear.weight.detach())


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
