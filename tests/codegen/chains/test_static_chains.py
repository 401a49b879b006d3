"""Chains under static scales: numerics, what is counted, and that copies, compilers and policies take them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from loka import dispatch
from loka.codegen import render_package
from loka.kernels import call_counters
from loka.mods.norms import BlockNorm
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import Quantized, dequantize, quantize, static_scale
from loka.plan.plan import Plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.models import sum_models as sums

X, DY = 8.0, 16.0
Package = Callable[[Plan], ModuleType]

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning")  # that this is the CPU


def bodies() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "tower": chains.Tower(),
        "rms_norm": chains.Tower(norm=partial(nn.RMSNorm, eps=1e-6), activation=nn.Hardswish, bias=False),
        "linears": nn.Sequential(nn.Linear(48, 16, bias=False), nn.Linear(16, 48), nn.Linear(48, 32, bias=False)),
        "one": nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 40), nn.LayerNorm(40), nn.Sigmoid()),
        "alone": nn.Sequential(nn.Linear(48, 40, bias=False)),
        "biased": nn.Sequential(nn.Linear(48, 40)),
        "plain_norm": nn.Sequential(nn.RMSNorm(48, eps=1e-5, elementwise_affine=False), nn.Linear(48, 24)),
        "crosses": sums.Crosses(),
        "gated_blocks": sums.GatedBlocks(),
        "blocks": nn.Sequential(
            nn.Linear(48, 512, bias=False),
            BlockNorm(256),
            nn.Hardswish(),
            nn.Linear(512, 24),
            nn.GELU(),
            nn.Linear(24, 40),
        ),
        "residuals": sums.Residuals(),
        "swish": nn.Sequential(nn.Linear(48, 64), chains.SwishNorm(nn.LayerNorm(64), nn.Sigmoid()), nn.Linear(64, 24)),
        "swish_blocks": nn.Sequential(
            nn.Linear(48, 512), chains.SwishNorm(BlockNorm(256), nn.Hardsigmoid()), nn.Linear(512, 24)
        ),
    }


BODIES = bodies()


def kept(name: str) -> dict[str, object]:
    return chains.known_chain(X, DY, wgrad="down" not in name)


PLANS = chains.Plans(lambda name: chains.chain_plan(BODIES[name], chains.known_chain(X, DY)), BODIES)
RECIPES = {
    "divided": ("tower", chains.known_chain(X, DY, power_of_two=False)),
    "kept": ("crosses", kept),
    "small": ("tower", chains.known_chain(1.0, 1.0)),
}
OTHERS = chains.Plans(lambda name: chains.chain_plan(BODIES[RECIPES[name][0]], RECIPES[name][1]), RECIPES)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package of a plan; a plan object is rendered once."""
    made: dict[int, tuple[ModuleType, Plan]] = {}  # by id, with the plan, so that no other gets its id

    def of(plan: Plan) -> ModuleType:
        if id(plan) not in made:
            name = f"gen_known_{len(made)}"
            made[id(plan)] = plans.import_package(render_package(plan), tmp_path_factory.mktemp(name), name), plan
        return made[id(plan)][0]

    return of


def known(x: Tensor, amax: float | None, power_of_two: bool) -> Quantized:
    return quantize(x, format=Format.E4M3, scaling=Scaling.TENSORWISE, power_of_two=power_of_two, amax=amax)


class Simulated(torch.autograd.Function):
    """A linear in float64 on operands that are quantized as a chain under static scales does it."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, power_of_two: bool, kept: bool) -> Tensor:
        ctx.x, ctx.weight = dequantize(known(x, X, power_of_two)), dequantize(known(weight, None, power_of_two))
        ctx.power_of_two, ctx.kept = power_of_two, x if kept else None
        return ctx.x.double() @ ctx.weight.double().t()

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy_fp8 = dequantize(known(dy, DY, ctx.power_of_two)).double()
        dweight = dy_fp8.t() @ ctx.x.double() if ctx.kept is None else dy.t() @ ctx.kept
        return dy_fp8 @ ctx.weight.double(), dweight, None, None


def simulated(body: nn.Module, power_of_two: bool = True, kept: str = "-") -> nn.Module:
    def linear(module: nn.Linear, keeps: bool, x: Tensor) -> Tensor:
        y = Simulated.apply(x.reshape(-1, x.shape[-1]), module.weight, power_of_two, keeps)
        y = y if module.bias is None else y + module.bias
        return y.reshape(*x.shape[:-1], -1)

    made = copy.deepcopy(body).double()
    for name, child in made.named_modules():
        if isinstance(child, nn.Linear):
            child.forward = partial(linear, child, kept in name)
    return made


def operands(body: nn.Module, *shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(*shape)
    return x, torch.randn_like(body(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BODIES, "divided", "kept"])
def test_gradients_against_float64(package: Package, name: str) -> None:
    torch.manual_seed(1)
    body = BODIES[{"divided": "tower", "kept": "crosses"}.get(name, name)]
    made = package(OTHERS[name] if name in OTHERS else PLANS[name])
    x, dy = operands(body, 5, 33, 48)
    reference = simulated(body, power_of_two=name != "divided", kept="down" if name == "kept" else "-")
    expected = chains.gradients(chains.Holder(reference), x.double(), dy.double())
    model = chains.Holder(copy.deepcopy(body))
    with made.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
        assert patch.overflows() == ()
        counts = {label: call_counters.count(number) for number, label in patch._labels()}
    kept_ones = {(site, "wgrad") for site, _ in counts if name == "kept" and "down" in site}
    assert counts == {label: 0 if label in kept_ones else 1 for label in counts}
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert chains.error(value, expected[key]) < 5e-3, key
    with made.apply(model, mode="infer") as patch, torch.no_grad():
        assert torch.equal(model(x), found["y"])
        assert model(x[:0]).shape == (0, *dy.shape[1:])
        patch.verify(backward=False)


def test_a_plain_linear_is_a_chain_of_its_own(package: Package) -> None:
    site = plans.site_plan("a", **chains.known_chain(X, DY))
    other = plans.site_plan("b", **chains.known_chain(X / 4, DY))
    bindings = [plans.linear_binding([name]) for name in ("a", "b")]
    made = package(plans.make_plan([site, other], bindings))
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
    text = Path(made.kernels.__file__).read_text()
    assert text.count("\nclass ") == 1  # both maxima have one function


def test_overflow_is_counted_exactly_and_reported(package: Package) -> None:
    """Operands that are there as they are: the first input, and the output gradient of a last linear."""
    body = BODIES["linears"]
    made = package(chains.chain_plan(body, chains.known_chain(1.0, 0.5)))
    model = chains.Holder(copy.deepcopy(body))
    x, dy = operands(body, 33, 48)
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


def test_nan_infinity_and_rows_of_zeros(package: Package) -> None:
    body = BODIES["tower"]
    model = chains.Holder(copy.deepcopy(body))
    x, dy = operands(body, 16, 48)
    with package(PLANS["tower"]).apply(model) as patch:
        clean = chains.gradients(model, x, dy)["y"]
        x[3], x[5, 7], x[9, 1] = 0.0, torch.inf, torch.nan
        found = chains.gradients(model, x, dy)["y"]
        assert patch.overflows() == ()  # what is not finite is no overflow: it is NaN
    rest = [row for row in range(16) if row not in (3, 5, 9)]
    assert torch.equal(found[rest], clean[rest])
    assert found[3].isfinite().all()
    assert found[[5, 9]].isnan().all()


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48), (1, 48), (48,), (2, 3, 4, 48)])
def test_any_batch(package: Package, shape: tuple[int, ...]) -> None:
    model = chains.Holder(copy.deepcopy(BODIES["tower"]))
    x = torch.randn(shape)
    with package(PLANS["tower"]).apply(model):
        found = chains.gradients(model, x, torch.randn(shape))
    assert found["y"].shape == found["x"].shape == shape


def test_what_a_tile_is_enough_for_is_written_as_is_and_transposed() -> None:
    """A norm of whole rows needs a transposition; a bias, an activation and a norm of blocks do not."""
    layers = [nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 512, bias=False), BlockNorm(256), nn.Hardswish()]
    local = nn.Sequential(*layers, nn.Linear(512, 32))
    text = render_package(chains.chain_plan(local, chains.known_chain(X, DY)))["kernels.py"]
    called = re.findall(r"fused\.(\w+)\(", text[: text.index("\ndef body(")])
    assert [name for name in called if "_cast_transpose_" in name] == [
        "add_relu_e4m3_static_counted_cast_transpose_64",
        "block_norm_hardswish_e4m3_static_counted_eps_1e_06_cast_transpose_512",
        "add_backward_e4m3_static_counted_cast_transpose_32",
        "block_norm_hardswish_backward_e4m3_static_counted_eps_1e_06_cast_transpose_512",
        "add_relu_backward_e4m3_static_counted_cast_transpose_64",
    ]
    assert not [name for name in called if name.startswith("transpose")]
    tower = render_package(PLANS["tower"])["kernels.py"]
    assert tower.count("fused.transpose_2(") == 2
    assert (
        tower.count("fused.transpose_1(") == 1
    )  # of the last linear, whose output gradient is written as is and transposed


@pytest.mark.parametrize("name", ["linears", "tower", "crosses"])
def test_without_a_gradient_of_the_input_or_of_a_weight(package: Package, name: str) -> None:
    body = copy.deepcopy(BODIES[name])
    model = chains.Holder(body)
    x, dy = operands(body, 9, 48)
    first = next(name for name, child in model.named_modules() if isinstance(child, nn.Linear))
    weight = model.get_parameter(f"{first}.weight")
    with package(PLANS[name]).apply(model):
        expected = chains.gradients(model, x, dy)
        model.zero_grad()
        model(x).backward(dy)
        assert torch.equal(weight.grad, expected[f"{first}.weight"])
        weight.requires_grad_(False)
        model.zero_grad()
        (dx,) = torch.autograd.grad(model(wanted := x.clone().requires_grad_()), wanted, dy)
        assert torch.equal(dx, expected["x"])


@pytest.mark.slow
def test_compiled_graphs_count_as_eager_does(package: Package) -> None:
    body = BODIES["tower"]
    model = chains.Holder(copy.deepcopy(body))
    try:
        with package(OTHERS["small"]).apply(model) as patch:
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
            for rows in (33, 17):
                x, dy = operands(body, rows, 48)
                patch.reset()
                expected, eager = chains.gradients(model, x, dy), patch.overflows()
                assert {each.operand for each in eager} == {"input", "grad_output"}
                patch.reset()
                found = chains.gradients(compiled, x, dy)
                assert patch.overflows() == eager
                for key, value in expected.items():
                    assert torch.equal(found.get(key, found.get(f"_orig_mod.{key}")), value), key
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


def test_a_forward_that_runs_again_counts_again(package: Package) -> None:
    body = BODIES["tower"]
    model = chains.Holder(copy.deepcopy(body))
    x, dy = operands(body, 33, 48)
    with package(OTHERS["small"]).apply(model) as patch:
        expected, once = chains.gradients(model, x, dy), patch.overflows()
        patch.reset()
        found = chains.gradients(Checkpointed(model), x, dy)
        for key, value in expected.items():
            assert torch.equal(found.get(key, found.get(f"inner.{key}")), value), key
        twice = [2 * each.elements if each.operand == "input" else each.elements for each in once]
        assert [each.elements for each in patch.overflows()] == twice


def test_buffers_are_no_part_of_the_model(package: Package, tmp_path: Path) -> None:
    body = BODIES["tower"]
    model = chains.Holder(copy.deepcopy(body))
    plain = chains.Holder(copy.deepcopy(body))
    x, dy = operands(body, 9, 48)
    patch = package(OTHERS["small"]).apply(model)
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
def test_moved_and_cast_models_keep_scales_in_float32(package: Package, mode: str) -> None:
    model = chains.Holder(copy.deepcopy(BODIES["tower"]))
    x, _ = operands(model, 9, 48)
    with package(OTHERS["small"]).apply(model, mode=mode) as patch, torch.no_grad():
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


def test_other_recipes_are_no_such_chain() -> None:
    """A wgrad under another scale than dgrad's, and a weight that is known too, are linears as they were."""
    whole = chains.known_chain(X, DY)
    x, once = whole["fprop"]
    dy, _ = whole["dgrad"]
    for recipe in (
        {**whole, "wgrad": (replace(dy, amax=1.0), x)},
        {**whole, "fprop": (x, replace(x, amax=2.0))},
        {**whole, "dgrad": (once, once), "wgrad": (once, x)},
        {**whole, "dgrad": (replace(dy, format=Format.E5M2), once), "wgrad": (replace(dy, format=Format.E5M2), x)},
    ):
        files = render_package(chains.chain_plan(BODIES["alone"], recipe))
        assert "fused.py" not in files
