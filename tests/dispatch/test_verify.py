"""verify is right about what ran, whatever ran it."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


def test_nothing_ran(model):
    patch = sample.apply(model)
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert "9 of 9 planned FP8 GEMMs did not run" in str(error.value)
    _, *lines = str(error.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("  0, 2, 4: fprop, dgrad, wgrad did not run: the module's forward did not run")
    assert len(error.value.problems) == 3


def test_a_reason_is_told_once_with_some_names():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(30)))
    patch = sample.apply(model, (sample.linears(*map(str, range(30))),))
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    headline, line = str(error.value).splitlines()
    assert "90 of 90 planned FP8 GEMMs did not run" in headline
    assert line.startswith("  0, 1, 2 and 27 more: fprop, dgrad, wgrad did not run: the module's forward did not run: ")
    assert [problem.partition(":")[0] for problem in error.value.problems] == [str(each) for each in range(30)]
    with pytest.raises(dispatch.BindError) as error:
        sample.apply(model, (sample.linears(*map(str, range(30))),))
    _, line = str(error.value).splitlines()
    assert line == "  '0', '1', '2' and 27 more: is bound already: remove the first patch (patch.remove())"
    assert len(error.value.problems) == 30


def test_many_reasons_are_cut_and_counted():
    problems = [f"{name}: reason {name // 2}" for name in range(60)] + ["no name", "no name either"]
    text = str(dispatch.VerifyError("headline:", problems=problems))
    lines = text.splitlines()
    assert lines[:2] == ["headline:", "  0, 1: reason 0"]
    assert lines[20:] == ["  38, 39: reason 19", "  ... and 22 more (the exception's `problems` has them all)"]
    assert str(dispatch.VerifyError("headline:", problems=problems[-2:])) == "headline:\n  no name\n  no name either"


def test_forward_alone(model):
    patch = sample.apply(model)
    model(torch.randn(2, 32))
    patch.verify(backward=False)
    with pytest.raises(dispatch.VerifyError, match="0, 2, 4: dgrad, wgrad did not run: no backward reached it"):
        patch.verify()


def test_no_gradient_for_input_or_weight(model):
    patch = sample.apply(model)
    model[2].weight.requires_grad_(False)
    model(torch.randn(2, 32)).sum().backward()
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert error.value.problems == (
        "0: dgrad did not run: the input needed no gradient",
        "2: wgrad did not run: the weight needed no gradient (requires_grad)",
    )


def test_only_planned_gemms_are_asked_for(model):
    bindings = (sample.linears("0", gemms=("fprop", "wgrad")), sample.linears("2"))
    patch = sample.apply(model, bindings)
    model(torch.randn(2, 32)).sum().backward()
    patch.verify()


def test_a_branch_that_was_not_taken(model):
    patch = sample.apply(model)
    nn.Sequential(*list(model)[:2])(torch.randn(2, 32)).sum().backward()
    with pytest.raises(dispatch.VerifyError, match="took another branch") as error:
        patch.verify(backward=False)
    assert len(error.value.problems) == 2


def test_what_was_changed_behind_its_back(model):
    patch = sample.apply(model)
    models.step(model)
    model[0].forward = lambda x: x
    model[2] = copy.deepcopy(model[2])
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert error.value.problems == (
        "'0': lost its generated forward since apply",
        "'2': was replaced in the model since apply",
    )


def test_hook_on_an_inlined_child_after_apply():
    model = models.Blocks()
    patch = sample.apply(model, (sample.blocks("layers.0", "layers.1"),))
    models.step(model)
    patch.verify()
    model.layers[1].up[0].register_forward_hook(lambda *_: None)
    with pytest.raises(dispatch.VerifyError, match=r"'layers.1': its child 'up.0' has forward hooks"):
        patch.verify()


def test_removed_by_another_patch(model):
    patch = sample.apply(model)
    models.step(model)
    dispatch.patch_of(model).remove()
    with pytest.raises(dispatch.VerifyError, match="lost its generated forward"):
        patch.verify()


@pytest.mark.slow
def test_a_module_compiled_before_apply_runs_the_generated_forward(model):
    compiled = torch.compile(model, backend="aot_eager")
    models.step(compiled)
    patch = sample.apply(compiled)
    models.step(compiled)
    patch.verify()
    patch.remove()
    x = torch.randn(3, 32)
    torch.testing.assert_close(compiled(x), model(x))


def test_what_replays_old_code_fails(model):
    x = torch.randn(2, 32)
    traced = torch.fx.symbolic_trace(model, concrete_args=None)
    exported = torch.export.export(model, (x,)).module()
    patch = sample.apply(model)
    exported(x)
    with pytest.raises(dispatch.VerifyError, match="compiled or captured"):
        patch.verify(backward=False)
    traced(x)  # calls the same children, which are bound
    patch.verify(backward=False)


class Encoder(nn.Module):
    """One of torch's encoder layers, 32 wide, without dropout."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(32, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(x)


@pytest.fixture
def encoder():
    model = Encoder()
    return model, sample.apply(model, (sample.linears("layer.linear1", "layer.linear2"),))


@pytest.fixture
def no_fast_path():
    """torch's fused path switched off, as the message says."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


def test_a_fused_encoder_layer_is_named_with_what_to_do(encoder):
    model, patch = encoder
    with torch.no_grad():
        model.eval()(torch.randn(2, 5, 32))
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify(backward=False)
    assert len(error.value.problems) == 2
    for name, problem in zip(("linear1", "linear2"), error.value.problems, strict=True):
        assert problem.startswith(
            f"layer.{name}: fprop did not run: in evaluation without gradients torch runs "
            "nn.TransformerEncoderLayer 'layer' as one fused kernel"
        )
        assert "torch.backends.mha.set_fastpath_enabled(False)" in problem
    assert patch.keep("layer.*") == ("layer.linear1", "layer.linear2")  # the other remedy that is named
    patch.verify()


def test_an_encoder_layer_without_the_fused_path_runs_its_patched_linears(encoder, no_fast_path):
    model, patch = encoder
    model.eval()
    with pytest.raises(
        dispatch.VerifyError, match=r"layer\.linear1, layer\.linear2: fprop did not run: the module's forward"
    ):
        patch.verify(backward=False)
    with torch.no_grad():
        model(torch.randn(2, 5, 32))
    patch.verify(backward=False)


def test_an_encoder_layer_in_training_is_not_blamed(encoder):
    with pytest.raises(
        dispatch.VerifyError,
        match=r"layer\.linear1, layer\.linear2: fprop, dgrad, wgrad did not run: the module's forward",
    ):
        encoder[1].verify()


def test_a_linear_that_attention_never_calls_is_named():
    model = nn.Sequential(nn.MultiheadAttention(32, 4, batch_first=True))
    binding = sample.linears("0.out_proj")
    linear = "torch.nn.modules.linear.NonDynamicallyQuantizableLinear"
    patch = sample.apply(model, (dataclasses.replace(binding, replaces=linear),))
    x = torch.randn(2, 5, 32)
    model[0](x, x, x)
    with pytest.raises(dispatch.VerifyError, match=r"nn.MultiheadAttention '0' reads its weight and never calls it"):
        patch.verify()
