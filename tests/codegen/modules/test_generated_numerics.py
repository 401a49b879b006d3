"""Generated quantizers are the reference bit for bit; generated linears have the gradients of their recipes."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka import dispatch
from loka.codegen import render_package
from loka.errors import InputError
from loka.numerics.enums import OPERANDS, Format, Gemm, Operand, Range, Scaling
from loka.numerics.quantize import dequantize, quantize
from loka.numerics.recipe import OperandRecipe
from loka.numerics.scalings import PROBED
from loka.plan.plan import SitePlan
from tests.support.codegen import codegen_plans as plans


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return plans.import_package(render_package(plans.mixed_plan()), tmp_path_factory.mktemp("mixed"), "gen_numerics")


@pytest.fixture(scope="module")
def forwards(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    return plans.import_package(render_package(plans.forward_plan()), tmp_path_factory.mktemp("fwd"), "gen_forwards")


ALL_RECIPES = list(
    dict.fromkeys(  # scales of blockwise_1x32 are always powers of two
        OperandRecipe(format=format, scaling=scaling, power_of_two=pow2, range=kind, amax=amax)
        for format in Format
        for scaling in sorted(set(Scaling) - PROBED)
        for pow2 in (False, True)
        for kind, amax in ((Range.DYNAMIC, None), (Range.STATIC, 0.37))
    )
)


@pytest.fixture(scope="module")
def quantizers(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    sites = [plans.site_plan(f"m.{i}", (r, r), (r, r), (r, r)) for i, r in enumerate(ALL_RECIPES)]
    plan = plans.make_plan(sites, [plans.linear_binding((site.site.name,)) for site in sites])
    return plans.import_package(render_package(plan), tmp_path_factory.mktemp("quantizers"), "gen_quantizers")


def name_of(recipe: OperandRecipe) -> str:
    scaling = recipe.scaling.value.removeprefix("blockwise_")
    static = "_amax_0p37" if recipe.range is Range.STATIC else ""
    return f"{recipe.format}_{scaling}{static}{'_pow2' if recipe.power_of_two else ''}"


def hard_matrices() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(70, 300, generator=generator)
    spread = plain * torch.logspace(-30, 30, 300)
    odd = plain[:, :130].clone()
    odd[0] = 0
    odd[1, 3], odd[1, 4], odd[2, 5] = float("inf"), -float("inf"), float("nan")
    odd[3] = float("nan")
    odd[4, 1] = -0.0
    odd[5] = 1e-40
    odd[6] = 3.4e38
    wide = torch.randn(3, 1, generator=generator, dtype=torch.float64)
    return [plain, spread, odd, plain.bfloat16(), plain.t(), wide, plain[:1, :16], plain[:129, ::3]]


@pytest.mark.parametrize("recipe", ALL_RECIPES, ids=name_of)
def test_quantizers_are_the_reference_bit_for_bit(quantizers: ModuleType, recipe: OperandRecipe) -> None:
    generated = getattr(quantizers.kernels, name_of(recipe))
    for x in hard_matrices():
        values, scale = generated(x)
        expected = quantize(
            x, format=recipe.format, scaling=recipe.scaling, power_of_two=recipe.power_of_two, amax=recipe.amax
        )
        assert values.is_contiguous()
        assert values.dtype == expected.values.dtype
        assert torch.equal(values.view(torch.uint8), expected.values.view(torch.uint8))
        assert torch.equal(scale, expected.scale)
        assert scale.shape == expected.scale.shape


def rounded(matrix: Tensor, recipe: OperandRecipe) -> Tensor:
    """What a quantized matrix stands for, in float64."""
    options = {"power_of_two": recipe.power_of_two, "amax": recipe.amax}
    return dequantize(quantize(matrix, format=recipe.format, scaling=recipe.scaling, **options)).double()


def product(site: SitePlan, gemm: Gemm, operands: dict[Operand, Tensor]) -> Tensor:
    """One GEMM in float64 on operands as the plan rounds them."""
    planned = {plan.gemm: plan for plan in site.gemms}[gemm]
    a, b = (operands[operand] for operand in OPERANDS[gemm])
    a, b = (a.t() if gemm is Gemm.WGRAD else a, b if gemm is Gemm.FPROP else b.t())
    if planned.operands is not None:
        a, b = rounded(a, planned.operands[0]), rounded(b, planned.operands[1])
    return a.double() @ b.double().t()


@pytest.mark.parametrize("index", range(len(plans.mixed_plan().sites)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_recipe(mixed: ModuleType, index: int, dtype: torch.dtype) -> None:
    site = plans.mixed_plan().sites[index]
    torch.manual_seed(index)
    x = torch.randn(5, 7, 48, dtype=dtype, requires_grad=site.site.input_grad)
    layer = nn.Linear(48, 32, bias=mixed.BINDINGS[index].shapes[-1][0] == "bias", dtype=dtype)
    dy = torch.randn(5, 7, 32).to(dtype)
    y = bound_forward(mixed, index, layer, x)
    y.backward(dy)
    rows, dy_rows = x.detach().reshape(-1, 48), dy.reshape(-1, 32)
    operands = {Operand.INPUT: rows, Operand.WEIGHT: layer.weight.detach(), Operand.GRAD_OUTPUT: dy_rows}
    tolerance = {"rtol": 2e-5, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    expected = product(site, Gemm.FPROP, operands) + (0 if layer.bias is None else layer.bias.double())
    assert y.dtype == dtype
    torch.testing.assert_close(y.double().reshape(-1, 32), expected, **tolerance)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == dtype
    torch.testing.assert_close(layer.weight.grad.double(), product(site, Gemm.WGRAD, operands), **tolerance)
    if site.site.input_grad:
        assert x.grad is not None
        expected_dx = product(site, Gemm.DGRAD, operands)
        torch.testing.assert_close(x.grad.double().reshape(-1, 48), expected_dx, **tolerance)
    if layer.bias is not None:
        assert layer.bias.grad is not None
        torch.testing.assert_close(layer.bias.grad.float(), dy_rows.float().sum(0), rtol=2e-2, atol=0.1)


class Names(nn.Module):
    """A model whose submodules have the names of a plan's bindings."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for path, module in modules.items():
            self.add_module(path, module)


class Model(nn.Module):
    """tower.0.fc ... tower.7.fc, as `mixed_plan` names them."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Names(fc=layer) for layer in layers)


def bound_forward(package: ModuleType, index: int, layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's output through the generated class of binding `index`."""
    others = [nn.Linear(48, 32, bias=binding.shapes[-1][0] == "bias") for binding in package.BINDINGS]
    others[index] = layer
    patch = package.apply(Model(others))
    try:
        return layer(x)
    finally:
        patch.remove()


def test_empty_batches_and_odd_ones(mixed: ModuleType) -> None:
    for index in range(len(mixed.BINDINGS)):
        layer = nn.Linear(48, 32, bias=mixed.BINDINGS[index].shapes[-1][0] == "bias")
        for shape in ((0, 48), (2, 0, 48), (1, 48), (3, 48), (48,)):
            x = torch.randn(shape, requires_grad=True)
            y = bound_forward(mixed, index, layer, x)
            assert y.shape == (*shape[:-1], 32)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.shape == shape


def test_autocast_and_no_second_derivative(mixed: ModuleType) -> None:
    layer, x = nn.Linear(48, 32), torch.randn(4, 48, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = bound_forward(mixed, 0, layer, x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    (dx,) = torch.autograd.grad(bound_forward(mixed, 0, layer, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


class Tower(nn.Module):
    """layer_norm -> linear -> silu with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(48)
        self.fc = nn.Linear(48, 48)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(self.norm(x))) + x


class Cross(nn.Module):
    """One low-rank cross layer on Parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.ParameterList([torch.randn(48, 16) / 7])
        self.w = nn.ParameterList([torch.randn(48, 16) / 4])
        self.b = nn.ParameterList([torch.zeros(48)])

    def forward(self, x: Tensor) -> Tensor:
        return x * nn.functional.linear(x @ self.v[0], self.w[0], self.b[0])


def quantized(model: nn.Module, x: Tensor, binding: dispatch.Binding, mode: str) -> Tensor:
    """What a generated forward gives, called on the module as it is, with counts of its own."""
    model.loka = dispatch.CallCounters(binding.sites[0], binding, mode)
    frozen = binding.bound.loka_quantized(model) if mode == "infer" else {}
    model.loka_frozen = lambda site: frozen.get(site)
    return binding.bound.forward(model, x)


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize(("index", "kind"), [(0, Tower), (1, Cross)])
def test_straight_line_forwards(forwards: ModuleType, index: int, kind: type[nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, 48)
    with torch.no_grad():
        expected, found = model(x), quantized(model, x, forwards.BINDINGS[index], mode)
    error = (found - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.06  # it is FP8, and it is the same function
    with torch.no_grad():
        assert torch.equal(found, quantized(model, x, forwards.BINDINGS[index], "train"))


@pytest.mark.parametrize(("index", "kind"), [(0, Tower), (1, Cross)])
def test_without_rounding_it_is_the_same_function(
    forwards: ModuleType, index: int, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unrounded(a: Tensor, scale_a: Tensor, b: Tensor, *rest: object) -> Tensor:
        return a @ b.t()

    monkeypatch.setattr(forwards.kernels, "e4m3_rowwise", lambda x: (x, x))
    monkeypatch.setattr(forwards.kernels.dispatch, "scaled_mm", unrounded)
    torch.manual_seed(0)
    model, x = kind(), torch.randn(64, 48, requires_grad=True)
    wanted = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), wanted)
    found = torch.autograd.grad(quantized(model, x, forwards.BINDINGS[index], "train").square().sum(), wanted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_compiles_as_one_graph(forwards: ModuleType) -> None:
    torch.manual_seed(0)
    model, x = Tower(), torch.randn(8, 48, requires_grad=True)
    generated = forwards.BINDINGS[0].bound
    eager = quantized(model, x, forwards.BINDINGS[0], "train")
    (expected,) = torch.autograd.grad(eager.square().sum(), x)
    compiled = torch.compile(lambda value: generated.forward(model, value), fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
    torch.testing.assert_close(found, expected)
    torch._dynamo.reset()


@pytest.mark.slow
def test_products_in_a_row_compile_with_symbols_for_sizes(mixed: ModuleType) -> None:
    torch.manual_seed(0)
    layers = linears(mixed, torch.float32)

    def both(x: Tensor) -> Tensor:
        return torch.cat([layer(x) * layer(x + 1) for layer in (layers[0], layers[3])], 1)  # rowwise, and blockwise

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    try:
        with mixed.apply(Model(layers)):
            for rows in (8, 300):
                x = torch.randn(rows, 48, requires_grad=True)
                found, expected = compiled(x), both(x)
                torch.testing.assert_close(found, expected)
                (dx,), (exact,) = torch.autograd.grad(found.sum(), x), torch.autograd.grad(expected.sum(), x)
                torch.testing.assert_close(dx, exact)
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
def test_each_linear_alone_compiles_with_symbols_for_sizes(mixed: ModuleType) -> None:
    """Dynamo of torch 2.11 failed on blockwise ones in bfloat16, whose quantizers were the first to fix the width."""
    torch.manual_seed(0)
    layers = linears(mixed, torch.bfloat16)
    try:
        with mixed.apply(Model(layers)):
            for layer in layers:
                torch._dynamo.reset()
                compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
                for rows in (8, 300):
                    x = torch.randn(rows, 48, dtype=torch.bfloat16)
                    found, expected = compiled(x), layer(x)
                    torch.testing.assert_close(found, expected)
                    (dw,) = torch.autograd.grad(found.sum(), layer.weight)
                    (exact,) = torch.autograd.grad(expected.sum(), layer.weight)
                    torch.testing.assert_close(dw, exact)
    finally:
        torch._dynamo.reset()


def test_rows_of_another_width_are_refused(mixed: ModuleType) -> None:
    layers = linears(mixed, torch.float32)
    with (
        mixed.apply(Model(layers)),
        pytest.raises(InputError, match=r"for rows of 48 elements got an input of shape \(8, 96\)"),
    ):
        layers[0](torch.randn(8, 96))


def linears(package: ModuleType, dtype: torch.dtype) -> list[nn.Linear]:
    """The linears that a package of `mixed_plan` binds."""
    return [nn.Linear(48, 32, bias=binding.shapes[-1][0] == "bias", dtype=dtype) for binding in package.BINDINGS]
