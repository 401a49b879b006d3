"""A bound linear is the linear that it replaces, within the error of its recipe: e4m3 rowwise, all three GEMMs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

E4M3_ROWWISE_SQNR_DB = 28.0  # both operands rounded to four significant bits: about 31 dB on normal data


def sqnr_db(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Signal to quantization noise."""
    noise = (value.double() - reference.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / noise).detach())


def bound(features=(48, 32), dtype=torch.float32):
    """A bound linear and its float64 original."""
    torch.manual_seed(1)
    linear = nn.Linear(*features, dtype=dtype)
    reference = nn.Linear(*features, dtype=torch.float64)
    reference.load_state_dict(linear.state_dict())
    patch = sample.apply(linear, (sample.linears("", shape=features[::-1]),))
    return linear, reference, patch


def gradients(linear, x, dy):
    """Output, and gradients for x, weight and bias."""
    x = x.detach().requires_grad_()
    y = linear(x)
    y.backward(dy)
    return y, x.grad, linear.weight.grad, linear.bias.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_output_and_every_gradient_against_float64(rows, dtype):
    linear, reference, patch = bound(dtype=dtype)
    x, dy = torch.randn(rows, 48, dtype=dtype), torch.randn(rows, 32, dtype=dtype)
    got = gradients(linear, x, dy)
    expected = gradients(reference, x.double(), dy.double())
    for value, exact in zip(got, expected, strict=True):
        assert value.dtype == dtype
        assert value.shape == exact.shape
        assert sqnr_db(value, exact) > E4M3_ROWWISE_SQNR_DB
    patch.verify()


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.reshape(4, 4, 48),
        lambda x: x.reshape(2, 2, 4, 48),
        lambda x: x.t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, ::2],
        lambda x: x.reshape(4, 4, 48).transpose(0, 1),
        lambda x: x[0],
    ],
    ids=["3-D", "4-D", "transposed", "strided", "3-D transposed", "1-D"],
)
def test_shapes_and_strides(view):
    linear, reference, _ = bound()
    x = view(torch.randn(16, 48))
    dy = torch.randn(*x.shape[:-1], 32)
    for value, exact in zip(gradients(linear, x, dy), gradients(reference, x.double(), dy.double()), strict=True):
        assert value.shape == exact.shape
        assert sqnr_db(value, exact) > E4M3_ROWWISE_SQNR_DB


@pytest.mark.parametrize("shape", [(0, 48), (3, 0, 48)])
def test_empty_batch(shape):
    linear, _, _ = bound()
    y, dx, dw, db = gradients(linear, torch.randn(shape), torch.randn(*shape[:-1], 32))
    assert y.shape == (*shape[:-1], 32)
    assert dx.shape == shape
    assert not dw.any()
    assert not db.any()


def test_zero_rows_give_the_bias():
    linear, _, _ = bound()
    x = torch.randn(4, 48)
    x[1] = 0
    y, dx, dw, _ = gradients(linear, x, torch.zeros(4, 32))
    assert torch.equal(y[1], linear.bias)
    assert not dx.any()
    assert not dw.any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_bad_row_poisons_its_own_row_only(poison):
    linear, reference, _ = bound()
    x = torch.randn(4, 48)
    x[2, 5] = poison
    y, exact = linear(x), reference(x.double())
    assert not y[2].isfinite().any()
    keep = torch.tensor([0, 1, 3])
    assert sqnr_db(y[keep], exact[keep]) > E4M3_ROWWISE_SQNR_DB


def test_a_shared_module_sums_the_gradients_of_its_calls():
    model, exact = models.Shared(), models.Shared().double()
    patch = sample.apply(model, (sample.linears("one"),))
    models.step(model)
    torch.manual_seed(0)
    exact(torch.randn(8, 32).double()).square().sum().backward()
    assert sqnr_db(model.one.weight.grad, exact.one.weight.grad) > 22  # three layers of error
    patch.verify()


def test_writing_weight_data_takes_effect():
    linear, _, _ = bound()
    x = torch.randn(4, 48)
    before = linear(x)
    linear.weight.data.mul_(2)
    after = linear(x)
    torch.testing.assert_close(after - linear.bias, 2 * (before - linear.bias))


def test_an_owner_with_an_inlined_child_and_a_parameter():
    model, exact = models.Blocks(), models.Blocks().double()
    patch = sample.apply(model, (sample.blocks("layers.0", "layers.1"),))
    dx = models.step(model, rows=16)
    torch.manual_seed(0)
    x = torch.randn(16, 32).double().requires_grad_()
    exact(x).square().sum().backward()
    assert sqnr_db(dx, x.grad) > 20
    for (name, parameter), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert sqnr_db(parameter.grad, reference.grad) > 20, name
    patch.verify()


def test_an_optimiser_trains_the_bound_model_as_the_plain_one():
    torch.manual_seed(3)
    x = torch.randn(256, 32)
    target = torch.tanh(x[:, :1] - x[:, 1:2])
    losses = {}
    for kind in ("plain", "bound"):
        model = models.mlp()
        if kind == "bound":
            sample.apply(model)
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(60):
            loss = (model(x) - target).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        losses[kind] = float(loss.detach())
    assert losses["bound"] < 0.05
    assert abs(losses["bound"] - losses["plain"]) < 0.02
