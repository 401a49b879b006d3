"""What training loops do around a bound model: autocast, GradScaler, accumulation, checkpointing, moving averages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from generated import ranker as package
from loka import dispatch
from loka.zoo import ranker, ranker_inputs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]
ROWS = 32


@pytest.fixture(scope="module")
def original():
    """The ranker with its FP8 forwards, of which each test has a copy."""
    torch.manual_seed(0)
    model = ranker()
    package.apply(model)
    return model


@pytest.fixture
def bound(original):
    """A bound ranker, the same each time, and its patch."""
    model = copy.deepcopy(original)
    return model, dispatch.patch_of(model)


@pytest.fixture(scope="module")
def batch():
    return ranker_inputs(ROWS)


@pytest.fixture(scope="module")
def expected(original, batch):
    """The gradients of a step with nothing around the model but autocast to a dtype, or None."""
    found = {}
    for dtype in (None, torch.bfloat16):
        model = copy.deepcopy(original)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            y = model(*batch)
        loss(y).backward()
        found[dtype] = gradients(model)
    return found


def loss(y):
    return y.float().square().mean()


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_close(found, expected, error):
    """All gradients together differ by at most a relative error."""
    assert list(found) == list(expected)
    one, other = (torch.cat([grad.flatten() for grad in each.values()]) for each in (found, expected))
    assert (one - other).norm() <= error * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(bound, batch, expected, dtype):
    model, patch = bound
    with torch.autocast("cpu", dtype):
        y = model(*batch)
    loss(y).backward()
    patch.verify()
    assert y.dtype == dtype
    assert_close(gradients(model), expected[None], 0.2)


def test_a_gradient_scaler(bound, batch, expected):
    model, patch = bound
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cpu", torch.float16):
        y = model(*batch)
    scaler.scale(loss(y)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    assert_close(gradients(model), expected[None], 0.2)
    scaler.step(optimizer)
    scaler.update()
    patch.verify()
    assert scaler.get_scale() == 1024.0  # nothing overflowed, so no step was left out
    assert not torch.equal(model.state_dict()["head.mlp.0.weight"], before["head.mlp.0.weight"])


def test_accumulated_gradients(bound, batch, expected):
    model, patch = bound
    for part in range(2):
        half = [each[part * ROWS // 2 : (part + 1) * ROWS // 2] for each in batch]
        (loss(model(*half)) / 2).backward()
    patch.verify()
    assert_close(gradients(model), expected[None], 1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_activation_checkpointing(bound, batch, expected, reentrant, dtype):
    model, patch = bound
    dense = batch[0].clone().requires_grad_()  # a reentrant checkpoint needs an input that does
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        y = checkpoint(model, dense, *batch[1:], use_reentrant=reentrant)
    loss(y).backward()
    patch.verify()
    assert_close(gradients(model), expected[dtype], 1e-6)


def test_a_moving_average_of_a_bound_model(bound, batch):
    """It is bound itself; frozen for evaluation, it has to be a copy, as its buffers are others than the model's."""
    model, patch = bound
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loss(model(*batch)).backward()
    optimizer.step()
    for _ in range(2):
        average.update_parameters(model)
    with torch.no_grad():
        average.eval()(*batch)
    own = dispatch.patch_of(average)
    own.verify(backward=False)
    assert own.sites == patch.sites
    served = copy.deepcopy(average.module)
    dispatch.patch_of(served).remove()
    frozen = package.apply(served, mode="infer")
    with torch.no_grad():
        served(*batch)
    frozen.verify()
    average.update_parameters(model)


@pytest.mark.parametrize("weight", ["layers.0.fmb.3.weight", "head.mlp.0.weight", "layers.1.rank"])
def test_a_weight_changed_between_forward_and_backward_raises_as_in_torch(bound, weight):
    model, _ = bound
    out = model(*ranker_inputs(8)).sum()
    with torch.no_grad():
        model.get_parameter(weight).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()
