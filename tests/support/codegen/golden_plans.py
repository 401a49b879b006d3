"""Plans of the golden packages: between them they have every kind of code that `loka.codegen` writes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import chdir
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loka.codegen import render_package
from loka.graph.fingerprint import Fingerprint, PlannedCall
from loka.mods.adaptation import Adaptation
from loka.numerics.enums import Gemm
from loka.plan.plan import BindingKind, ModPlan, Plan, PlannedBinding
from loka.plan.planner import make_plan
from loka.zoo.wukong import Wukong, WukongSizes
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.models import sum_models as sums

FOLDER = Path(__file__).parents[2] / "codegen" / "golden"
FILES = ("__init__.py", "kernels.py", "modules.py")  # fused.py and triton_kernels.py are held by tests/kernels/fused
_TABLE = ((16, "torch.scaled_mm"), (48, "fbgemm.rowwise"))
_POLICY = """
version: 1
name: interactions
model: {factory: "tests.support.codegen.golden_plans:wukong", inputs: "tests.support.codegen.golden_plans:embeddings",
  batch_size: 32}
target: reference
defaults: {compute: keep}
mods: [{use: block_norm, optional: true}, {use: fuse_interaction}]
"""


def linears() -> Plan:
    """Linears of all recipes and on several kernels, regions, GEMMs on Parameters, a fingerprint, mods."""
    mixed, forwards = plans.mixed_plan(), plans.forward_plan()
    many = plans.linear_plan([f"layers.{number}.fmb.0" for number in range(12)])
    on_kernels = plans.planned_on(
        plans.linear_plan(("a",)), {Gemm.FPROP: "fbgemm.rowwise", Gemm.DGRAD: "mslk.rowwise"}, {Gemm.WGRAD: _TABLE}
    )
    by_rows = plans.planned_on(plans.linear_plan(("b",)), {}, {Gemm.FPROP: _TABLE})
    calls = (
        PlannedCall(
            "(('tuple', (('tensor', 'float32', ((5, 8), 48)),)), ('dict', (('mask', None),)))",
            ("v0 = linear(x, self.inner.fc.weight, None)", "v1 = dropout(v0, 0.1, True, False)", "return v1"),
            ("v0 = linear(x, self.inner.fc.weight, None)", "v1 = dropout(v0, 0.1, False, False)", "return v1"),
        ),
    )
    forward = replace(
        plans.tower_forward("deep.fc", "self.inner."),
        arguments=("x", "*", "mask=None"),
        guards=("mask is None",),
        fingerprint=Fingerprint(calls, "float32"),
        rewritten=("merge_siblings",),
    )
    deep = PlannedBinding(
        "", BindingKind.FORWARD, ("deep",), "sample.Deep", (("deep.fc",),), (("fc.weight", (48, 48)),), forward
    )
    sites = [
        *mixed.sites,
        *forwards.sites,
        *many.sites,
        *on_kernels.sites,
        *by_rows.sites,
        plans.site_plan("deep.fc", k=48, n=48),
    ]
    bindings = [*mixed.bindings, *forwards.bindings, *many.bindings, *on_kernels.bindings, *by_rows.bindings, deep]
    changed = tuple(f"layers.{layer}.{norm}" for layer in range(8) for norm in ("first", "second"))
    settings = (("block", 16), ("eps", 1e-5))
    adaptation = Adaptation("block_norm", changed, "torch.nn.modules.normalization.LayerNorm", settings)
    mod = ModPlan("block_norm", "mod 1: block_norm", "linears.yaml:4", False, "a promise", settings, (adaptation,))
    return replace(plans.make_plan(sites, bindings, "linears"), mods=(mod,))


class Towers(nn.Module):
    """A chain of each kind, one after the other, and a linear alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 64), nn.SiLU(), nn.Linear(64, 48))
        self.kept = sums.Crosses(layers=1, hidden=48)
        gate = chains.SwishNorm(nn.LayerNorm(64), nn.Sigmoid())
        self.static = nn.Sequential(nn.Linear(48, 64), gate, nn.Linear(64, 48, bias=False))
        self.native, self.last = sums.GatedBlocks(), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.softplus(self.native(F.softplus(self.static(self.kept(self.fp8(x)))))))
        return out


def towers() -> Plan:
    """Chains in FP8, with a wgrad that stays, with static scales, and around GEMMs in the model's dtype."""

    def recipe(name: str) -> dict[str, object]:
        if name.startswith("native"):
            return chains.AS_IS
        if name.startswith("static"):
            return chains.known_chain()
        return {**chains.CHAIN, "wgrad": None} if name.startswith("kept") and "down" in name else chains.CHAIN

    return replace(chains.chain_plan(Towers(), recipe), name="chains")


def wukong() -> nn.Module:
    """The factory of the policy below."""
    torch.manual_seed(0)
    return Wukong(WukongSizes(embeddings=6, dim=16, layers=1, rank=4, hidden=32))


def embeddings(batch: int) -> tuple[Tensor]:
    """Its inputs."""
    return (torch.randn(batch, 6, 16),)


def interactions() -> Plan:
    """FM interactions and norms of what is concatenated, as a policy asks for them."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        Path("interactions.yaml").write_text(_POLICY)
        return make_plan("interactions.yaml")


GOLDEN: dict[str, Callable[[], Plan]] = {"linears": linears, "chains": towers, "interactions": interactions}


@cache
def package_files(name: str) -> dict[str, str]:
    """All files of a golden package."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return render_package(GOLDEN[name]())


def rendered(name: str) -> dict[str, str]:
    """The files that are stored, by the names that they are stored under, without their stamp."""
    return {f"{file}.txt": _unstamped(package_files(name)[file]) for file in FILES}


def _unstamped(text: str) -> str:
    return "\n".join('STAMP = ""' if line.startswith("STAMP = ") else line for line in text.split("\n"))


def renew() -> None:
    """Write all golden packages anew."""
    for name in GOLDEN:
        folder = FOLDER / name
        os.makedirs(folder, exist_ok=True)
        for file, text in rendered(name).items():
            (folder / file).write_text(text, encoding="utf-8", newline="")
