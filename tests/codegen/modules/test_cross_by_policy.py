"""DCNv2's cross layers and over-arch by a policy: one chain over module boundaries, from the file to training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka.codegen import render_package
from loka.plan.plan import Plan
from loka.plan.serialize import from_json, to_json
from loka.zoo.dlrm import DCNSizes, DCNv2
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.modded_models import Workplace

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU

STEPS = " -> ".join(3 * ["linear -> linear -> times -> residual"] + 2 * ["linear -> relu"]) + ": x (..., 96), "
KEEP_WGRAD = '{match: "cross.*.down", wgrad: {compute: keep}}'
DEFAULTS = "compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always"
Make = Callable[..., tuple[Plan, dict[str, str], ModuleType]]


@pytest.fixture
def make(workplace: Workplace) -> Make:
    """The plan of one of the models under the transposed recipe, the files of its package, and the package."""
    return lambda factory, rules="": workplace.make(
        factory, DEFAULTS, mods="", rules=f"{{match: {{max_n: 16}}, compute: keep}}, {rules}"
    )


def model_of() -> DCNv2:
    torch.manual_seed(0)
    return DCNv2(DCNSizes(embeddings=6, dim=16, layers=3, rank=32, over=(64, 48)))


@pytest.mark.slow
def test_the_cross_layers_and_the_over_arch_are_one_chain(make: Make) -> None:
    plan, files, _ = make("dcnv2")
    assert [binding.modules for binding in plan.bindings] == [("",)]
    assert "over_3 = kernels.dcnv2(" in files["modules.py"]
    assert chains.functions(files["kernels.py"])["dcnv2"].startswith(STEPS)
    assert render_package(from_json(to_json(plan))) == files  # what the trace saw of shapes is in plan.json


@pytest.mark.slow
def test_a_rule_keeps_the_wgrad_of_the_first_of_each_pair_in_the_chain(make: Make) -> None:
    _, files, package = make("dcnv2", KEEP_WGRAD)
    assert "over_3 = kernels.dcnv2(" in files["modules.py"]
    assert chains.functions(files["kernels.py"])["dcnv2"].startswith(STEPS)
    assert files["kernels.py"].count('saved="x_plain weight_fp8') == 1  # the first of each pair
    model, x, dy = model_of(), torch.randn(16, 6, 16), torch.randn(16, 1)
    whole = chains.gradients(exact(model), x.double(), dy.double())
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    for key, value in found.items():
        assert chains.error(value, whole[key]) < (0.1 if "down" in key else 5e-3), key


def exact(module: nn.Module) -> nn.Module:
    """Its linears but the logit's in float64 on quantized operands."""
    made = chains.simulated(module)
    for name, child in made.named_modules():
        if name.endswith("over.4"):
            del child.__dict__["forward"]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("batch", [33, 1])
def test_gradients_are_those_of_quantized_linears(make: Make, batch: int) -> None:
    _, _, package = make("dcnv2")
    model = model_of()
    x, dy = torch.randn(batch, 6, 16), torch.randn(batch, 1)
    expected = chains.gradients(exact(model), x.double(), dy.double())
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert chains.error(value, expected[key]) < 5e-3, key


@pytest.mark.slow
def test_what_needs_no_gradient_gets_none_and_changes_nothing_else(make: Make) -> None:
    _, _, package = make("dcnv2")
    model, x = model_of(), torch.randn(16, 6, 16)
    with package.apply(model):
        whole = chains.gradients(model, x, torch.ones(16, 1))
        model.cross[1].down.weight.requires_grad_(False)
        model.over[0].bias.requires_grad_(False)
        model.zero_grad()
        model(x).backward(torch.ones(16, 1))  # x needs none either: no dgrad of the first linear, no products
        found = {name: p.grad for name, p in model.named_parameters()}
    for name, grad in found.items():
        if name in ("cross.1.down.weight", "over.0.bias"):
            assert grad is None
        else:
            assert grad is not None
            assert torch.equal(grad, whole[name]), name


@pytest.mark.slow
def test_autocast_gives_the_dtypes_of_the_model(make: Make) -> None:
    """A sum of a bfloat16 product and a float32 input is float32, in a kernel as in torch."""
    _, _, package = make("dcnv2")
    model = model_of()
    x, dy = torch.randn(16, 6, 16), torch.randn(16, 1)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(x)
    with package.apply(model), torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(x)
    assert found.dtype == expected.dtype
    found.backward(dy.to(found.dtype))
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.slow
def test_where_the_owner_cannot_be_traced_each_layer_is_its_own_chain(make: Make, workplace: Workplace) -> None:
    plan, files, package = make("hidden")
    owners = {name for binding in plan.bindings for name in binding.modules}
    assert owners == {"cross.0", "cross.1", "cross.2", "over"}
    assert "kernels.cross_0(" in files["modules.py"]
    assert chains.functions(files["kernels.py"])["cross_0"].startswith(
        "linear -> linear -> times -> residual: x (..., 96)"
    )
    model, x, dy = model_of(), torch.randn(16, 6, 16), torch.randn(16, 1)
    hidden = workplace.models.hidden()
    hidden.load_state_dict(model.state_dict())
    expected: dict[str, Tensor] = chains.gradients(exact(model), x.double(), dy.double())
    with package.apply(hidden):
        found = chains.gradients(hidden, x, dy)
    for key, value in found.items():
        assert chains.error(value, expected[key]) < 5e-3, key
