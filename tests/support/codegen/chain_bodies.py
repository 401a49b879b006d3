"""Bodies of chains by name, and the forms in which models write their norms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.mods.norms import BlockNorm
from loka.plan.plan import Plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen.chain_plans import SwishNorm, Tower
from tests.support.models import sum_models as sums


class ByShape(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return F.rms_norm(y.view(-1, 256), (256,), None, 1e-6).view(y.shape)


class BySizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256, eps=1e-6, elementwise_affine=False)

    def forward(self, y: Tensor) -> Tensor:
        rows, width = y.shape
        out: Tensor = self.norm(y.view(-1, 256)).view(rows, width)
        return out


class ByReshape(nn.Module):
    def forward(self, y: Tensor) -> Tensor:
        return torch.rms_norm(y.reshape(y.size(0), -1, 256), (256,), eps=1e-6).reshape_as(y)


BLOCK_NORMS = (BlockNorm, ByShape, BySizes, ByReshape)
SWISH_NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer_norm": nn.LayerNorm,
    "rms_norm": partial(nn.RMSNorm, eps=1e-5),
    "block_norm": lambda width: BlockNorm(16, 1e-5),
}
GATES = {"gate_sigmoid": nn.Sigmoid, "gate_hardsigmoid": nn.Hardsigmoid}


def block_body(norm: Callable[[], nn.Module], hidden: int = 512, bias: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, hidden, bias=bias), norm(), nn.Hardswish(), nn.Linear(hidden, 32, bias=bias))


def swish_body(
    kind: str = "layer_norm",
    gate: str = "gate_sigmoid",
    form: Callable[[nn.Module, nn.Module], nn.Module] = SwishNorm,
) -> nn.Sequential:
    torch.manual_seed(0)
    norm = SWISH_NORMS[kind]
    made = nn.Sequential(
        nn.Linear(48, 64), form(norm(64), GATES[gate]()), nn.Linear(64, 32, bias=False),
        form(norm(32), GATES[gate]()), nn.Linear(32, 16),
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if ".norm" in name:
                parameter.add_(torch.randn(parameter.shape) / 2)
    return made


class SwishOfSums(nn.Module):
    """A SwishNorm of a product and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(48, 48), SwishNorm(nn.LayerNorm(48), nn.Sigmoid()), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(x * self.up(x) + x))
        return out


class Pair(nn.Module):
    """A wgrad that is kept behind a plain product, and one whose operands the chain has in FP8 alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 24, bias=False)
        self.down = nn.Linear(24, 40, bias=False)
        self.second = nn.Linear(40, 48)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.relu(self.down(self.first(x))))
        return out


def _stacks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    rms = partial(nn.RMSNorm, eps=1e-6)
    return {
        "layer_norm_silu": Tower(),
        "rms_norm_hardswish": Tower(norm=rms, activation=nn.Hardswish),
        "no_affine_relu": Tower(norm=partial(nn.LayerNorm, elementwise_affine=False), activation=nn.ReLU),
        "no_bias_gelu": Tower(norm=partial(nn.LayerNorm, bias=False), activation=nn.GELU, bias=False),
        "linears": nn.Sequential(nn.Linear(48, 16, bias=False), nn.Linear(16, 48), nn.Linear(48, 32, bias=False)),
        "norm_and_linears": nn.Sequential(
            nn.LayerNorm(48), nn.Linear(48, 24), nn.Linear(24, 40, bias=False), nn.ReLU()
        ),
        "activations": nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 64, bias=False), nn.Sigmoid()),
        "bounded": nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 40), nn.RMSNorm(40, eps=1e-5), nn.Tanh()),
        "leaky": nn.Sequential(
            nn.Linear(48, 64), nn.LeakyReLU(0.2), nn.Linear(64, 40), nn.LayerNorm(40), nn.LeakyReLU()
        ),
        "one": nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 40), nn.LayerNorm(40), nn.Sigmoid()),
        "norm_at_the_end": nn.Sequential(nn.Linear(48, 13), nn.LayerNorm(13)),
        "crosses": sums.Crosses(),
        "crosses_apart": sums.Apart(),
        "gated": sums.Gated(),
        "gated_blocks": sums.GatedBlocks(),
        "weighted": sums.Weighted(),
        "residuals": sums.Residuals(),
        "broadcast": sums.Broadcast(),
        "swiglu": sums.SwiGlu(48, 64),
        "merged_glu": sums.MergedGlu(),
        "merged_norm_glu": sums.MergedGlu(torch.sigmoid, norm=True),
        "gate_unit": sums.GateUnit(),
        "plain_norm_before": nn.Sequential(nn.RMSNorm(48, eps=1e-5, elementwise_affine=False), nn.Linear(48, 24)),
    }


def _others() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    rms = partial(nn.RMSNorm, eps=1e-6)
    return {
        "no_bias_rms_norm": Tower(norm=rms, activation=nn.Hardswish, bias=False),
        "alone": nn.Sequential(nn.Linear(48, 40, bias=False)),
        "biased": nn.Sequential(nn.Linear(48, 40)),
        "blocks": nn.Sequential(
            nn.Linear(48, 512, bias=False), BlockNorm(256), nn.Hardswish(),
            nn.Linear(512, 24), nn.GELU(), nn.Linear(24, 40),
        ),
        "swish": nn.Sequential(nn.Linear(48, 64), SwishNorm(nn.LayerNorm(64), nn.Sigmoid()), nn.Linear(64, 24)),
        "swish_blocks": nn.Sequential(
            nn.Linear(48, 512), SwishNorm(BlockNorm(256), nn.Hardsigmoid()), nn.Linear(512, 24)
        ),
        "block_norm_first": nn.Sequential(BlockNorm(16), nn.Linear(48, 24), nn.Linear(24, 8)),
        "swish_of_sums": SwishOfSums(),
        "pair": Pair(),
        **{
            f"{norm.__name__}{'_bias' * bias}": block_body(norm, bias=bias)
            for norm in BLOCK_NORMS for bias in (False, True)
        },
        **{f"swish_{kind}_{gate}": swish_body(kind, gate) for kind in SWISH_NORMS for gate in GATES},
    }  # fmt: skip


STACKS = _stacks()  # of all kinds that a chain may have
BODIES = {**STACKS, **_others()}
X, DY = 8.0, 16.0  # maxima of static scales
KEPT = "down"  # what the names of linears have whose wgrad stays in the model's dtype
RECIPES: dict[str, chains.Recipe] = {
    "fp8": chains.CHAIN,
    "rowwise": chains.ROWWISE_CHAIN,
    "plain": chains.AS_IS,
    "kept": lambda name: {**chains.CHAIN, "wgrad": None} if KEPT in name else chains.CHAIN,
    "static": chains.known_chain(X, DY),
    "static_divided": chains.known_chain(X, DY, power_of_two=False),
    "static_kept": lambda name: chains.known_chain(X, DY, wgrad=KEPT not in name),
    "static_small": chains.known_chain(1.0, 1.0),
}


@cache
def plan_of(recipe: str, body: str) -> Plan:
    """The plan of a body under a recipe."""
    return chains.chain_plan(BODIES[body], RECIPES[recipe])


class Gated(nn.Module):
    """As an HSTU layer ends: a norm of one part of a product, times the other."""

    def __init__(self, norm: nn.Module, width: int = 48) -> None:
        super().__init__()
        self.up, self.norm, self.out = nn.Linear(width, 2 * width), norm, nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        u, a = F.silu(self.up(x)).chunk(2, -1)
        return torch.relu(self.out(self.norm(a) * u))
