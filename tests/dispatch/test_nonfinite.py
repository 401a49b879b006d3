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


def test_bad_input_is_named_at_the_first_site(model):
    patch = sample.apply(model)
    x = torch.randn(4, 32)
    x[1, 2] = float("nan")
    error = caught(patch, lambda: model(x))
    assert (error.site, error.gemm) == ("0", "fprop")
    assert "0 (fprop): its input was not finite before the GEMM" in str(error)


def test_bad_weight_is_named_at_its_site(model):
    patch = sample.apply(model)
    model[2].weight.data[0, 0] = float("inf")
    error = caught(patch, lambda: model(torch.randn(4, 32)))
    assert (error.site, error.gemm) == ("2", "fprop")
    assert "its weight was not finite" in str(error)


def test_overflow_of_the_result_is_named_where_it_is_made(model):
    model.half()
    model[2].weight.data.fill_(6e4)
    patch = sample.apply(model)
    error = caught(patch, lambda: model(torch.full((4, 32), 100.0, dtype=torch.float16)))
    assert (error.site, error.gemm) == ("2", "fprop")
    assert "finite operands gave a result of (4, 32) that is not finite in torch.float16" in str(error)


def test_a_bad_gradient_is_named_in_the_backward(model):
    patch = sample.apply(model)
    model[3].register_full_backward_hook(lambda module, dx, dy: (dx[0] * float("nan"),))
    error = caught(patch, lambda: models.step(model))
    assert (error.site, error.gemm) == ("2", "dgrad")
    assert "its grad_output was not finite" in str(error)


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


def test_finite_models_pass_and_the_model_works_after(model):
    patch = sample.apply(model)
    with patch.trace_nonfinite():
        models.step(model)
    model[0].weight.data[0, 0] = float("nan")
    assert caught(patch, lambda: models.step(model)).site == "0"
    assert not model(torch.randn(2, 32)).isfinite().any()


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
