"""`residual_high_precision` as a rewriting: what is carried, in which dtypes, and that it is nearer to float64."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from loka.graph.equivalence import source, with_forward
from loka.graph.ir import ForwardIR
from loka.graph.trace.examples import ModelInputs, capture_examples
from loka.graph.trace.trace import trace_forward
from loka.mods.norms import BlockNorm
from loka.mods.rewriting.residual_high_precision import widen_residual_sums
from loka.mods.rewriting.rewriting_tracer import RewrittenOwner
from loka.zoo.dlrm import DCNSizes, DCNv2
from loka.zoo.wukong import Wukong, WukongSizes

WIDTH = 32
WUKONG = WukongSizes(embeddings=16, dim=24, layers=3, rank=4, hidden=48)
DCN = DCNSizes(embeddings=6, dim=16, layers=3, rank=32, over=(64, 48))


def wanted(name: str) -> bool:
    return True


def traced(module: nn.Module, *inputs: Callable[[int], Tensor], inline: tuple[str, ...] = ()) -> ForwardIR:
    batches = {batch: ModelInputs(tuple(make(batch) for make in inputs), {}) for batch in (5, 8)}
    found = trace_forward(module, "", capture_examples(module, [""], batches)[""], inline=inline)
    assert isinstance(found, ForwardIR), found
    return found


def rows(batch: int) -> Tensor:
    return torch.randn(batch, WIDTH)


def carried(
    module: nn.Module, *inputs: Callable[[int], Tensor], inline: tuple[str, ...] = (), dtype: str = "float32"
) -> RewrittenOwner:
    found = widen_residual_sums(traced(module, *(inputs or (rows,)), inline=inline), dtype, wanted)
    assert isinstance(found, RewrittenOwner), found
    return found


def patched(module: nn.Module, found: RewrittenOwner) -> nn.Module:
    return with_forward(copy.deepcopy(module), found.forward)


class Deep(nn.Module):
    """x + 0.2 linear(norm(x)), many times over, as a pre-norm transformer's stream."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(layers)])
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + torch.tanh(linear(norm(x)))
        return x


INLINED = ("norms", *(f"norms.{number}" for number in range(24)))


@pytest.mark.slow
def test_the_text_of_a_stream_has_one_cast_in_and_one_out() -> None:
    text = source(carried(Deep(), inline=INLINED).forward)
    assert text.count("x_wide = x.to(torch.promote_types(x.dtype, torch.float32)).view_as(x)") == 1
    sums = re.findall(r"\n    (add\w*) = (\w+) \+ tanh\w*\n", text)
    assert len(sums) == 24
    assert sums[0] == ("add_wide", "x_wide")
    assert [operand for _, operand in sums[1:]] == [target for target, _ in sums[:-1]]  # never through a cast
    assert len(re.findall(r"add\w* = add\w*_wide\.to\(", text)) == 1  # the result alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_models_in_wide_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Deep(4)
    high = patched(model, carried(model, inline=("norms", *(f"norms.{n}" for n in range(4))))).to(dtype)
    x = torch.randn(7, WIDTH, dtype=dtype)
    assert torch.equal(model.to(dtype)(x), high(x))


def pairs(batch: int) -> Tensor:
    return torch.randn(batch, 6, 16)


def samples(batch: int) -> Tensor:
    return torch.randn(batch, 16, 24)


ZOO = {
    "dcn": (lambda: DCNv2(DCN), pairs, ("cross", *(f"cross.{n}" for n in range(3)))),
    "wukong": (
        lambda: Wukong(WUKONG),
        samples,
        ("layers", *(f"layers.{n}{part}" for n in range(3) for part in ("", ".norm", ".fmb_norm"))),
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_streams_of_the_zoo_stay_wide_through_all_layers(name: str) -> None:
    build, inputs, inline = ZOO[name]
    torch.manual_seed(0)
    model = build()
    found = carried(model, inputs, inline=inline)
    assert len(found.targets) == 3
    statements = {step.target: step for step in found.forward.statements}
    sums = [step for step in found.forward.statements if step.even and step.op == "add"]
    streams = [ref.text for step in sums for ref in step.operands if ref.text.endswith("_wide")]
    assert len(streams) == len(sums) == 3  # each sum reads the stream, wide
    origins = [statements[name].op for name in streams]
    assert origins == ["to", "layer_norm", "layer_norm"] if name == "wukong" else origins == ["to", "add", "add"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("mode", ["bfloat16", "float16", "autocast", "mixed"])
def test_dtypes_outside_of_the_stream_are_the_models(name: str, mode: str) -> None:
    build, inputs, inline = ZOO[name]
    torch.manual_seed(0)
    model = build()
    high = patched(model, carried(model, inputs, inline=inline))
    x = inputs(6)
    if mode != "autocast":
        dtype = torch.float16 if mode == "float16" else torch.bfloat16
        model, high, x = model.to(dtype), high.to(dtype), x.to(dtype)
    if mode == "mixed" and name == "wukong":  # norms with float32 weights, which torch takes
        for each in (model, high):
            for part in each.modules():
                if isinstance(part, nn.LayerNorm):
                    part.float()
    seen: list[list[torch.dtype]] = []
    for each in (model, high):
        dtypes: list[torch.dtype] = []
        hooks = [
            part.register_forward_pre_hook(lambda _, args, into=dtypes: into.append(args[0].dtype))
            for part in each.modules()
            if isinstance(part, nn.Linear)
        ]
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            y = each(leaf)
        y.sum().backward()
        for hook in hooks:
            hook.remove()
        seen.append([y.dtype, leaf.grad.dtype, *(p.grad.dtype for p in each.parameters()), *dtypes])
    assert seen[0] == seen[1]


def test_bfloat16_carries_float16_and_leaves_the_rest() -> None:
    torch.manual_seed(0)
    model = Deep(4)
    inline = ("norms", *(f"norms.{n}" for n in range(4)))
    high = patched(model, carried(model, inline=inline, dtype="bfloat16"))
    x = torch.randn(7, WIDTH)
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(copy.deepcopy(model).to(dtype)(x.to(dtype)), copy.deepcopy(high).to(dtype)(x.to(dtype)))
    half = high.half()
    large = torch.full((1, WIDTH), 65000.0, dtype=torch.float16)
    text = source(carried(model, inline=inline, dtype="bfloat16").forward)
    assert "x_wide = (x.to(torch.bfloat16) if x.dtype == torch.float16 else x).view_as(x)" in text
    assert half(large).dtype == torch.float16


class Program(nn.Module):
    """Operations of which some are residual sums, in any order."""

    def __init__(self, steps: tuple[str, ...], norm: str) -> None:
        super().__init__()
        self.steps = steps
        made: dict[str, Callable[[], nn.Module]] = {
            "layer": lambda: nn.LayerNorm(WIDTH),
            "rms": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
            "plain": lambda: nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False),
            "block": lambda: BlockNorm(16),
        }
        self.norms = nn.ModuleList([made[norm]() for _ in steps])
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in steps])

    def forward(self, x: Tensor) -> Tensor:
        y, first = x, x
        for step, norm, linear in zip(self.steps, self.norms, self.linears, strict=True):
            if step == "sum":
                y = y + linear(y)
            if step == "first":
                y = first + linear(y)
            if step == "norm":
                y = norm(y)
            if step == "post":
                y = norm(torch.add(linear(y).tanh(), y))
            if step == "cross":
                y = first * linear(y) + y
            if step == "view":
                y = (y.unflatten(1, (4, 8)) + linear(y).unflatten(1, (4, 8))).flatten(1)
            if step == "product":
                y = y * torch.sigmoid(linear(y))
            if step == "sizes":
                y = linear(y).view(y.shape)
        return y


STEPS = st.lists(
    st.sampled_from(["sum", "first", "norm", "post", "cross", "view", "product", "sizes"]), min_size=1, max_size=6
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(steps=STEPS, norm=st.sampled_from(["layer", "rms", "plain", "block"]))
def test_any_forward_is_the_same_function_and_has_the_same_dtypes(steps: list[str], norm: str) -> None:
    torch.manual_seed(0)
    model = Program(tuple(steps), norm)
    inline = ("norms", *(name for name, _ in model.named_modules() if name.startswith("norms.")))
    found = widen_residual_sums(traced(model, rows, inline=inline), "float32", wanted)
    sums = [step for step in steps if step in ("sum", "first", "post", "cross", "view")]
    if isinstance(found, str):
        assert not sums
        return
    assert 1 <= len(found.targets) <= len(sums)
    high = patched(model, found)
    x = torch.randn(3, WIDTH, dtype=torch.float64)
    wide, theirs = copy.deepcopy(high).double(), copy.deepcopy(model).double()
    grads = [torch.autograd.grad(each(leaf := x.clone().requires_grad_()).sum(), leaf)[0] for each in (wide, theirs)]
    assert torch.equal(wide(x), theirs(x))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)  # the order of additions is not theirs
    narrow = x.bfloat16()
    assert high.bfloat16()(narrow).dtype == torch.bfloat16


class InPlace(Deep):
    def forward(self, x: Tensor) -> Tensor:
        return (x + self.linears[0](x)).clamp_(min=0)


class NoSum(Deep):
    def forward(self, x: Tensor) -> Tensor:
        return self.linears[0](x) + self.linears[1](x)


class Other(Deep):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.linears[0](x)[:, :1]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (NoSum, "its forward has no residual sum a + b of locals of one shape"),
        (Other, "its forward has no residual sum a + b of locals of one shape"),
    ],
)
def test_what_cannot_be_carried_is_told(kind: type[Deep], said: str) -> None:
    found = widen_residual_sums(traced(kind(2), rows), "float32", wanted)
    assert isinstance(found, str)
    assert found.startswith(said)


def test_only_the_sums_of_the_modules_that_are_meant() -> None:
    build, inputs, inline = ZOO["dcn"]
    forward = traced(build(), inputs, inline=inline)
    found = widen_residual_sums(forward, "float32", lambda name: name == "cross.1")
    assert isinstance(found, RewrittenOwner)
    assert found.targets == ("add_1",)
