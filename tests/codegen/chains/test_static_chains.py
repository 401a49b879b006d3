"""Chains under static scales: what is counted, and that copies and compilers take it."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka import dispatch
from loka.codegen import render_package
from loka.mods.norms import BlockNorm
from loka.numerics.enums import Format
from loka.numerics.quantize import static_scale
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen.chain_bodies import BODIES, DY, X, plan_of
from tests.support.codegen.codegen_plans import PlanPackage
from tests.support.codegen.launches import Launches

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU


def test_a_plain_linear_is_a_chain_of_its_own(planned: PlanPackage) -> None:
    site = plans.site_plan("a", **chains.known_chain(X, DY))
    other = plans.site_plan("b", **chains.known_chain(X / 4, DY))
    bindings = [plans.linear_binding([name]) for name in ("a", "b")]
    made = planned(plans.make_plan([site, other], bindings))
    model = nn.ModuleDict({"a": nn.Linear(48, 32), "b": nn.Linear(48, 32)})
    x = torch.randn(17, 48) * 2.5
    with made.apply(model) as patch:
        for name in ("a", "b"):
            model[name](x.clone().requires_grad_()).sum().backward()
        patch.verify()
        (over,) = patch.overflows()
        assert (over.site, over.operand, over.amax) == ("b", "input", 2.0)
        assert over.elements == int((x.abs() > 448 * static_scale(2.0, Format.E4M3, True)).sum()) > 0
        assert over.largest == x.abs().max()
    text = chains.kernels_text(made)
    assert text.count(" = constant(") == 1  # both maxima have one function


def test_overflow_is_counted_exactly_and_reported(planned: PlanPackage) -> None:
    """Operands that are there as they are: the first input, and the output gradient of a last linear."""
    body = BODIES["linears"]
    made = planned(chains.chain_plan(body, chains.known_chain(1.0, 0.5)))
    model = chains.Holder(copy.deepcopy(body))
    x, dy = chains.operands(body, 33, 48)
    limits = {
        "input": 448 * static_scale(1.0, Format.E4M3, True),
        "grad_output": 448 * static_scale(0.5, Format.E4M3, True),
    }
    with made.apply(model) as patch:
        for steps in (1, 2):
            chains.gradients(model, x, dy)
            over = {(each.site, each.operand): each for each in patch.overflows()}
            for place, matrix in ((("body.0", "input"), x), (("body.2", "grad_output"), dy)):
                assert over[place].elements == steps * int((matrix.abs() > limits[place[1]]).sum()) > 0
                assert over[place].largest == matrix.abs().max()
                assert over[place].amax == (1.0 if place[1] == "input" else 0.5)
        said = r"(?s)body\.0: input: \d+ elements saturated; .* run loka probe again"
        with pytest.warns(dispatch.LokaWarning, match=said) as seen:
            patch.verify()
        assert len(seen) == 1
        patch.reset()
        assert patch.overflows() == ()
        chains.gradients(model, x / 100, dy / 100)
        assert patch.overflows() == ()
        patch.verify()


def test_what_a_tile_is_enough_for_is_written_as_is_and_transposed(planned: PlanPackage) -> None:
    """A norm of whole rows needs a transposition; a bias, an activation and a norm of blocks do not."""
    layers = [nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 512, bias=False), BlockNorm(256), nn.Hardswish()]
    local = nn.Sequential(*layers, nn.Linear(512, 32))
    files = render_package(chains.chain_plan(local, chains.known_chain(X, DY)))
    named = set(re.findall(r'Launch\(\s*"(\w+)"', files["kernels.py"]))
    assert {name for name in named if "_cast_transpose_" in name} == {
        "add_relu_e4m3_static_counted_cast_transpose_64",
        "block_norm_hardswish_e4m3_static_counted_eps_1e_06_cast_transpose_512",
        "add_backward_e4m3_static_counted_cast_transpose_32",
        "block_norm_hardswish_backward_e4m3_static_counted_eps_1e_06_cast_transpose_512",
        "add_relu_backward_e4m3_static_counted_cast_transpose_64",
    }
    assert not re.search(r"^transpose = ", files["fused.py"], re.MULTILINE)
    body = BODIES["layer_norm_silu"]
    model = chains.Holder(copy.deepcopy(body))
    x, dy = chains.operands(body, 8, 48)
    with planned(plan_of("static", "layer_norm_silu")).apply(model), Launches() as step:
        chains.gradients(model, x, dy)
    assert step.operands["transpose", 2] == 2
    assert step.operands["transpose", 1] == 1  # the last linear's output gradient is written as is and transposed


@pytest.mark.slow
def test_compiled_graphs_count_as_eager_does(planned: PlanPackage) -> None:
    body = BODIES["layer_norm_silu"]
    model = chains.Holder(copy.deepcopy(body))
    try:
        with planned(plan_of("static_small", "layer_norm_silu")).apply(model) as patch:
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
            for rows in (33, 17):
                x, dy = chains.operands(body, rows, 48)
                patch.reset()
                expected, eager = chains.gradients(model, x, dy), patch.overflows()
                assert {each.operand for each in eager} == {"input", "grad_output"}
                patch.reset()
                found = chains.gradients(compiled, x, dy)
                assert patch.overflows() == eager
                for key, value in expected.items():
                    assert torch.equal(found[key], value), key
                patch.reset()
                first, second = compiled(x), compiled(x)  # two steps are on their way at once
                (first + second).backward(dy)
                assert [each.elements for each in patch.overflows()] == [2 * each.elements for each in eager]
    finally:
        torch._dynamo.reset()


class Checkpointed(nn.Module):
    """A model that runs its forward again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


def test_a_forward_that_runs_again_counts_again(planned: PlanPackage) -> None:
    body = BODIES["layer_norm_silu"]
    model = chains.Holder(copy.deepcopy(body))
    x, dy = chains.operands(body, 33, 48)
    with planned(plan_of("static_small", "layer_norm_silu")).apply(model) as patch:
        expected, once = chains.gradients(model, x, dy), patch.overflows()
        patch.reset()
        found = chains.gradients(Checkpointed(model), x, dy)
        for key, value in expected.items():
            assert torch.equal(found.get(key, found.get(f"inner.{key}")), value), key
        twice = [2 * each.elements if each.operand == "input" else each.elements for each in once]
        assert [each.elements for each in patch.overflows()] == twice


def test_buffers_are_no_part_of_the_model(planned: PlanPackage, tmp_path: Path) -> None:
    body = BODIES["layer_norm_silu"]
    model = chains.Holder(copy.deepcopy(body))
    plain = chains.Holder(copy.deepcopy(body))
    x, dy = chains.operands(body, 9, 48)
    patch = planned(plan_of("static_small", "layer_norm_silu")).apply(model)
    chains.gradients(model, x, dy)
    before = patch.overflows()
    assert before
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.load_state_dict(plain.state_dict())
    twin = copy.deepcopy(model)
    copied = dispatch.patch_of(twin)
    assert copied.overflows() == ()  # a copy counts for itself
    chains.gradients(twin, x, dy)
    assert copied.overflows() == patch.overflows() == before
    shallow = copy.copy(model.body)
    shallow(x)
    assert patch.overflows() == before
    torch.save(twin, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    chains.gradients(loaded, x, dy)
    assert dispatch.patch_of(loaded).overflows() == before
    patch.remove()
    assert type(model.body) is type(plain.body)
    assert dict(model.named_buffers()) == {}
    assert model.body.__dict__.keys() == plain.body.__dict__.keys()
    with pytest.raises(dispatch.BindError, match="was removed"):
        patch.overflows()


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_moved_and_cast_models_keep_scales_in_float32(planned: PlanPackage, mode: str) -> None:
    model = chains.Holder(copy.deepcopy(BODIES["layer_norm_silu"]))
    x, _ = chains.operands(model, 9, 48)
    with planned(plan_of("static_small", "layer_norm_silu")).apply(model, mode=mode) as patch, torch.no_grad():
        model(x)
        before = patch.overflows()
        assert before
        model.bfloat16()
        scales = [buffer for name, buffer in model.named_buffers() if "put_scale_" in name]
        assert scales
        assert {scale.dtype for scale in scales} == {torch.float32}
        assert patch.overflows() == before
        model(x.bfloat16())
        assert all(two.elements > one.elements for one, two in zip(before, patch.overflows(), strict=True))
        model.to("meta")
        assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
        model.to_empty(device="cpu")
        if mode == "train":
            assert patch.overflows() == ()
