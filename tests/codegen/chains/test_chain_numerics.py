"""Generated chains against autograd in float64 on operands that are quantized as the chain does it: one table."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from loka.dispatch import chain_stages
from loka.kernels.fused.norm import norm_reference
from loka.numerics.enums import Format, Scaling
from loka.numerics.quantize import Quantized, dequantize, quantize
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.chain_bodies import BLOCK_NORMS, BODIES, DY, GATES, KEPT, STACKS, SWISH_NORMS, X, plan_of
from tests.support.codegen.codegen_plans import PlanPackage

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::loka.dispatch.dispatch_errors.LokaWarning"),  # that this is the CPU
]


def known(x: Tensor, amax: float | None, power_of_two: bool) -> Quantized:
    return quantize(x, format=Format.E4M3, scaling=Scaling.TENSORWISE, power_of_two=power_of_two, amax=amax)


class KnownLinear(torch.autograd.Function):
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


class KeptWgrad(chains.Simulated):
    """`Simulated` with an exact wgrad."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x = x  # type: ignore[attr-defined]
        out: Tensor = chains.Simulated.forward(ctx, x, weight)
        return out

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> tuple[Tensor, Tensor]:
        dx, _ = chains.Simulated.backward(ctx, dy)
        return dx, dy.t() @ ctx.x  # type: ignore[attr-defined]


def simulated(body: nn.Module, static: bool = False, power_of_two: bool = True, kept: str = "-") -> nn.Module:
    """A copy in float64 of quantized linears; those with `kept` in their names have an exact wgrad."""

    def linear(module: nn.Linear, keeps: bool, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if static:
            y = KnownLinear.apply(rows, module.weight, power_of_two, keeps)
        else:
            y = (KeptWgrad if keeps else chains.Simulated).apply(rows, module.weight)
        y = y if module.bias is None else y + module.bias
        return y.reshape(*x.shape[:-1], -1)

    made = copy.deepcopy(body).double()
    for name, child in made.named_modules():
        if isinstance(child, nn.Linear):
            child.forward = partial(linear, child, kept in name)
    return made


EXACT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fp8": chains.simulated,
    "rowwise": chains.simulated,
    "plain": lambda body: body,
    "kept": partial(simulated, kept=KEPT),
    "static": partial(simulated, static=True),
    "static_divided": partial(simulated, static=True, power_of_two=False),
    "static_kept": partial(simulated, static=True, kept=KEPT),
}


@dataclass(frozen=True)
class Case:
    """A body under a recipe, and the relative error of a step's output and gradients, each in the norm.

    Values that lie between two of e4m3 may be rounded either way: few of them.
    """

    recipe: str
    body: str
    limit: float
    shape: tuple[int, ...] = (5, 33, 48)
    scale: float = 1.0  # of the input
    calls: str = ""  # a kernel that the one chain of kernels.py names


WITHOUT_KERNELS = {"linears", "crosses_apart", "broadcast"}  # where the GEMMs stay in the model's dtype
STATIC = (
    "layer_norm_silu", "no_bias_rms_norm", "linears", "one", "alone", "biased", "plain_norm_before", "crosses",
    "gated_blocks", "blocks", "residuals", "swish", "swish_blocks", "swiglu", "merged_norm_glu", "gate_unit",
)  # fmt: skip
ROWS, ELEMENTWISE = (37, 48), 1e-4
CALLS = {"gated_blocks": '"add_times_residual_keep_block_norm_of_16_silu_e4m3'}
BLOCK = 'block_norm_hardswish_e4m3_eps_1e_06"'  # the end of its name
_CASES = [
    *(Case("fp8", name, 5e-3, calls=CALLS.get(name, "")) for name in STACKS),
    *(Case("rowwise", name, 5e-3) for name in ("layer_norm_silu", "one")),
    *(Case("plain", name, ELEMENTWISE) for name in STACKS if name not in WITHOUT_KERNELS),
    *(Case("kept", name, 5e-3, (33, 48)) for name in ("crosses", "crosses_apart", "residuals", "pair")),
    *(Case("static", name, 5e-3) for name in STATIC),
    Case("static_divided", "layer_norm_silu", 5e-3),
    Case("static_kept", "crosses", 5e-3),
    *(Case("fp8", f"{norm.__name__}{bias}", 2e-3, ROWS, calls=BLOCK) for norm in BLOCK_NORMS for bias in ("", "_bias")),
    Case("plain", "BlockNorm_bias", 1e-5, ROWS),
    Case("fp8", "block_norm_first", 2e-3, (9, 48), calls='"block_norm_of_16_e4m3'),
    Case("plain", "block_norm_first", 1e-5, (9, 48), calls='"block_norm_of_16_eps'),
    *(
        Case(recipe, f"swish_{kind}_{gate}", limit, ROWS, 3.0, calls=gate)
        for kind in SWISH_NORMS
        for gate in GATES
        for recipe, limit in (("fp8", 3e-3), ("plain", 1e-5))
    ),
    Case(
        "fp8", "swish_of_sums", 3e-3, ROWS, calls="add_times_residual_keep_layer_norm_gate_sigmoid_e4m3"
    ),
]  # fmt: skip
CASES = {f"{case.recipe}-{case.body}": case for case in _CASES}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_against_float64_and_the_frozen_form(planned: PlanPackage, case: Case) -> None:
    torch.manual_seed(1)
    body = BODIES[case.body]
    made = planned(plan_of(case.recipe, case.body))
    x, dy = chains.operands(body, *case.shape)
    x *= case.scale
    expected = chains.exact_step(EXACT[case.recipe](body), x, dy)
    model = chains.Holder(copy.deepcopy(body))
    with made.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
        assert patch.overflows() == ()
        calls = chains.calls_of(patch)
        assert len(calls) == 3 * len(patch.sites)
    for (site, gemm), count in calls.items():
        native = case.recipe == "plain" or (case.recipe.endswith("kept") and KEPT in site and gemm == "wgrad")
        assert count == (not native), (site, gemm)
    if case.limit == ELEMENTWISE:
        for key, value in found.items():
            torch.testing.assert_close(value.double(), expected[key], rtol=1e-4, atol=1e-4, msg=key)
    chains.assert_within(found, expected, case.limit)
    if case.recipe in ("fp8", "rowwise"):
        chains.assert_within(found, chains.gradients(chains.Holder(copy.deepcopy(body)), x, dy), 0.3)
    with made.apply(model, mode="infer") as patch, torch.no_grad():
        assert all(name.startswith("body.") and "loka" not in name for name in model.state_dict())
        if case.recipe == "plain":
            torch.testing.assert_close(model(x), found["y"], rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(model(x), found["y"])
        assert model(x[:0]).shape == (0, *dy.shape[1:])
        patch.verify(backward=False)
    if case.calls:
        text = chains.kernels_text(made)
        assert text.count(" = constant(") == 1
        assert case.calls in text


@pytest.mark.parametrize("name", STACKS)
def test_without_rounding_a_chain_is_the_same_function(
    planned: PlanPackage, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(a: Tensor, scale_a: Tensor, b: Tensor, *rest: object) -> Tensor:
        return a @ b.t() + (rest[-1] if isinstance(rest[-1], Tensor) and rest[-1].dim() == 1 else 0.0)

    def transposed(values: Tensor, scale: Tensor, of_the_batch: bool = False) -> tuple[Tensor, Tensor]:
        return values.t().contiguous(), values.new_ones(values.shape[1], 1)

    made = planned(plan_of("fp8", name))
    monkeypatch.setattr(
        norm_reference, "quantize_rows", lambda y, **_: (y.clone(), y.new_ones(len(y), 1), y.new_ones(1))
    )
    monkeypatch.setattr(norm_reference, "requantize_transpose", transposed)
    monkeypatch.setattr(chain_stages, "scaled_mm", product)
    torch.manual_seed(3)
    body = STACKS[name]
    x, dy = chains.operands(body, 33, 48)
    expected = chains.exact_step(body, x, dy)
    model = chains.Holder(copy.deepcopy(body))
    with made.apply(model):
        found = chains.gradients(model, x, dy)
    for key, value in found.items():
        torch.testing.assert_close(value.double(), expected[key], rtol=1e-4, atol=1e-4, msg=key)
