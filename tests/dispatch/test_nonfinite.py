"""trace_nonfinite names the first site that makes or meets a NaN or an infinity."""

from __future__ import annotations

import pytest
import torch

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


def caught(patch, run):
    """The NonFiniteError that `run` raises under the trace."""
    with pytest.raises(dispatch.NonFiniteError) as error, patch.trace_nonfinite():
        run()
    return error.value


def bad_weight(model):
    model[2].weight.data[0, 0] = torch.inf


def overflow(model):
    model.half()[2].weight.data.fill_(6e4)


def bad_gradient(model):
    model[3].register_full_backward_hook(lambda module, dx, dy: (dx[0] * torch.nan,))


@pytest.mark.parametrize(
    ("change", "x", "site", "gemm", "says"),
    [
        (bool, torch.full((4, 32), torch.nan), "0", "fprop", "0 (fprop): its input was not finite before the GEMM"),
        (bad_weight, torch.ones(4, 32), "2", "fprop", "its weight was not finite"),
        (
            overflow,
            torch.full((4, 32), 100.0, dtype=torch.float16),
            "2",
            "fprop",
            "finite operands gave a result of (4, 32) that is not finite in torch.float16",
        ),
        (bad_gradient, torch.ones(4, 32), "2", "dgrad", "its grad_output was not finite"),
    ],
)
def test_the_first_site_is_named(change, x, site, gemm, says, model):
    change(model)
    patch = sample.apply(model)
    error = caught(patch, lambda: model(x).sum().backward())
    assert (error.site, error.gemm) == (site, gemm)
    assert says in str(error)
    assert model(x).shape == (4, 1)  # outside of the trace it runs


@pytest.mark.slow
def test_compiled_models_are_seen_too(model):
    patch = sample.apply(model)
    compiled = torch.compile(model, backend="aot_eager")
    models.step(compiled)
    model[2].weight.data[0, 0] = float("nan")
    assert caught(patch, lambda: models.step(compiled)).site == "2"
    model[2].weight.data[0, 0] = 0
    patch.reset()
    models.step(compiled)
    patch.verify()


def test_another_models_sites_are_not_named(model):
    other = models.mlp()
    other[0].weight.data.fill_(float("nan"))
    patch = sample.apply(model)
    sample.apply(other)
    with patch.trace_nonfinite():
        models.step(model)
        models.step(other)


def test_seeing_nothing_is_said(model):
    patch = sample.apply(model)
    with pytest.warns(dispatch.LokaWarning, match="saw no FP8 GEMM"), patch.trace_nonfinite():
        pass
