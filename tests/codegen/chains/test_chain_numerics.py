"""Generated chains against autograd in float64 with simulated quantization, and against the layers as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.codegen import render_package
from loka.dispatch import NonFiniteError
from loka.graph.ir import ForwardIR, SiteCall, Statement
from loka.graph.source import forward_source_hash
from loka.kernels import call_counters
from loka.kernels.fused.norm import norm_reference
from loka.plan.plan import BindingKind, Plan, PlannedBinding
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.models import sum_models as sums

pytestmark = pytest.mark.slow

Package = Callable[..., ModuleType]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """The package of a plan; a plan object is rendered once."""
    made: dict[int, tuple[object, ModuleType]] = {}

    def of(plan: object) -> ModuleType:
        if id(plan) not in made:
            name = f"gen_chain_{len(made)}"
            files = render_package(plan)  # type: ignore[arg-type]
            made[id(plan)] = (plan, plans.import_package(files, tmp_path_factory.mktemp(name), name))
        return made[id(plan)][1]

    return of


def stacks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    rms = partial(nn.RMSNorm, eps=1e-6)
    return {
        "layer_norm_silu": chains.Tower(),
        "rms_norm_hardswish": chains.Tower(norm=rms, activation=nn.Hardswish),
        "no_affine_relu": chains.Tower(norm=partial(nn.LayerNorm, elementwise_affine=False), activation=nn.ReLU),
        "no_bias_gelu": chains.Tower(norm=partial(nn.LayerNorm, bias=False), activation=nn.GELU, bias=False),
        "linears": nn.Sequential(nn.Linear(48, 16, bias=False), nn.Linear(16, 48), nn.Linear(48, 32, bias=False)),
        "norm_and_linears": nn.Sequential(
            nn.LayerNorm(48), nn.Linear(48, 24), nn.Linear(24, 40, bias=False), nn.ReLU()
        ),
        "activations": nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.Sigmoid()),
        "one": nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 40), nn.LayerNorm(40), nn.Sigmoid()),
        "norm_at_the_end": nn.Sequential(nn.Linear(48, 13), nn.LayerNorm(13)),
        "crosses": sums.Crosses(),
        "crosses_apart": sums.Apart(),
        "gated": sums.Gated(),
        "gated_blocks": sums.GatedBlocks(),
        "weighted": sums.Weighted(),
        "residuals": sums.Residuals(),
        "broadcast": sums.Broadcast(),
        "plain_norm_before": nn.Sequential(nn.RMSNorm(48, eps=1e-5, elementwise_affine=False), nn.Linear(48, 24)),
    }


STACKS = stacks()
FP8 = chains.Plans(lambda name: chains.chain_plan(STACKS[name]), STACKS)
ROWWISE = chains.Plans(lambda name: chains.chain_plan(STACKS[name], chains.ROWWISE_CHAIN), ("layer_norm_silu", "one"))
WITHOUT_KERNELS = {"linears", "crosses_apart", "broadcast"}  # where the GEMMs stay in the model's dtype
PLAIN = chains.Plans(
    lambda name: chains.chain_plan(STACKS[name], chains.AS_IS), [name for name in STACKS if name not in WITHOUT_KERNELS]
)


def trained(package: ModuleType, body: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    model = chains.Holder(copy.deepcopy(body))
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    return found


def operands(body: nn.Module, *shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(*shape)
    return x, torch.randn_like(body(x))


@pytest.mark.parametrize("name", STACKS)
def test_fp8_chains_against_float64_with_simulated_quantization(package: Package, name: str) -> None:
    torch.manual_seed(1)
    body = STACKS[name]
    x, dy = operands(body, 5, 33, 48)
    plain = chains.gradients(chains.Holder(body), x, dy)
    for plan in (FP8[name], *([ROWWISE[name]] if name in ROWWISE else [])):
        # Values that lie between two of e4m3 may be rounded either way: few of them.
        found = chains.assert_near(package(plan), body, x, dy, chains.simulated(body), 5e-3)
        for key, value in found.items():
            assert chains.error(value, plain[key]) < 0.3, key  # of which most where ReLU changes sides


@pytest.mark.parametrize("name", PLAIN)
def test_chains_in_the_models_dtype_are_the_same_function(package: Package, name: str) -> None:
    torch.manual_seed(2)
    body = STACKS[name]
    x, dy = operands(body, 5, 33, 48)
    expected = chains.gradients(chains.Holder(copy.deepcopy(body).double()), x.double(), dy.double())
    found = trained(package(PLAIN[name]), body, x, dy)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value.double(), expected[key], rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", STACKS)
def test_without_rounding_a_chain_is_the_same_function(
    package: Package, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(a: Tensor, scale_a: Tensor, b: Tensor, *rest: object) -> Tensor:
        return a @ b.t() + (rest[-1] if isinstance(rest[-1], Tensor) and rest[-1].dim() == 1 else 0.0)

    def transposed(values: Tensor, scale: Tensor, of_the_batch: bool = False) -> tuple[Tensor, Tensor]:
        return values.t().contiguous(), values.new_ones(values.shape[1], 1)

    made = package(FP8[name])
    monkeypatch.setattr(norm_reference, "quantize_rows", lambda y: (y.clone(), y.new_ones(len(y), 1), y.new_ones(1)))
    monkeypatch.setattr(norm_reference, "requantize_transpose", transposed)
    monkeypatch.setattr(made.kernels.dispatch, "scaled_mm", product)
    torch.manual_seed(3)
    body = STACKS[name]
    x, dy = operands(body, 33, 48)
    expected = chains.gradients(chains.Holder(copy.deepcopy(body).double()), x.double(), dy.double())
    model = chains.Holder(copy.deepcopy(body))
    with made.apply(model):
        found = chains.gradients(model, x, dy)
    for key, value in found.items():
        torch.testing.assert_close(value.double(), expected[key], rtol=1e-4, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", STACKS)
def test_each_gemm_runs_once_and_the_frozen_form_agrees(package: Package, name: str) -> None:
    torch.manual_seed(4)
    body = copy.deepcopy(STACKS[name])
    x, dy = operands(body, 17, 48)
    model = chains.Holder(body)
    made = package(FP8[name])
    with made.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        counts = {label: call_counters.count(number) for number, label in patch._labels()}
        assert set(counts.values()) == {1}
        assert len(counts) == 3 * len(patch.sites)
    with made.apply(model, mode="infer") as patch:
        with torch.no_grad():
            frozen = model(x)
            frozen_empty = model(x[:0])
        patch.verify(backward=False)
        assert all(name.startswith("body.") and "loka" not in name for name in model.state_dict())
    assert torch.equal(frozen, found["y"])
    assert frozen_empty.shape == (0, *dy.shape[1:])


def test_the_frozen_form_in_the_models_dtype(package: Package) -> None:
    model = chains.Holder(copy.deepcopy(STACKS["layer_norm_silu"]))
    x = torch.randn(9, 48)
    made = package(PLAIN["layer_norm_silu"])
    with torch.no_grad():
        expected = model(x)
        with made.apply(model, mode="infer"):
            assert made.BINDINGS[0].infer is not None
            torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("recipe", ["fp8", "plain"])
@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48), (1, 48), (48,), (2, 3, 4, 48)])
def test_any_batch(package: Package, recipe: str, shape: tuple[int, ...]) -> None:
    body = copy.deepcopy(STACKS["layer_norm_silu"])
    model, x = chains.Holder(body), torch.randn(shape)
    made = package((FP8 if recipe == "fp8" else PLAIN)["layer_norm_silu"])
    expected = chains.gradients(model, x, torch.ones(shape))
    with made.apply(model):
        found = chains.gradients(model, x, torch.ones(shape))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.shape == expected[key].shape, key
        assert x.numel() == 0 or recipe == "fp8" or torch.allclose(value, expected[key], rtol=1e-3, atol=1e-4), key


def test_inputs_that_are_not_contiguous(package: Package) -> None:
    model = chains.Holder(copy.deepcopy(STACKS["one"]))
    x, dy = torch.randn(48, 21).t(), torch.randn(40, 21).t()
    with package(FP8["one"]).apply(model):
        strided = chains.gradients(model, x, dy)
        wide = chains.gradients(model, torch.cat([x, x], 1)[:, 48:], dy)
        plain = chains.gradients(model, x.contiguous(), dy.contiguous())
        broadcast = chains.gradients(model, x, torch.ones(1, 1).expand(21, 40))
        ones = chains.gradients(model, x, torch.ones(21, 40))
    for key, value in plain.items():
        # The reference adds up a row in another order where its memory lies otherwise.
        assert chains.error(strided[key], value) < 1e-3
        assert chains.error(wide[key], value) < 1e-3
        assert chains.error(broadcast[key], ones[key]) < 1e-3


@pytest.mark.parametrize(
    ("made_by", "name"),
    [(FP8, "layer_norm_silu"), (PLAIN, "layer_norm_silu"), (FP8, "linears")],
    ids=["fp8", "plain", "linears"],
)
def test_frozen_parameters_and_inputs_without_gradients(package: Package, made_by: chains.Plans, name: str) -> None:
    made = package(made_by[name])
    body = STACKS[name]
    x, dy = operands(body, 8, 48)
    names = [name for name, _ in body.named_parameters()]
    whole = trained(made, body, x, dy)
    for frozen in (names, names[:1], names[1:], [name for name in names if "weight" in name], []):
        model = chains.Holder(copy.deepcopy(body))
        for name in frozen:
            model.get_parameter(f"body.{name}").requires_grad_(False)
        with made.apply(model):
            found = chains.gradients(model, x, dy)
        assert found.keys() == {"y", "x"} | {f"body.{name}" for name in names if name not in frozen}
        assert all(torch.equal(value, whole[key]) for key, value in found.items())


@pytest.mark.parametrize("name", ["linears", "plain_norm_before", "layer_norm_silu"])
def test_a_first_input_without_gradient_has_no_dgrad(package: Package, name: str) -> None:
    made = package(chains.chain_plan(STACKS[name], input_grad=False))
    body = nn.Sequential(*copy.deepcopy(STACKS[name])) if name != "layer_norm_silu" else copy.deepcopy(STACKS[name])
    model = chains.Holder(body)
    x = torch.randn(8, 48)
    with made.apply(model) as patch:
        y = model(x)
        y.backward(torch.ones_like(y))
        patch.verify()
        counts = {label: call_counters.count(number) for number, label in patch._labels()}
        first = patch.sites[0]
    # A norm's parameters before the first linear need the gradient of its input.
    assert counts[first, "dgrad"] == (1 if name == "layer_norm_silu" else 0)
    assert counts[first, "wgrad"] == 1
    expected = trained(package(FP8[name]), STACKS[name], x, torch.ones_like(y))
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[key])


def test_plain_linears_are_chains_of_one(package: Package) -> None:
    made = package(chains.linear_plan())
    model = nn.Module()
    model.a, model.b = nn.Linear(48, 32), nn.Linear(48, 32)
    x, dy = torch.randn(7, 48, requires_grad=True), torch.randn(7, 32)
    with made.apply(model) as patch:
        (model.a(x) + model.b(x)).backward(dy)
        patch.verify()
    expected = chains.gradients(chains.Holder(chains.simulated(model.a)), x.detach().double(), dy.double())
    assert model.a.weight.grad is not None
    torch.testing.assert_close(model.a.weight.grad.double(), expected["body.weight"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.a.bias.grad.double(), expected["body.bias"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("made_by", [FP8, PLAIN], ids=["fp8", "plain"])
def test_autocast_bfloat16_and_mixed_parameters(package: Package, made_by: chains.Plans) -> None:
    made = package(made_by["layer_norm_silu"])
    model = chains.Holder(copy.deepcopy(STACKS["layer_norm_silu"]))
    x = torch.randn(64, 48, requires_grad=True)
    expected = chains.gradients(model, x, torch.ones(64, 48))
    model.zero_grad()
    with made.apply(model) as patch:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model.body.mlp[0](x).dtype == torch.bfloat16
            y = model.body(x)
        y.float().sum().backward()
        patch.verify()
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        assert model.body.mlp[3].weight.grad is not None
        assert chains.error(y, expected["y"]) < 0.1
        assert chains.error(x.grad, expected["x"]) < 0.15
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert chains.error(parameter.grad, expected[name]) < 0.2, name
        model.bfloat16()
        found = chains.gradients(model, x.bfloat16(), torch.ones(64, 48, dtype=torch.bfloat16))
    assert {value.dtype for value in found.values()} == {torch.bfloat16}


class Cross(nn.Module):
    """A low-rank cross layer on Parameters, and a product with a Parameter from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.ParameterList([torch.randn(48, 16) / 7])
        self.w = nn.ParameterList([torch.randn(48, 16) / 4])
        self.b = nn.ParameterList([torch.randn(48)])

    def forward(self, x: Tensor) -> Tensor:
        return x * F.linear(x @ self.v[0], self.w[0], self.b[0])


class Compress(nn.Module):
    """out = norm(left @ x), as the linear compression block of a Wukong layer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(6, 48) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(self.left @ x, (16,))


def compress_plan() -> Plan:
    call = SiteCall("left", "{1}.transpose(-1, -2)", "{0}", None, "{0}.transpose(-1, -2)")
    statements = (
        Statement("product", "matmul", "{0} @ {1}", (plans.attribute("self.left"), plans.local("x")), call),
        Statement("normed", "layer_norm", "torch.nn.functional.layer_norm({0}, (16,))", (plans.local("product"),)),
    )
    forward = ForwardIR(
        "body", "sample.Compress", ("x",), statements, "normed", (), forward_source_hash(Compress(), ())
    )
    kind = f"{Compress.__module__}.{Compress.__qualname__}"
    binding = PlannedBinding("", BindingKind.FORWARD, ("body",), kind, (("left",),), (("left", (6, 48)),), forward)
    return plans.make_plan([plans.site_plan("left", k=48, n=6, **chains.CHAIN)], [binding])  # type: ignore[arg-type]


def cross_plan() -> Plan:
    forward = replace(plans.cross_forward(), owner="body", source_hash=forward_source_hash(Cross(), ()))
    kind = f"{Cross.__module__}.{Cross.__qualname__}"
    shapes = (("v.0", (48, 16)), ("w.0", (48, 16)))
    sites = ("cross.v.0", "cross.w.0")
    binding = PlannedBinding("", BindingKind.FORWARD, ("body",), kind, (sites,), shapes, forward)
    first = plans.site_plan(sites[0], k=48, n=16, **chains.CHAIN)  # type: ignore[arg-type]
    return plans.make_plan([first, plans.site_plan(sites[1], k=16, n=48, **chains.CHAIN)], [binding])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Cross, Compress])
def test_gemms_on_parameters(package: Package, kind: type[nn.Module]) -> None:
    torch.manual_seed(5)
    body = kind()
    made = package(cross_plan() if kind is Cross else compress_plan())
    x = torch.randn(21, 48) if kind is Cross else torch.randn(7, 48, 16)
    dy = torch.randn_like(body(x))

    class Exact(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            if kind is Cross:
                low = chains.Simulated.apply(x, self.v[0].t())
                return x * (chains.Simulated.apply(low, self.w[0]) + self.b[0])
            rows = x.transpose(-1, -2)
            product = chains.Simulated.apply(rows.reshape(-1, 48), self.left).reshape(7, 16, 6)
            return F.layer_norm(product.transpose(-1, -2), (16,))

    exact = Exact()
    exact.load_state_dict(body.state_dict())
    found = chains.assert_near(made, body, x, dy, exact.double(), 5e-3)
    model = chains.Holder(body)
    with made.apply(model, mode="infer"), torch.no_grad():
        assert torch.equal(model(x), found["y"])
    kernels = Path(made.kernels.__file__).read_text(encoding="utf-8")
    one, two = (
        "linear: x (..., 48), weight (6, 48) ->",
        "linear -> linear: x (..., 48), weight_0 (16, 48), weight_1 (48, 16)",
    )
    assert any(said.startswith(two if kind is Cross else one) for said in chains.functions(kernels).values())


class Twice(nn.Module):
    """One linear, called two times in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(F.silu(self.linear(x)))
        return out


def test_a_weight_that_is_used_twice(package: Package) -> None:
    torch.manual_seed(6)
    body = Twice()
    made = package(chains.chain_plan(body))
    x, dy = operands(body, 21, 48)
    found = chains.assert_near(made, body, x, dy, chains.simulated(body), 5e-3)
    model = chains.Holder(copy.deepcopy(body))
    with made.apply(model) as patch:
        chains.gradients(model, x, dy)
        assert {call_counters.count(number) for number, _ in patch._labels()} == {2}
    with made.apply(model, mode="infer"), torch.no_grad():
        assert torch.equal(model(x), found["y"])


def test_a_nan_is_traced_to_its_site(package: Package) -> None:
    model = chains.Holder(copy.deepcopy(STACKS["layer_norm_silu"]))
    x = torch.randn(4, 48)
    with torch.no_grad():
        model.body.mlp[1].weight[3] = torch.inf
    patch = package(FP8["layer_norm_silu"]).apply(model)
    with patch.trace_nonfinite(), pytest.raises(NonFiniteError, match=r"body\.mlp\.3"):
        model(x)


def test_no_second_derivative(package: Package) -> None:
    model, x = chains.Holder(copy.deepcopy(STACKS["one"])), torch.randn(4, 48, requires_grad=True)
    with package(FP8["one"]).apply(model):
        (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


def test_a_site_that_is_not_alike_ends_the_chain(package: Package) -> None:
    plan = chains.chain_plan(STACKS["layer_norm_silu"], lambda name: chains.AS_IS if name == "mlp.3" else chains.CHAIN)
    body = STACKS["layer_norm_silu"]
    x, dy = operands(body, 9, 48)
    made = package(plan)
    found, plain = trained(made, body, x, dy), chains.gradients(chains.Holder(copy.deepcopy(body)), x, dy)
    assert all(chains.error(found[key], plain[key]) < 0.2 for key in plain)
    with made.apply(chains.Holder(copy.deepcopy(body))) as patch:
        assert patch._modules[0].counters.gemms == (("fprop", "dgrad", "wgrad"), (), ("fprop", "dgrad", "wgrad"))


def test_wider_than_any_kernel(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    from loka.codegen.chains import chain_shapes

    body = STACKS["linears"]
    monkeypatch.setattr(chain_shapes, "LARGEST_WIDTH", 40)
    made = package(chains.chain_plan(body))
    x, dy = operands(body, 33, 48)
    assert "def requantize_transpose(" in Path(made.kernels.__file__).read_text(encoding="utf-8")
    chains.assert_near(made, body, x, dy, chains.simulated(body), 1e-4)


def test_the_same_statistics_as_torch() -> None:
    """The reference of the fused norm is torch's own."""
    x, w, b = torch.randn(9, 48), torch.randn(48), torch.randn(48)
    forward = norm_reference.norm_forward(x, norm="layer_norm", weight=w, bias=b, eps=1e-5)
    torch.testing.assert_close(forward.y, F.layer_norm(x, (48,), w, b, 1e-5), rtol=1e-5, atol=1e-5)


def test_cross_layers_of_more_dimensions(package: Package) -> None:
    torch.manual_seed(7)
    body = STACKS["crosses"]
    made = package(chains.chain_plan(body, chains.AS_IS, inputs=lambda batch: torch.randn(batch, 3, 48)))
    said = chains.functions(Path(made.kernels.__file__).read_text(encoding="utf-8")).values()
    passed = "bias (48,) -> factor * (product + bias) + residual, and factor itself for the next layer."
    assert any(passed in text for text in said)
    for shape in ((5, 3, 48), (0, 3, 48), (7, 48)):
        x, dy = operands(body, *shape)
        expected = chains.gradients(chains.Holder(copy.deepcopy(body).double()), x.double(), dy.double())
        for key, value in trained(made, body, x, dy).items():
            torch.testing.assert_close(value.double(), expected[key], rtol=1e-4, atol=1e-4, msg=key)
