"""Extreme numbers, other dtypes and sizes of 0 and 1: what torch does, or what docs/kernels.md says instead."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka import dispatch
from loka.codegen import render_package
from loka.errors import InputError
from loka.plan.planner import make_plan
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen.modded_models import Workplace
from tests.support.models import extreme_models as models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]

ROW = 2  # of the extreme numbers
OTHERS = [0, 1, 3, 4, 5]
ALONE = "compute: fp8, scaling: rowwise"
TENSORWISE = "compute: fp8, scaling: tensorwise"
FUSED = f"{ALONE}, power_of_two: true, requantize_transpose: true, fuse: always"
RECIPES = [ALONE, TENSORWISE, FUSED]
FACTORIES = ["linear", "tower", "pre_norm", "narrow"]

Make = Callable[[str, str], ModuleType]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Packages of the models by their factory and recipe, each made once."""
    folder, made, numbers = tmp_path_factory.mktemp("extreme"), dict[tuple[str, str], ModuleType](), itertools.count()

    def package(factory: str, recipe: str) -> ModuleType:
        if (factory, recipe) not in made:
            inputs = "narrow_inputs" if factory == "narrow" else "inputs"
            path = Path(folder, "policy.yaml")
            path.write_text(
                f'version: 1\nname: extreme\nmodel: {{factory: "{models.__name__}:{factory}", '
                f'inputs: "{models.__name__}:{inputs}", batch_size: 64}}\ndefaults: {{{recipe}}}\n'
            )
            files = render_package(make_plan(path))
            made[factory, recipe] = plans.import_package(files, folder, f"extreme_{next(numbers)}")
        return made[factory, recipe]

    return package


def features(factory: str, batch: int = 6) -> Tensor:
    return (models.narrow_inputs if factory == "narrow" else models.inputs)(batch)[0]


def bound(make: Make, factory: str, recipe: str, mode: str = "train") -> nn.Module:
    model: nn.Module = getattr(models, factory)()
    make(factory, recipe).apply(model, mode=mode)
    return model


def with_row(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[ROW] = value
    return x


def step(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of the input for a sum of what is finite of it."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.nan_to_num(0.0, 0.0, 0.0).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("recipe", [ALONE, FUSED])
@pytest.mark.parametrize("value", [1e38, 3.4e38, float("inf"), float("nan"), 1e-42])
@pytest.mark.parametrize("factory", FACTORIES)
def test_an_extreme_row_leaves_the_others_alone_with_scales_of_rows(
    make: Make, factory: str, value: float, recipe: str
) -> None:
    model, x = bound(make, factory, recipe), features(factory)
    (y, dx), (extreme, dx_extreme) = step(model, x), step(model, with_row(x, value))
    assert y.isfinite().all()
    torch.testing.assert_close(extreme[OTHERS], y[OTHERS], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx_extreme[OTHERS], dx[OTHERS], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("factory", FACTORIES)
def test_a_row_that_is_not_finite_is_not_finite_after_it(make: Make, factory: str, recipe: str) -> None:
    """NaN where torch has NaN or an infinity: e4m3 has no infinity."""
    plain, model, x = getattr(models, factory)(), bound(make, factory, recipe), features(factory)
    for value in (float("inf"), float("-inf"), float("nan")):
        expected, found = plain(with_row(x, value)), model(with_row(x, value))
        lost = ~expected[ROW].isfinite()
        assert lost.any()
        assert found[ROW][lost].isnan().all()
        assert found[OTHERS].isfinite().all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-37])
@pytest.mark.parametrize("factory", ["linear", "tower"])
def test_rows_of_next_to_nothing_give_what_zeros_give(make: Make, factory: str, value: float, recipe: str) -> None:
    model, x = bound(make, factory, recipe), features(factory)
    torch.testing.assert_close(model(with_row(x, value)), model(with_row(x, 0.0)), rtol=0, atol=1e-30)


def test_a_norm_whose_squares_overflow_is_nan_in_torch_and_finite_in_a_fused_kernel(make: Make) -> None:
    x = with_row(features("tower"), 1e38)
    assert models.tower()(x)[ROW].isnan().all()
    assert bound(make, "tower", ALONE)(x)[ROW].isnan().all()
    assert bound(make, "tower", FUSED)(x).isfinite().all()


def test_between_gemms_a_fused_chain_does_not_overflow_in_float16(make: Make) -> None:
    def half(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            model.get_parameter("1.weight").fill_(6e4)  # a normalised number above 1.1 is beyond float16
            model.get_parameter("3.weight").mul_(1e-3)
        return model.half()

    x = features("tower").half()
    assert not half(models.tower())(x).isfinite().all()
    assert half(bound(make, "tower", FUSED))(x).isfinite().all()


def test_one_scale_for_a_tensor_is_that_of_its_largest_number(make: Make) -> None:
    model, x = bound(make, "linear", TENSORWISE), features("linear")
    found = model(with_row(x, 1e38))
    assert torch.equal(found[OTHERS], model.get_parameter("0.bias").expand(5, -1))
    assert not torch.equal(model(with_row(x, float("inf")))[OTHERS], found[OTHERS])


@pytest.mark.parametrize("recipe", [ALONE, FUSED])
@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
def test_an_input_of_another_dtype_than_the_weights_raises_as_in_torch(
    make: Make, factory: str, dtype: torch.dtype, recipe: str
) -> None:
    x = features(factory).to(dtype)
    model = bound(make, factory, recipe)
    with pytest.raises(RuntimeError):
        getattr(models, factory)()(x)
    if factory == "linear" or (recipe == FUSED and dtype.is_floating_point):
        with pytest.raises(dispatch.DtypeError, match=f"the same dtype, but got {dtype} and torch.float32: convert"):
            model(x)
    else:
        with pytest.raises((RuntimeError, InputError)):
            model(x)


@pytest.mark.parametrize("factory", ["linear", "tower"])
def test_under_autocast_dtypes_may_differ(make: Make, factory: str) -> None:
    model, x = bound(make, factory, ALONE), features(factory)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x.bfloat16()).dtype == model(x.half()).dtype == torch.bfloat16
        with pytest.raises(dispatch.DtypeError):
            model(x.int())


@pytest.mark.parametrize("recipe", [ALONE, FUSED])
def test_frozen_weights_take_any_floating_point_dtype(make: Make, recipe: str) -> None:
    model, x = bound(make, "linear", recipe, "infer"), features("linear")
    with torch.no_grad():
        assert model(x.bfloat16()).dtype == torch.bfloat16
        with pytest.raises(InputError):
            model(x.int())


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("factory", FACTORIES)
def test_batches_of_nothing_and_of_one(make: Make, factory: str, recipe: str, mode: str) -> None:
    plain, model, x = getattr(models, factory)(), bound(make, factory, recipe, mode), features(factory)
    shapes = [(0,), (1,), (0, 3), (2, 0), (1, 1), ()]
    for shape in shapes:
        some = x[:1].expand(*shape, x.shape[-1]) if shape else x[0]
        with torch.set_grad_enabled(mode == "train"):
            expected, found = plain(some), model(some)
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0.2, atol=0.2)
        if mode == "train":
            assert step(model, some)[1].shape == some.shape


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(0, 1), (3, 0), (2, 0, 1), (0,)])
def test_frozen_weights_refuse_a_batch_of_nothing_of_another_width(
    make: Make, shape: tuple[int, ...], recipe: str
) -> None:
    model = bound(make, "tower", recipe, "infer")
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            models.tower()(torch.empty(shape))
        with pytest.raises(InputError, match=rf"{features('tower').shape[-1]} elements got an input of shape"):
            model(torch.empty(shape))


def test_a_fused_interaction_asks_for_one_dtype_too(workplace: Workplace) -> None:
    workplace.models.SIZES.update(kind="wukong", embeddings=32, dim=64, layers=2, rank=16)
    _, files, package = workplace.make("sized", inputs="sized_inputs")
    assert "fm_interaction" in files["kernels.py"]
    model, (x,) = workplace.models.sized(), workplace.models.sized_inputs(4)
    with pytest.raises(RuntimeError):
        model(x.bfloat16())
    package.apply(model)
    assert model(x).isfinite().all()
    with pytest.raises(dispatch.DtypeError):
        model(x.bfloat16())
