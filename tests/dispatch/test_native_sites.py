"""Named sites go back to the model's own forward; the others stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch

from loka import dispatch
from loka.dispatch.keep_sites import chosen_modules
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models


def test_a_named_site_runs_as_the_model_has_it_and_the_others_in_fp8(model):
    plain = copy.deepcopy(model)
    patch = sample.apply(model)
    x = torch.randn(8, 32)
    before = model(x)
    assert patch.keep("2") == ("2",)
    assert patch.sites == ("0", "4")
    assert type(model[2]) is torch.nn.Linear
    assert torch.equal(model[2](x), plain[2](x))
    assert not torch.equal(model[0](x), plain[0](x))
    assert not torch.equal(model(x), before)
    assert repr(patch) == f"<Patch {sample.__name__}: 2 sites in 2 modules, 1 kept>"


def test_verify_asks_for_what_is_left(model):
    patch = sample.apply(model)
    patch.keep("2")
    with pytest.raises(dispatch.VerifyError, match="6 of 6 planned FP8 GEMMs did not run"):
        patch.verify()
    models.step(model)
    patch.verify()
    patch.reset()
    with pytest.raises(dispatch.VerifyError) as error:
        patch.verify()
    assert [problem.partition(":")[0] for problem in error.value.problems] == ["0", "4"]


def test_globs_and_several_names(model):
    patch = sample.apply(model)
    assert patch.keep("[02]", "4") == ("0", "2", "4")
    assert patch.sites == ()
    models.step(model)
    patch.verify()
    assert patch.keep("*") == ()  # all have gone back already


def test_remove_takes_the_rest_off_and_apply_brings_all_back(model):
    plain = copy.deepcopy(model)
    patch = sample.apply(model)
    patch.keep("0")
    patch.remove()
    assert [type(module) for module in model] == [type(module) for module in plain]
    with pytest.raises(dispatch.BindError, match="cannot keep: this patch was removed"):
        patch.keep("2")
    again = sample.apply(model)
    assert again.sites == ("0", "2", "4")
    models.step(model)
    again.verify()


def test_a_name_that_no_site_has_is_an_error_with_what_comes_near():
    model = models.Blocks()
    patch = sample.apply(model, sample.BLOCKS)
    with pytest.raises(dispatch.BindError, match=r"no site of this patch matches 'layer\.0\.\*' \(nearest: layers\.0"):
        patch.keep("head", "layer.0.*")
    with pytest.raises(dispatch.BindError, match="keep takes the names of sites"):
        patch.keep()
    assert len(patch.sites) == 5


def test_sites_of_one_forward_go_back_together_or_not_at_all():
    model = models.Blocks()
    plain = copy.deepcopy(model)
    patch = sample.apply(model, sample.BLOCKS)
    with pytest.raises(dispatch.BindError) as error:
        patch.keep("head", "*.down")
    assert error.value.problems == (
        "layers.0.down: shares one generated forward with layers.0.up.0: name these too, or write `compute: keep` for "
        "it in the policy and run loka generate",
        "layers.1.down: shares one generated forward with layers.1.up.0: name these too, or write `compute: keep` for "
        "it in the policy and run loka generate",
    )
    assert len(patch.sites) == 5
    assert patch.keep("layers.0.*") == ("layers.0.up.0", "layers.0.down")
    x = torch.randn(4, 32)
    assert torch.equal(model.layers[0](x), plain.layers[0](x))
    models.step(model)
    patch.verify()


def test_frozen_weights_go_with_their_site(model):
    patch = sample.apply(model, mode="infer")
    patch.keep("0")
    assert not list(model[0].buffers())
    with torch.no_grad():
        model(torch.randn(3, 32))
    patch.verify()
    patch.refresh()


@pytest.mark.slow
def test_a_compiled_model_follows(model):
    plain = copy.deepcopy(model)
    patch = sample.apply(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(8, 32)
    compiled(x)
    patch.keep("*")
    assert torch.equal(compiled(x), plain(x))


@pytest.mark.parametrize("given", [["0", "2"], ("0",), 0, None])
def test_what_is_no_name_is_an_error_that_says_how_to_pass_several(given, model):
    patch = sample.apply(model)
    with pytest.raises(dispatch.BindError, match=r"is none; write patch\.keep\(\*names\) for several in a list"):
        patch.keep("4", given)
    assert patch.sites == ("0", "2", "4")


def test_a_linear_that_mods_merged_is_told_under_the_name_of_all() -> None:
    for pattern in ("q", "q+k"):  # the second is near to the name of all
        with pytest.raises(dispatch.BindError, match=r"matches 'q.*\(.*; mods made one of several linears: q\+k\+v\)"):
            chosen_modules("made", "keep", [pattern], [("out",), ("q+k+v",)], ["out", "q+k+v"])
    assert chosen_modules("made", "keep", ["q+k+v"], [("out",), ("q+k+v",)], ["out", "q+k+v"]) == [1]


@pytest.mark.parametrize(("verb", "remedy"), [("keep", True), ("restore", False)])
def test_sites_of_one_forward_go_together_either_way(verb, remedy) -> None:
    with pytest.raises(dispatch.BindError, match=f"made: {verb}: not all of these sites can go alone") as error:
        chosen_modules("made", verb, ["up"], [("up", "down")], ["up", "down"])
    assert "up: shares one generated forward with down: name these too" in str(error.value)
    assert ("compute: keep" in str(error.value)) is remedy
