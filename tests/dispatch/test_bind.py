"""apply and remove: what changes in a model, what does not, and what is refused."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


def test_only_the_forward_changes():
    model = models.mlp()
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    patch = sample.apply(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert isinstance(model[0], nn.Linear)
    assert type(model[0]).__name__ == "Linear"
    assert "fp8 [2: fprop dgrad wgrad]" in repr(model[2])
    assert patch.sites == ("0", "2", "4")
    patch.remove()
    assert [type(module) for module in model.modules()] == classes
    assert "loka" not in vars(model[0])


def test_remove_gives_the_original_result_back_and_may_be_called_twice():
    model, x = models.mlp(), torch.randn(5, 32)
    before = model(x)
    patch = sample.apply(model)
    assert not torch.equal(model(x), before)
    patch.remove()
    patch.remove()
    assert torch.equal(model(x), before)
    assert "removed" in repr(patch)
    with pytest.raises(dispatch.BindError, match="was removed"):
        patch.verify()


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_state_dict_is_interchangeable(mode):
    plain, patched = models.mlp(), models.mlp()
    keys = list(plain.state_dict())
    sample.apply(patched, mode=mode)
    assert list(patched.state_dict()) == keys
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(1)
    patched.load_state_dict(plain.state_dict())
    other = models.mlp()
    other.load_state_dict(patched.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)


def test_all_problems_in_one_error_and_nothing_changed():
    model = models.mlp()
    model[2] = nn.Linear(32, 16)
    model[4].forward = lambda x: x
    bindings = (sample.linears("0", "1", "2", "22"), sample.linears("4", shape=(1, 32)))
    with pytest.raises(dispatch.BindError) as error:
        sample.apply(model, bindings)
    text = str(error.value)
    assert len(error.value.problems) == 5
    assert "'1': is a torch.nn.modules.activation.ReLU, planned was torch.nn.modules.linear.Linear" in text
    assert "'2': weight has shape (16, 32), planned was (32, 32)" in text
    assert "'2': bias has shape (16,), planned was (32,)" in text
    assert "'22': the model has no such module (nearest: 2): run loka generate again" in text
    assert "'4': has a forward of its own" in text
    assert not any(isinstance(module, dispatch.Bound) for module in model.modules())
    assert not any("loka" in vars(module) for module in model.modules())


def test_parameters_that_the_plan_does_not_know_are_refused():
    model = models.Blocks()
    model.layers[0].up[0].register_parameter("gain", nn.Parameter(torch.ones(())))
    model.layers[1].up[0].bias = None
    with pytest.raises(dispatch.BindError) as error:
        sample.apply(model, (sample.blocks("layers.0", "layers.1"), sample.linears("head", shape=(1, 32), bias=False)))
    text = str(error.value)
    assert "'layers.0': has a parameter 'up.0.gain' that the plan does not know" in text
    assert "'layers.1': has no parameter 'up.0.bias', planned with shape (64,)" in text
    assert "'head': has a parameter 'bias' that the plan does not know" in text


def test_a_failure_half_way_leaves_nothing_bound(monkeypatch):
    model = models.mlp()
    fails = lambda module, frozen: 1 / (frozen.pairs[0][0].shape[0] != 1)  # noqa: E731
    monkeypatch.setattr("loka.dispatch.bound_state.set_frozen", fails)
    with pytest.raises(ZeroDivisionError):
        sample.apply(model, mode="infer")
    assert type(model[0]) is nn.Linear
    assert "loka" not in vars(model[0])
    assert not model[0]._load_state_dict_post_hooks


def without_source(model):
    """A forward whose text is in no file."""
    scope = {"torch": torch}
    text = "def forward(self, x):\n    return x + 0"
    exec(compile(text, "<no file>", "exec"), scope)  # noqa: S102 - of "<string>", Python 3.13 may find another source
    own = type("Block", (models.Block,), {"forward": scope["forward"], "__module__": models.__name__})
    model.layers[0].__class__ = own


def lazy(model):
    model[4] = nn.LazyLinear(1)


def sparse(model):
    model[4].weight = nn.Parameter(model[4].weight.detach().to_sparse())


BLOCK, UP = sample.blocks("layers.0"), sample.linears("layers.0.up.0", shape=(64, 32))
LAZY = replace(sample.linears("4", shape=(1, 32)), replaces="torch.nn.modules.linear.LazyLinear")
HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre")
REFUSED = {
    "bound twice": (models.mlp, sample.apply, sample.MLP, "'0', '2', '4': is bound already"),
    "shared": (models.Shared, nn.Module.train, (sample.linears("one", "two"),), "'two': is the same module as 'one'"),
    "parametrised": (
        models.mlp,
        lambda model: nn.utils.parametrizations.weight_norm(model[0]),
        sample.MLP,
        "'0': is parametrised",
    ),
    "attribute": (models.mlp, lambda model: setattr(model[0], "loka", 1), sample.MLP, "attribute 'loka'"),
    "lazy": (models.mlp, lazy, (LAZY,), r"'4': weight has no shape yet \(a lazy module\): run the model once before"),
    "sparse": (models.mlp, sparse, sample.MLP, r"'4': weight is torch.sparse_coo, and kernels read dense weights"),
    "inlined": (models.Blocks, nn.Module.train, (BLOCK, UP), r"'layers.0.up.0': is inlined into 'layers.0'"),
    "inlined, after": (models.Blocks, nn.Module.train, (UP, BLOCK), r"'layers.0.up.0': is inlined into 'layers.0'"),
    **{
        f"{hook} hook": (
            models.Blocks,
            lambda model, hook=hook: getattr(model.layers[0].up, f"register_{hook}_hook")(print),
            (BLOCK,),
            r"'layers.0': its child 'up' has .*hooks",
        )
        for hook in HOOKS
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_left_as_it_was(case):
    make, change, bindings, says = REFUSED[case]
    model = make()
    change(model)
    classes = [type(module) for module in model.modules()]
    with pytest.raises(dispatch.BindError, match=says):
        sample.apply(model, bindings)
    assert [type(module) for module in model.modules()] == classes


def test_bad_mode_and_model():
    with pytest.raises(dispatch.BindError, match="did you mean 'train'"):
        sample.apply(models.mlp(), mode="training")
    with pytest.raises(dispatch.BindError, match=r"an nn\.Module, not dict"):
        sample.apply({})


def test_parametrised_or_overridden_inlined_child_is_refused():
    model = models.Blocks()
    torch.nn.utils.parametrizations.weight_norm(model.layers[0].up[0])
    model.layers[1].up[0].forward = lambda x: x
    with pytest.raises(dispatch.BindError) as error:
        sample.apply(model, (sample.blocks("layers.0", "layers.1"),))
    assert "'layers.0': its child 'up.0' is parametrised" in str(error.value)
    assert "'layers.1': its child 'up.0' has a forward of its own" in str(error.value)


def test_a_second_package_for_what_the_first_has_inlined_is_refused():
    model = models.Blocks()
    patch = sample.apply(model, (sample.blocks("layers.0"),))
    with pytest.raises(dispatch.BindError, match=r"'layers.0.up.0': is inlined into 'layers.0', which is bound"):
        sample.apply(model, (UP,))
    patch.remove()
    assert sample.apply(model, (UP,)).sites == ("layers.0.up.0",)


def test_scripted_model_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(models.mlp())
        traced = torch.jit.trace(models.mlp(), torch.randn(5, 32))
    for closed in (scripted, traced):
        with pytest.raises(dispatch.BindError, match=r"torch\.jit\.script or torch\.jit\.trace"):
            sample.apply(closed)


def test_two_models_from_one_package():
    first, second = models.mlp(), models.mlp()
    one, two = sample.apply(first), sample.apply(second)
    models.step(first)
    one.verify()
    with pytest.raises(dispatch.VerifyError):
        two.verify()
    one.remove()
    models.step(second)
    two.verify()


def test_model_itself_can_be_bound():
    block = models.Block()
    with sample.apply(block, (sample.blocks(""),)) as patch:
        models.step(block)
        patch.verify()
    assert type(block) is models.Block


def test_slice_of_a_bound_sequential_is_plain():
    binding = sample.around(sample.modules.Chain)
    model = models.mlp()
    x = torch.randn(3, 32)
    expected = model[:3](x)
    sample.apply(model, (binding,))
    assert type(model[:2]) is nn.Sequential
    assert torch.equal(model[:3](x), expected)
    assert isinstance(model, dispatch.Bound)
    assert sample.apply(models.mlp(), (binding,), mode="infer").sites == ()


def test_the_users_own_quantize_method_stays():
    class WithQuantize(nn.Linear):
        def quantize(self):
            return "mine"

    module = WithQuantize(32, 32)
    sample.apply(module, (sample.linears("", replaces=WithQuantize),), mode="infer")
    assert module.quantize() == "mine"
    assert module.loka_weight_0.dtype == torch.float8_e4m3fn


def test_hooks_of_a_bound_module_keep_firing():
    model, fired = models.mlp(), []
    model[0].register_forward_hook(lambda *_: fired.append("forward"))
    model[0].register_full_backward_hook(lambda *_: fired.append("backward"))
    sample.apply(model)
    model[0].register_forward_pre_hook(lambda *_: fired.append("pre"))
    models.step(model)
    assert fired == ["pre", "forward", "backward"]


def test_a_package_without_fp8_is_not_said_to_run_fp8_here():
    with pytest.warns(dispatch.LokaWarning) as caught:
        sample.apply(models.mlp(), (sample.linears("0", gemms=()),), target="h100")
    assert [str(warning.message).partition(": ")[2] for warning in caught] == [
        "the model is on cpu: its generated forwards run on the torch reference path, slow but exact (the plan is for "
        "h100)",
        "the package holds no FP8 site: 1 module gets a generated forward with its GEMMs in the model's own dtype; run "
        "loka plan to see why",
    ]


def test_the_reference_path_is_said_once_and_only_where_it_runs():
    with pytest.warns(dispatch.LokaWarning, match="the model is on cpu: .*slow but exact") as caught:
        sample.apply(models.mlp(), target="h100")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample.apply(models.mlp(), target="reference")


@pytest.mark.parametrize("target", ["h100", "reference"])
def test_a_model_without_values_is_bound_with_a_warning(target):
    model = models.mlp().to("meta")
    with pytest.warns(
        dispatch.LokaWarning, match=r"on the meta device, without values: give it weights before it runs"
    ):
        patch = sample.apply(model, target=target)
    model.to_empty(device="cpu")
    model.load_state_dict(models.mlp().state_dict())
    models.step(model)
    patch.verify()


def test_source_of_an_owners_forward_is_compared(monkeypatch):
    model = models.Blocks()
    bindings = (sample.blocks("layers.0", "layers.1", planned=sample.block_fingerprint()),)
    sample.apply(model, bindings).remove()

    def forward(self, x):
        return self.up(x) @ self.down - x

    monkeypatch.setattr(models.Block, "forward", forward)
    place = r"test_bind.py:\d+ 'return self.up\(x\) @ self.down - x'"
    changed = rf"'layers.0', 'layers.1': its own forward is another at {place}: v3 = sub"
    with pytest.raises(dispatch.BindError, match=changed + r"\(v2, x\), planned was v3 = add\(v2, x\)"):
        sample.apply(model, bindings)


def test_a_forward_whose_text_is_in_no_file_is_compared_too():
    model = models.Blocks()
    without_source(model)
    with pytest.raises(
        dispatch.BindError, match=r"'layers.0': its own forward is another: v0 = add\(x, 0\), planned was v0 ="
    ):
        sample.apply(model, (sample.blocks("layers.0", planned=sample.block_fingerprint()),))
