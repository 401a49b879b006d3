"""verify proves on which kernel a GEMM ran, and apply that it can run here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loka import dispatch
from loka.dispatch.bind import check_model
from loka.errors import Code
from loka.kernels import call_counters
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

FBGEMM, TORCH = ("fbgemm.rowwise",), ("torch.scaled_mm",)


def on(*kernels: tuple[str, ...], names=("0", "2")):
    """Bindings whose plain linears are planned on these kernels: fprop, dgrad, wgrad."""
    return (replace(sample.linears(*names), kernels=(kernels,)),)


def test_what_ran_on_another_kernel_than_planned_is_found(model):
    patch = sample.apply(model, on(FBGEMM, TORCH, (*FBGEMM, *TORCH)))
    models.step(model)
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert error.value.problems == (
        "0: fprop ran on torch.scaled_mm, planned was fbgemm.rowwise",
        "2: fprop ran on torch.scaled_mm, planned was fbgemm.rowwise",
    )


def test_one_of_a_tables_kernels_is_enough(model):
    patch = sample.apply(model, on((*FBGEMM, *TORCH), TORCH, TORCH))
    models.step(model)
    patch.verify()
    for number in model[0].loka.numbers:
        call_counters.increment(number, "triton.gemm")
    with pytest.raises(dispatch.VerifyError, match=r"fprop ran on triton\.gemm, planned was fbgemm\.rowwise or"):
        patch.verify()
    patch.reset()
    models.step(model)
    patch.verify()


def test_in_mode_infer_fprop_alone_is_asked_for(model):
    patch = sample.apply(model, on(FBGEMM, TORCH, TORCH), mode="infer")
    with torch.no_grad():
        model(torch.randn(2, 32))
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert all("fprop ran on torch.scaled_mm" in problem for problem in error.value.problems)


def test_a_missing_library_is_an_error_at_apply_and_the_model_is_left_alone(model, monkeypatch):
    sample.apply(model, on(FBGEMM, FBGEMM, FBGEMM)).remove()  # without a GPU it is not needed
    monkeypatch.setattr(check_model, "_on_fp8", lambda module: True)
    with pytest.raises(dispatch.BindError) as error:
        sample.apply(model, on(FBGEMM, TORCH, TORCH))
    assert str(error.value).startswith(f"{sample.__name__} cannot run on this machine; the model is left as it was ")
    assert error.value.code is Code.MACHINE
    torchs, fbgemms = (
        next(problem for problem in error.value.problems if name in problem) for name in (*TORCH, *FBGEMM)
    )
    assert "no CUDA device" in torchs
    assert fbgemms == (
        "kernel 'fbgemm.rowwise', planned for '0', '2': FBGEMM GenAI is not installed: pip install 'loka[fbgemm]'; or "
        "write another `kernel` or `compute: keep` for these sites in the policy and run loka generate again"
    )
    assert all(type(module) in (torch.nn.Linear, torch.nn.ReLU) for module in model)
    layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(5)])
    with pytest.raises(dispatch.BindError, match="planned for '0', '1', '2' and 2 more: FBGEMM"):
        sample.apply(layers, on(FBGEMM, FBGEMM, FBGEMM, names=("0", "1", "2", "3", "4")))


def test_a_kernel_that_this_loka_does_not_have(model):
    with pytest.raises(dispatch.BindError, match=r"there is no kernel 'deep\.gemm'.*; upgrade LoKA"):
        sample.apply(model, on(("deep.gemm",), TORCH, TORCH))
