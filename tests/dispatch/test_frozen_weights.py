"""Every way in which torch lets a weight change, with frozen weights: the new ones are used, or the call raises.

What bumps no version is found by `verify`, and used after `refresh`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from loka import dispatch
from tests.support import dispatch_sample as sample
from tests.support.models import dispatch_models as models

WEIGHT = "layers.0.up.0.weight"


def others(model: nn.Module) -> dict[str, Tensor]:
    return {name: -1.5 * parameter.detach() for name, parameter in model.named_parameters()}


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for name, value in others(model).items():
            model.get_parameter(name).copy_(value)


def in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.mul_(-1.5)


def foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), -1.5)


def whole_load(model: nn.Module) -> None:
    model.load_state_dict(others(model))


def child_load(model: nn.Module) -> None:
    child = model.get_submodule("layers.0.up.0")
    child.load_state_dict(others(child))


def assigned(model: nn.Module) -> None:
    model.load_state_dict(others(model), assign=True)


def swapped_load(model: nn.Module) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(others(model))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def new_parameter(model: nn.Module) -> None:
    child = model.get_submodule("layers.0.up.0")
    child.weight = nn.Parameter(-1.5 * child.weight.detach())


def data_of_another(model: nn.Module) -> None:
    for name, value in others(model).items():
        model.get_parameter(name).data = value


def from_a_vector(model: nn.Module) -> None:
    vector_to_parameters(-1.5 * parameters_to_vector(model.parameters()).detach(), model.parameters())


def swapped(model: nn.Module) -> None:
    parameter = model.get_parameter(WEIGHT)
    torch.utils.swap_tensors(parameter, nn.Parameter(-1.5 * parameter.detach()))


def storage_of_another(model: nn.Module) -> None:
    parameter = model.get_parameter(WEIGHT)
    with torch.no_grad():
        parameter.set_(-1.5 * parameter.detach())


def initialised(model: nn.Module) -> None:
    torch.manual_seed(5)
    nn.init.normal_(model.get_parameter(WEIGHT))


def cast(model: nn.Module) -> None:
    in_place(model)
    model.double().float()


NOTICED = [
    in_place,
    in_inference_mode,
    foreach,
    whole_load,
    child_load,
    assigned,
    swapped_load,
    new_parameter,
    data_of_another,
    from_a_vector,
    swapped,
    storage_of_another,
    initialised,
    cast,
]

# One of each way: the version of a tensor, none in inference mode, another Parameter, storage or dtype and back.
NOTICED_BY_COMPILED_CODE = [in_place, in_inference_mode, assigned, data_of_another, swapped, storage_of_another, cast]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, 32)


def frozen(state: nn.Module | None = None) -> tuple[nn.Module, dispatch.Patch]:
    model = models.Blocks() if state is None else copy.deepcopy(state)
    return model, sample.apply(model, (sample.blocks("layers.0", "layers.1"),), mode="infer")


@pytest.mark.parametrize("change", NOTICED)
def test_a_changed_weight_is_used_in_the_next_call(change: Callable[[nn.Module], None], x: Tensor) -> None:
    plain = models.Blocks()
    model, patch = frozen(plain)
    with torch.no_grad():
        before = model(x)
    change(plain)
    change(model)
    expected, _ = frozen(plain)
    with torch.no_grad():
        made = model(x)
        assert torch.equal(made, expected(x))
    assert not torch.equal(made, before)
    patch.verify()


@pytest.mark.slow
@pytest.mark.parametrize("change", NOTICED_BY_COMPILED_CODE)
def test_compiled_it_is_used_in_the_next_call(change: Callable[[nn.Module], None], x: Tensor) -> None:
    plain = models.Blocks()
    model, patch = frozen(plain)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        compiled(x)
        change(plain)
        change(model)
        expected, _ = frozen(plain)
        assert torch.equal(compiled(x), expected(x))
    patch.verify()


@pytest.mark.slow
def test_changes_in_place_compile_nothing_again(x: Tensor) -> None:
    model, _ = frozen()
    compilations = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=compilations, fullgraph=True)
    with torch.no_grad():
        for _ in range(12):
            in_place(model)
            assert torch.equal(compiled(x), model(x))
    assert compilations.frame_count == 1


def test_calls_with_other_weights_use_them_and_then_the_own_ones_again(x: Tensor) -> None:
    plain = models.Blocks()
    model, patch = frozen(plain)
    weights = others(plain)
    other, _ = frozen(plain)
    in_place(other)
    with torch.no_grad():
        own = model(x)
        assert torch.equal(torch.func.functional_call(model, weights, (x,)), other(x))
        patch.verify()
        assert torch.equal(model(x), own)
    patch.verify()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_other_weights_inside_of_compiled_code_raise(kind: Callable[[Tensor], Tensor], x: Tensor) -> None:
    model, patch = frozen()
    weights = {name: kind(value) for name, value in others(model).items()}
    compiled = torch.compile(lambda given, x: torch.func.functional_call(model, given, (x,)), backend="aot_eager")
    own = dict(model.named_parameters())
    with torch.no_grad():
        assert torch.equal(compiled(own, x), model(x))
        with pytest.raises(Exception, match=r"compiled code calls the module with other weights \(functional_call\)"):
            compiled(weights, x)
        computed = torch.compile(
            lambda x: torch.func.functional_call(model, {name: 2 * value for name, value in own.items()}, (x,)),
            backend="aot_eager",
        )
        with pytest.raises(Exception, match=r"compiled code calls the module with other weights \(functional_call\)"):
            computed(x)
    patch.verify()


@pytest.mark.slow
def test_other_weights_around_compiled_code_are_used(x: Tensor) -> None:
    plain = models.Blocks()
    model, _ = frozen(plain)
    other, _ = frozen(plain)
    in_place(other)
    model.compile(backend="aot_eager")
    with torch.no_grad():
        own = model(x)
        assert torch.equal(torch.func.functional_call(model, others(plain), (x,)), other(x))
        assert torch.equal(model(x), own)


class Tied(nn.Module):
    """Two linears with one weight, of which Dynamo meets the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x))


tied = Tied()


@pytest.mark.slow
def test_tied_weights_are_no_other_weights(x: Tensor) -> None:
    sample.apply(tied, (sample.linears("one", "two"),), mode="infer")
    with torch.no_grad():
        assert torch.equal(torch.compile(tied, backend="aot_eager", fullgraph=True)(x), tied(x))
        of_a_global = torch.compile(lambda x: tied(x), backend="aot_eager", fullgraph=True)
        assert torch.equal(of_a_global(x), tied(x))


def test_writes_through_data_are_found_by_verify_and_used_after_refresh(x: Tensor) -> None:
    plain = models.Blocks()
    model, patch = frozen(plain)
    for changed in (model, plain):
        for name, value in others(changed).items():
            changed.get_parameter(name).data.copy_(value)
    with torch.no_grad():
        model(x)
        with pytest.raises(dispatch.VerifyError, match=r"the weight changed since .* call patch.refresh"):
            patch.verify()
        address = model.layers[0].loka_weight_0.data_ptr()
        patch.refresh()
        assert model.layers[0].loka_weight_0.data_ptr() == address  # which CUDA graphs read
        assert torch.equal(model(x), frozen(plain)[0](x))
    patch.verify()


def test_a_bias_alone_quantizes_nothing(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = frozen()
    before = model.layers[0].loka.frozen_from
    with torch.no_grad():
        model.get_parameter("layers.0.up.0.bias").add_(1)
        model(x)
    assert model.layers[0].loka.frozen_from is before


def test_copies_notice_changes_of_their_own(x: Tensor) -> None:
    model, _ = frozen()
    with torch.no_grad():
        before = model(x)
    shallow, deep = copy.copy(model.layers[0]), copy.deepcopy(model)
    assert shallow.loka is not model.layers[0].loka
    child_load(deep)
    with torch.no_grad():
        assert torch.equal(shallow(x), model.layers[0](x))
        assert not torch.equal(deep(x), before)
        assert torch.equal(model(x), before)


def test_weights_under_vmap_raise(x: Tensor) -> None:
    model, _ = frozen()
    stacked = {name: torch.stack([value, 2 * value]) for name, value in others(model).items()}
    with torch.no_grad(), pytest.raises(dispatch.FrozenWeightError, match=r"vmap.*mode='train'"):
        torch.vmap(lambda weights: torch.func.functional_call(model, weights, (x,)))(stacked)


def test_the_signature_stays_that_of_the_forward() -> None:
    model, _ = frozen()
    plain = models.Blocks()
    names = [list(inspect.signature(each.layers[0].forward).parameters) for each in (model, plain)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_a_model_is_exported_with_dynamic_shapes_by_name(x: Tensor) -> None:
    model = models.mlp()
    sample.apply(model, mode="infer")
    layer = model[0]
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
        assert torch.equal(program.module()(x[:3]), layer(x[:3]))
