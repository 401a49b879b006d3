"""Plans of chains, made from models that are traced, for the tests of generated chains."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from loka.dispatch import Patch
from loka.graph.ir import ForwardIR
from loka.graph.patterns.region import find_regions
from loka.graph.source import has_hooks, has_own_forward
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from loka.kernels import call_counters
from loka.numerics.enums import Format, Range, Scaling
from loka.numerics.quantize import Quantized, dequantize, quantize, requantize_transpose
from loka.numerics.recipe import OperandRecipe
from loka.plan.plan import BindingKind, Plan, PlannedBinding, SitePlan
from tests.support.codegen import codegen_plans as plans
from tests.support.read_once import model_likeness

Recipe = dict[str, object] | Callable[[str], dict[str, object]]  # of all linears, or of each by its name
ROWS = OperandRecipe(power_of_two=True)
TRANSPOSED = OperandRecipe(power_of_two=True, transposed=True)
TRANSPOSED_TENSORWISE = OperandRecipe(power_of_two=True, transposed=True, scaling=Scaling.TENSORWISE)
CHAIN: dict[str, object] = {
    "fprop": (ROWS, ROWS),
    "dgrad": (ROWS, TRANSPOSED),
    "wgrad": (TRANSPOSED_TENSORWISE, TRANSPOSED_TENSORWISE),
}
ROWWISE_CHAIN: dict[str, object] = {**CHAIN, "wgrad": (TRANSPOSED, TRANSPOSED)}
AS_IS: dict[str, object] = {"fprop": None, "dgrad": None, "wgrad": None}
_INLINABLE = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.ReLU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Hardswish,
    nn.GELU,
    nn.Identity,
    nn.Hardsigmoid,
    nn.Tanh,
    nn.LeakyReLU,
)


class Holder(nn.Module):
    """A model with one module that is bound: `body`, between an embedding of the input and a loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


class SwishNorm(nn.Module):
    """As torchrec writes its SwishLayerNorm."""

    def __init__(self, norm: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.norm = nn.Sequential(norm, gate)

    def forward(self, input: Tensor) -> Tensor:
        return input * self.norm(input)


class Tower(nn.Module):
    """LayerNorm -> Linear -> norm -> activation -> Linear -> norm -> activation -> Linear, with a residual around."""

    def __init__(
        self,
        width: int = 48,
        hidden: int = 80,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        activation: Callable[[], nn.Module] = nn.SiLU,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.norm = norm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden, bias=bias), norm(hidden), activation(),
            nn.Linear(hidden, hidden, bias=bias), norm(hidden), activation(),
            nn.Linear(hidden, width, bias=bias),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.norm(x))
        return out + x


def traced(body: nn.Module, inputs: Callable[[int], Tensor]) -> ForwardIR:
    """The forward of Holder(body).body with all norms, activations and linears inlined, in regions."""
    model = Holder(body)
    examples = capture_examples(model, ["body"], {batch: ModelInputs((inputs(batch),), {}) for batch in (5, 8)})["body"]
    sites = [name for name, child in body.named_modules() if isinstance(child, nn.Linear)]
    known = (*_INLINABLE, nn.Sequential, nn.ModuleList)
    inline = [
        name
        for name, child in body.named_modules()
        if name and (isinstance(child, known) or has_own_forward(child) or len(list(child.children())))
    ]
    found = trace_forward(body, "body", examples, inline=inline, sites=sites)
    assert isinstance(found, ForwardIR), found
    regions = tuple(replace(region, site=f"body.{region.site}") for region in find_regions(found, sites))
    statements = tuple(
        replace(step, call=None if step.call is None else replace(step.call, site=f"body.{step.call.site}"))
        for step in found.statements
    )
    return replace(found, statements=statements, regions=regions)


_TRACED: dict[object, ForwardIR] = {}  # by what a body and its inputs are like


def _traced_once(body: nn.Module, inputs: Callable[[int], Tensor]) -> ForwardIR:
    """`traced`, for plans of bodies that are alike by several recipes: a trace knows none of them."""
    given = tuple((x.shape, x.dtype, x.device) for x in map(inputs, (5, 8)))
    alike = None if any(map(has_hooks, body.modules())) else model_likeness(body)
    key = (body if alike is None else alike, given)
    if key not in _TRACED:
        _TRACED[key] = traced(body, inputs)
    return _TRACED[key]


def _usual_inputs(batch: int) -> Tensor:
    return torch.randn(batch, 48)


def chain_plan(
    body: nn.Module,
    recipe: Recipe = CHAIN,
    inputs: Callable[[int], Tensor] = _usual_inputs,
    input_grad: bool = True,
) -> Plan:
    """The plan of Holder(body): every linear by `recipe`, or by what `recipe` says of its name."""
    forward = _traced_once(body, inputs)
    sites: list[SitePlan] = []
    for name, child in body.named_modules():
        if isinstance(child, nn.Linear):
            chosen = recipe(name) if callable(recipe) else recipe
            sizes = {"k": child.in_features, "n": child.out_features}
            sites.append(plans.site_plan(f"body.{name}", **sizes, **chosen, input_grad=input_grad))  # type: ignore[arg-type]
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in body.named_parameters())
    kind = f"{type(body).__module__}.{type(body).__qualname__}"
    calls = tuple(dict.fromkeys(step.call.site for step in forward.statements if step.call is not None))
    binding = PlannedBinding("Body", BindingKind.FORWARD, ("body",), kind, (calls,), shapes, forward)
    return plans.make_plan(sites, [binding])


def linear_plan(names: Sequence[str] = ("a", "b"), bias: bool = True, **recipe: object) -> Plan:
    """Plain linears, each a chain of its own."""
    chosen = {**CHAIN, **recipe}
    sites = [plans.site_plan(name, **chosen) for name in names]  # type: ignore[arg-type]
    return plans.make_plan(sites, [plans.linear_binding(names, bias=bias)])


def rows(x: Tensor) -> Quantized:
    return quantize(x, format=Format.E4M3, scaling=Scaling.ROWWISE, power_of_two=True)


class Simulated(torch.autograd.Function):
    """A linear in float64 on operands that are quantized and transposed as a chain does it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        x_fp8, weight_fp8 = rows(x), rows(weight)
        ctx.operands = x_fp8, weight_fp8  # type: ignore[attr-defined]
        return dequantize(x_fp8).double() @ dequantize(weight_fp8).double().t()

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> tuple[Tensor, Tensor]:
        x_fp8, weight_fp8 = ctx.operands  # type: ignore[attr-defined]
        dy_fp8 = rows(dy)
        dx = dequantize(dy_fp8).double() @ dequantize(requantize_transpose(weight_fp8)).double().t()
        return dx, dequantize(requantize_transpose(dy_fp8)).double() @ dequantize(
            requantize_transpose(x_fp8)
        ).double().t()


def simulated(body: nn.Module) -> nn.Module:
    """A copy in float64 whose linears run as `Simulated`, their biases added after."""

    def linear(module: nn.Linear, x: Tensor) -> Tensor:
        y = Simulated.apply(x.reshape(-1, x.shape[-1]), module.weight)
        y = y if module.bias is None else y + module.bias
        return y.reshape(*x.shape[:-1], -1)

    made = copy.deepcopy(body).double()  # on the device of the body
    for child in made.modules():
        if isinstance(child, nn.Linear):
            child.forward = partial(linear, child)
    return made


def gradients(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of x and of every parameter that has one; a compiled model's by their own names."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad}
    found |= {name.removeprefix("_orig_mod."): parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad.clone() for name, grad in found.items() if grad is not None}


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error in the norm."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def assert_within(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float) -> None:
    """That two steps have the same gradients, to this relative error in the norm of each."""
    assert found.keys() == expected.keys()
    errors = {key: error(value, expected[key]) for key, value in found.items()}
    assert all(value.shape == expected[key].shape for key, value in found.items())
    assert max(errors.values()) < limit, errors


def trained(package: ModuleType, body: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The output and all gradients of a patched copy of `body`, of which every planned GEMM runs."""
    model = Holder(copy.deepcopy(body))
    with package.apply(model) as patch:
        found = gradients(model, x, dy)
        patch.verify()
    return found


def exact_step(exact: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """The output and all gradients in float64 of a copy of a body that is held."""
    return gradients(Holder(copy.deepcopy(exact).double()), x.double(), dy.double())


def operands(body: nn.Module, *shape: int) -> tuple[Tensor, Tensor]:
    """An input of this shape and an output gradient."""
    x = torch.randn(*shape)
    return x, torch.randn_like(body(x))


def calls_of(patch: Patch) -> dict[object, int]:
    """How often each planned GEMM has run."""
    return {label: call_counters.count(number) for number, label in patch._labels()}


def kernels_text(package: ModuleType) -> str:
    """The kernels.py of an imported package."""
    return Path(str(package.kernels.__file__)).read_text(encoding="utf-8")


def known_chain(x: float = 8.0, dy: float = 16.0, power_of_two: bool = True, wgrad: bool = True) -> dict[str, object]:
    """The recipe of a chain under static scales, for these maxima of the inputs and of the output gradients."""
    once = OperandRecipe(scaling=Scaling.TENSORWISE, power_of_two=power_of_two)
    inputs, gradients = (replace(once, range=Range.STATIC, amax=amax) for amax in (x, dy))
    return {"fprop": (inputs, once), "dgrad": (gradients, once), "wgrad": (gradients, inputs) if wgrad else None}


def gpu_operands(rows: int, width: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """An input and an output gradient, bfloat16 on the GPU, (rows, width) each; the gradient's rows differ in size."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(rows, width, device="cuda", generator=generator)
    heavy = torch.rand(rows, 1, device="cuda", generator=generator).clamp(min=1e-3).reciprocal().clamp(max=30.0)
    dy = torch.randn(rows, width, device="cuda", generator=generator) * heavy
    return x.bfloat16(), dy.bfloat16()


def functions(kernels: str) -> dict[str, str]:
    """What each function of a kernels.py says that it computes, on one line, by name: of a chain `STEPS: SIZES`."""
    said = {}
    for node in ast.parse(kernels).body:
        if isinstance(node, ast.FunctionDef):
            first, _, sizes = (ast.get_docstring(node) or "").partition(".\n\n")
            said[node.name] = " ".join((f"{first.partition(': ')[2]}: {sizes}" if sizes else first).split())
    return said
