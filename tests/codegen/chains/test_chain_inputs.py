"""Generated chains on what inputs, Parameters and dtypes there are, and where a chain ends."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.dispatch import NonFiniteError, patch_of
from loka.graph.ir import ForwardIR
from loka.kernels.fused.norm import norm_reference
from loka.plan.plan import BindingKind, Plan, PlannedBinding
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.codegen.chain_bodies import BODIES, STACKS, plan_of
from tests.support.codegen.codegen_plans import PlanPackage
from tests.support.expressions import site_call, statement

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]


@pytest.mark.parametrize("recipe", ["fp8", "plain", "static"])
@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48), (1, 48), (48,), (2, 3, 4, 48)])
def test_any_batch(planned: PlanPackage, recipe: str, shape: tuple[int, ...]) -> None:
    body = copy.deepcopy(STACKS["layer_norm_silu"])
    model, x = chains.Holder(body), torch.randn(shape)
    expected = chains.gradients(model, x, torch.ones(shape))
    with planned(plan_of(recipe, "layer_norm_silu")).apply(model):
        found = chains.gradients(model, x, torch.ones(shape))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.shape == expected[key].shape, key
        assert x.numel() == 0 or recipe != "plain" or torch.allclose(value, expected[key], rtol=1e-3, atol=1e-4), key


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        *((recipe, name) for recipe in ("fp8", "plain") for name in ("swish_block_norm_gate_hardsigmoid", "BlockNorm")),
        ("static", "layer_norm_silu"),
    ],
)
def test_batches_without_rows_and_rows_of_zeros_infinity_and_nan(planned: PlanPackage, recipe: str, name: str) -> None:
    model = chains.Holder(copy.deepcopy(BODIES[name]))
    x, bad = torch.randn(16, 48), [5, 9]
    with planned(plan_of(recipe, name)).apply(model) as patch:
        empty = torch.randn(0, 48, requires_grad=True)
        model(empty).sum().backward()
        assert empty.grad is not None
        assert empty.grad.shape == (0, 48)
        assert all(p.grad is not None and p.grad.abs().sum() == 0.0 for p in model.parameters())
        clean = model(x)
        x[3], x[5, 7], x[9, 1] = 0.0, torch.inf, torch.nan
        found = model(x)
        assert patch.overflows() == ()  # what is not finite is no overflow: it is NaN
    rest = [row for row in range(16) if row not in (3, *bad)]
    torch.testing.assert_close(found[rest], clean[rest], rtol=0, atol=1e-6 if recipe == "plain" else 0)
    assert found[3].isfinite().all()
    assert name != "BlockNorm" or found[3].abs().sum() == 0.0
    assert found[bad].isnan().all()


def test_inputs_that_are_not_contiguous(planned: PlanPackage) -> None:
    model = chains.Holder(copy.deepcopy(STACKS["one"]))
    x, dy = torch.randn(48, 21).t(), torch.randn(40, 21).t()
    with planned(plan_of("fp8", "one")).apply(model):
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
    ("recipe", "name"),
    [
        ("fp8", "layer_norm_silu"),
        ("plain", "layer_norm_silu"),
        ("fp8", "linears"),
        *(("static", name) for name in ("linears", "layer_norm_silu", "crosses")),
    ],
)
def test_frozen_parameters_and_inputs_without_gradients(planned: PlanPackage, recipe: str, name: str) -> None:
    made = planned(plan_of(recipe, name))
    body = STACKS[name]
    x, dy = chains.operands(body, 8, 48)
    names = [name for name, _ in body.named_parameters()]
    whole = chains.trained(made, body, x, dy)
    for frozen in (names, names[:1], [name for name in names if "weight" in name]):
        model = chains.Holder(copy.deepcopy(body))
        for name in frozen:
            model.get_parameter(f"body.{name}").requires_grad_(False)
        with made.apply(model):
            found = chains.gradients(model, x, dy)
        assert found.keys() == {"y", "x"} | {f"body.{name}" for name in names if name not in frozen}
        assert all(torch.equal(value, whole[key]) for key, value in found.items())
    model = chains.Holder(copy.deepcopy(body))
    with made.apply(model):
        model(x).backward(dy)
    assert all(p.grad is not None and torch.equal(p.grad, whole[key]) for key, p in model.named_parameters())


@pytest.mark.parametrize("name", ["linears", "plain_norm_before", "layer_norm_silu"])
def test_a_first_input_without_gradient_has_no_dgrad(planned: PlanPackage, name: str) -> None:
    made = planned(chains.chain_plan(STACKS[name], input_grad=False))
    body = nn.Sequential(*copy.deepcopy(STACKS[name])) if name != "layer_norm_silu" else copy.deepcopy(STACKS[name])
    model = chains.Holder(body)
    x = torch.randn(8, 48)
    with made.apply(model) as patch:
        y = model(x)
        y.backward(torch.ones_like(y))
        patch.verify()
        counts = chains.calls_of(patch)
        first = patch.sites[0]
    # A norm's parameters before the first linear need the gradient of its input.
    assert counts[first, "dgrad"] == (1 if name == "layer_norm_silu" else 0)
    assert counts[first, "wgrad"] == 1
    expected = chains.trained(planned(plan_of("fp8", name)), STACKS[name], x, torch.ones_like(y))
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[key])


def test_plain_linears_are_chains_of_one(planned: PlanPackage) -> None:
    made = planned(chains.linear_plan())
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


@pytest.mark.parametrize("recipe", ["fp8", "plain"])
def test_autocast_bfloat16_and_mixed_parameters(planned: PlanPackage, recipe: str) -> None:
    made = planned(plan_of(recipe, "layer_norm_silu"))
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
    read = (plans.attribute("self.left"), plans.local("x"))
    call = site_call("left", read, "{1}.transpose(-1, -2)", "{0}", None, "{0}.transpose(-1, -2)")
    statements = (
        statement("product", "matmul", "{0} @ {1}", read, call),
        statement("normed", "layer_norm", "torch.nn.functional.layer_norm({0}, (16,))", (plans.local("product"),)),
    )
    forward = ForwardIR("body", "sample.Compress", ("x",), statements, plans.local("normed"), ())
    kind = f"{Compress.__module__}.{Compress.__qualname__}"
    binding = PlannedBinding("", BindingKind.FORWARD, ("body",), kind, (("left",),), (("left", (6, 48)),), forward)
    return plans.make_plan([plans.site_plan("left", k=48, n=6, **chains.CHAIN)], [binding])  # type: ignore[arg-type]


def cross_plan() -> Plan:
    forward = replace(plans.cross_forward(), owner="body")
    kind = f"{Cross.__module__}.{Cross.__qualname__}"
    shapes = (("v.0", (48, 16)), ("w.0", (48, 16)))
    sites = ("cross.v.0", "cross.w.0")
    binding = PlannedBinding("", BindingKind.FORWARD, ("body",), kind, (sites,), shapes, forward)
    first = plans.site_plan(sites[0], k=48, n=16, **chains.CHAIN)  # type: ignore[arg-type]
    return plans.make_plan([first, plans.site_plan(sites[1], k=16, n=48, **chains.CHAIN)], [binding])  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Cross, Compress])
def test_gemms_on_parameters(planned: PlanPackage, kind: type[nn.Module]) -> None:
    torch.manual_seed(5)
    body = kind()
    made = planned(cross_plan() if kind is Cross else compress_plan())
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
    found = chains.trained(made, body, x, dy)
    chains.assert_within(found, chains.exact_step(exact, x, dy), 5e-3)
    model = chains.Holder(body)
    with made.apply(model, mode="infer"), torch.no_grad():
        assert torch.equal(model(x), found["y"])
    kernels = chains.kernels_text(made)
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


def test_a_weight_that_is_used_twice(planned: PlanPackage) -> None:
    torch.manual_seed(6)
    body = Twice()
    made = planned(chains.chain_plan(body))
    x, dy = chains.operands(body, 21, 48)
    found = chains.trained(made, body, x, dy)
    chains.assert_within(found, chains.exact_step(chains.simulated(body), x, dy), 5e-3)
    model = chains.Holder(copy.deepcopy(body))
    with made.apply(model) as patch:
        chains.gradients(model, x, dy)
        assert set(chains.calls_of(patch).values()) == {2}
    with made.apply(model, mode="infer"), torch.no_grad():
        assert torch.equal(model(x), found["y"])


def test_a_nan_is_traced_to_its_site(planned: PlanPackage) -> None:
    model = chains.Holder(copy.deepcopy(STACKS["layer_norm_silu"]))
    x = torch.randn(4, 48)
    with torch.no_grad():
        model.body.mlp[1].weight[3] = torch.inf
    patch = planned(plan_of("fp8", "layer_norm_silu")).apply(model)
    with patch.trace_nonfinite(), pytest.raises(NonFiniteError, match=r"body\.mlp\.3"):
        model(x)


def test_no_second_derivative(planned: PlanPackage) -> None:
    model, x = chains.Holder(copy.deepcopy(STACKS["one"])), torch.randn(4, 48, requires_grad=True)
    with planned(plan_of("fp8", "one")).apply(model):
        (dx,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


def test_a_site_that_is_not_alike_ends_the_chain(planned: PlanPackage) -> None:
    plan = chains.chain_plan(STACKS["layer_norm_silu"], lambda name: chains.AS_IS if name == "mlp.3" else chains.CHAIN)
    body = STACKS["layer_norm_silu"]
    x, dy = chains.operands(body, 9, 48)
    made = planned(plan)
    found, plain = chains.trained(made, body, x, dy), chains.gradients(chains.Holder(copy.deepcopy(body)), x, dy)
    assert all(chains.error(found[key], plain[key]) < 0.2 for key in plain)
    with made.apply(chains.Holder(copy.deepcopy(body))) as patch:
        assert patch._modules[0].counters.gemms == (("fprop", "dgrad", "wgrad"), (), ("fprop", "dgrad", "wgrad"))


def test_wider_than_any_kernel(planned: PlanPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    from loka.codegen.chains import chain_shapes

    body = STACKS["linears"]
    monkeypatch.setattr(chain_shapes, "LARGEST_WIDTH", 40)
    made = planned(chains.chain_plan(body))
    x, dy = chains.operands(body, 33, 48)
    assert "def requantize_transpose(" in chains.kernels_text(made)
    found = chains.trained(made, body, x, dy)
    chains.assert_within(found, chains.exact_step(chains.simulated(body), x, dy), 1e-4)


def test_the_same_statistics_as_torch() -> None:
    """The reference of the fused norm is torch's own."""
    x, w, b = torch.randn(9, 48), torch.randn(48), torch.randn(48)
    forward = norm_reference.norm_forward(x, norm="layer_norm", weight=w, bias=b, eps=1e-5)
    torch.testing.assert_close(forward.y, F.layer_norm(x, (48,), w, b, 1e-5), rtol=1e-5, atol=1e-5)


def test_cross_layers_of_more_dimensions(planned: PlanPackage) -> None:
    torch.manual_seed(7)
    body = STACKS["crosses"]
    made = planned(chains.chain_plan(body, inputs=lambda batch: torch.randn(batch, 3, 48)))
    for shape in ((5, 3, 48), (7, 48)):
        x, dy = chains.operands(body, *shape)
        found = chains.trained(made, body, x, dy)
        chains.assert_within(found, chains.exact_step(chains.simulated(body), x, dy), 5e-3)


def test_a_changed_eps_is_noticed_at_apply(planned: PlanPackage) -> None:
    changed = chains.Holder(copy.deepcopy(BODIES["BlockNorm"]))
    changed.body[1].eps = 1e-3
    with pytest.raises(Exception, match=r"0.001\), planned was v\d+ = rms_norm\(.*1e-06\)"):
        planned(plan_of("plain", "BlockNorm")).apply(changed)


def test_copies_pickles_and_state_dict(planned: PlanPackage) -> None:
    made = planned(plan_of("fp8", "layer_norm_silu"))
    model, plain = (chains.Holder(copy.deepcopy(STACKS["layer_norm_silu"])) for _ in range(2))
    keys, x = plain.state_dict().keys(), torch.randn(5, 48)
    made.apply(model)
    plain.load_state_dict(model.state_dict())
    made.apply(plain)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), plain):  # noqa: S301 - our own bytes
        y = other(x)
        assert torch.equal(y, model(x))
        y.sum().backward()
        patch_of(other).verify()
        assert other.body.loka.counter_id(0) != model.body.loka.counter_id(0)
    assert model.state_dict().keys() == keys


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("recipe", "name", "dynamic"),
    [("fp8", "layer_norm_silu", True), ("plain", "layer_norm_silu", False), ("kept", "crosses", True)],
)
def test_compiled_as_one_graph_and_partly_without_gradients(
    planned: PlanPackage, recipe: str, name: str, dynamic: bool
) -> None:
    model = chains.Holder(copy.deepcopy(STACKS[name]))
    with planned(plan_of(recipe, name)).apply(model) as patch:
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for rows in (6, 11) if dynamic else (6,):
            x, dy = chains.operands(model, rows, 48)
            expected = chains.gradients(model, x, dy)
            patch.reset()
            found = chains.gradients(compiled, x, dy)
            patch.verify()
            torch.testing.assert_close(found, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert compiled(x[:4]).dtype == model(x[:4]).dtype
        frozen, *rest = [key for key, _ in model.named_parameters() if "weight" in key]
        model.get_parameter(frozen).requires_grad_(False)
        model.zero_grad()
        model(x).backward(dy)
        assert model.get_parameter(frozen).grad is None
        assert all(torch.equal(model.get_parameter(key).grad, expected[key]) for key in rest)
