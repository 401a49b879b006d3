"""Plans written by hand, for the tests of code generation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from loka.codegen import render_package
from loka.graph.expression import Ref, RefKind
from loka.graph.ir import ForwardIR, Region
from loka.graph.sites.site import GemmKind, RowCount, Site
from loka.numerics.enums import Accumulation, Format, Gemm, Range, Scaling
from loka.numerics.recipe import OperandRecipe
from loka.plan.plan import BindingKind, GemmPlan, Plan, PlannedBinding, SitePlan
from tests.support.expressions import site_call, statement
from tests.support.importing import import_folder

ROWWISE = OperandRecipe()
TENSORWISE = OperandRecipe(scaling=Scaling.TENSORWISE)
E5M2 = OperandRecipe(format=Format.E5M2)
BLOCK_ROW = OperandRecipe(scaling=Scaling.BLOCKWISE_1X128)
BLOCK_SQUARE = OperandRecipe(scaling=Scaling.BLOCKWISE_128X128)
POW2 = OperandRecipe(power_of_two=True)
STATIC = OperandRecipe(scaling=Scaling.TENSORWISE, range=Range.STATIC, amax=3.5)

_NUMBERS = itertools.count()  # of packages: the compiler remembers a name for good
Pair = tuple[OperandRecipe, OperandRecipe]
LINEAR_TYPE = "torch.nn.modules.linear.Linear"


def gemm_plan(gemm: Gemm, operands: Pair | None, fast: bool = False) -> GemmPlan:
    if operands is None:
        return GemmPlan(gemm, "as-is", None, None, "kept")
    accumulation = Accumulation.FAST if fast else Accumulation.PRECISE
    return GemmPlan(gemm, "torch.scaled_mm", operands, accumulation, "fp8 by policies/ranker.yaml:14")


def site_plan(
    name: str,
    fprop: Pair | None = (ROWWISE, ROWWISE),
    dgrad: Pair | None = (ROWWISE, ROWWISE),
    wgrad: Pair | None = (ROWWISE, ROWWISE),
    k: int = 48,
    n: int = 32,
    fast: bool = False,
    input_grad: bool = True,
    kind: GemmKind = GemmKind.LINEAR,
) -> SitePlan:
    site = Site(
        name=name,
        kind=kind,
        owner=name,
        weight=f"{name}.weight",
        bias=None,
        rows=RowCount(1),
        k=k,
        n=n,
        calls=1,
        calls_eval=1,
        share=0.1,
        input_grad=input_grad,
        fed_by=(),
        followed_by=(),
        where="",
    )
    gemms = [gemm_plan(Gemm.FPROP, fprop, fast)]
    if input_grad:
        gemms.append(gemm_plan(Gemm.DGRAD, dgrad, fast))
    gemms.append(gemm_plan(Gemm.WGRAD, wgrad, fast))
    return SitePlan(site, tuple(gemms), {})


def linear_binding(
    names: Sequence[str], k: int = 48, n: int = 32, bias: bool = True, hint: str = "", module_type: str = LINEAR_TYPE
) -> PlannedBinding:
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (("weight", (n, k)),)
    if bias:
        shapes += (("bias", (n,)),)
    return PlannedBinding(hint, BindingKind.LINEAR, tuple(names), module_type, tuple((name,) for name in names), shapes)


def make_plan(sites: Sequence[SitePlan], bindings: Sequence[PlannedBinding], name: str = "ranker") -> Plan:
    return Plan(
        name=name,
        target="reference",
        batch_size=64,
        policy_files=(("policies/ranker.yaml", "ab" * 32),),
        sites=tuple(sites),
        bindings=tuple(bindings),
        loka_version="0.1.0",
    )


def linear_plan(names: Sequence[str] = ("layers.0.fmb.0", "layers.1.fmb.0"), **recipe: object) -> Plan:
    """One group of equal linears."""
    return make_plan([site_plan(name, **recipe) for name in names], [linear_binding(names)])  # type: ignore[arg-type]


def local(name: str) -> Ref:
    return Ref(RefKind.LOCAL, name)


def attribute(text: str) -> Ref:
    return Ref(RefKind.ATTRIBUTE, text)


OPERANDS = ("{0}", "{1}", "{2}")  # x, weight, bias


def tower_forward(site: str = "tower.fc", prefix: str = "self.") -> ForwardIR:
    """layer_norm -> linear -> silu, then a residual: `forward(x, scale=None)` of a block."""
    statements = (
        statement(
            "normed",
            "layer_norm",
            "torch.nn.functional.layer_norm({0}, (48,), {1}, {2}, 1e-05)",
            (local("x"), attribute(f"{prefix}norm.weight"), attribute(f"{prefix}norm.bias")),
            note="norm",
        ),
        statement(
            "linear",
            "linear",
            "torch.nn.functional.linear({0}, {1}, {2})",
            (local("normed"), attribute(f"{prefix}fc.weight"), attribute(f"{prefix}fc.bias")),
            site_call(
                site, (local("normed"), attribute(f"{prefix}fc.weight"), attribute(f"{prefix}fc.bias")), *OPERANDS
            ),
            note="fc",
        ),
        statement("silu", "silu", "torch.nn.functional.silu({0})", (local("linear"),), note="act"),
        statement("add", "add", "{0}+{1}", (local("silu"), local("x"))),
    )
    return ForwardIR(
        owner=site.rpartition(".")[0],
        owner_type="sample.Tower",
        arguments=("x",),
        statements=statements,
        result=local("add"),
        inlined=("norm", "fc", "act"),
        regions=(Region(site, 0, 2, ("layer_norm", "linear", "silu")),),
    )


def cross_forward() -> ForwardIR:
    """A low-rank cross on Parameters: two GEMMs, one of them written as a matmul with a (K, N) Parameter."""
    statements = (
        statement(
            "down",
            "matmul",
            "{0} @ {1}",
            (local("x"), attribute("self.v[0]")),
            site_call("cross.v.0", (local("x"), attribute("self.v[0]")), "{0}", "{1}.t()"),
        ),
        statement(
            "up",
            "linear",
            "torch.nn.functional.linear({0}, {1}, {2})",
            (local("down"), attribute("self.w[0]"), attribute("self.b[0]")),
            site_call("cross.w.0", (local("down"), attribute("self.w[0]"), attribute("self.b[0]")), *OPERANDS),
        ),
        statement("mul", "mul", "{0} * {1}", (local("x"), local("up"))),
    )
    return ForwardIR("cross", "sample.Cross", ("x",), statements, local("mul"), ())


def forward_plan() -> Plan:
    """A region, and a module with two GEMMs on Parameters."""
    tower = PlannedBinding(
        "Tower",
        BindingKind.FORWARD,
        ("tower",),
        "sample.Tower",
        (("tower.fc",),),
        (("fc.weight", (48, 48)), ("fc.bias", (48,))),
        tower_forward(),
    )
    cross = PlannedBinding(
        "",
        BindingKind.FORWARD,
        ("cross",),
        "sample.Cross",
        (("cross.v.0", "cross.w.0"),),
        (("v.0", (48, 16)), ("w.0", (48, 16))),
        cross_forward(),
    )
    sites = [
        site_plan("tower.fc", k=48, n=48),
        site_plan("cross.v.0", k=48, n=16, wgrad=None, kind=GemmKind.MATMUL),
        site_plan("cross.w.0", k=16, n=48, kind=GemmKind.FUNCTIONAL_LINEAR),
    ]
    return make_plan(sites, [tower, cross])


def mixed_plan() -> Plan:
    """Every scaling, both formats, static and power-of-two scales, GEMMs that stay, with and without bias."""
    recipes: list[dict[str, object]] = [
        {},
        {"fprop": (TENSORWISE, TENSORWISE), "dgrad": (TENSORWISE, TENSORWISE), "wgrad": None},
        {"dgrad": (E5M2, ROWWISE), "wgrad": (E5M2, ROWWISE), "fast": True},
        {
            "fprop": (BLOCK_ROW, BLOCK_SQUARE),
            "dgrad": (BLOCK_ROW, BLOCK_SQUARE),
            "wgrad": (BLOCK_ROW, BLOCK_ROW),
        },
        {"fprop": None, "dgrad": None},
        {"fprop": (STATIC, POW2), "dgrad": (POW2, POW2), "wgrad": (STATIC, STATIC)},
        {"input_grad": False},
        {"fprop": None, "dgrad": (ROWWISE, ROWWISE), "wgrad": None},
    ]
    sites = [site_plan(f"tower.{i}.fc", **recipe) for i, recipe in enumerate(recipes)]  # type: ignore[arg-type]
    bindings = [linear_binding((site.site.name,), bias=i != 6) for i, site in enumerate(sites)]
    return make_plan(sites, bindings)


def planned_on(
    plan: Plan, kernels: Mapping[Gemm, str], m_buckets: Mapping[Gemm, tuple[tuple[int, str], ...]] | None = None
) -> Plan:
    """The plan with its FP8 GEMMs on other kernels."""
    sites = []
    for site in plan.sites:
        gemms = [
            replace(
                gemm, kernel=kernels.get(gemm.gemm, "torch.scaled_mm"), m_buckets=(m_buckets or {}).get(gemm.gemm, ())
            )
            if gemm.fp8
            else gemm
            for gemm in site.gemms
        ]
        sites.append(replace(site, gemms=tuple(gemms)))
    return replace(plan, sites=tuple(sites))


PlanPackage = Callable[[Plan], ModuleType]


def plan_packages(make_folder: Callable[[str], Path]) -> PlanPackage:
    """Gives the package of a plan; a plan object is rendered once."""
    made: dict[int, tuple[ModuleType, Plan]] = {}  # by id, with the plan, so that no other gets its id

    def of(plan: Plan) -> ModuleType:
        if id(plan) not in made:
            name = f"gen_planned_{next(_NUMBERS)}"
            made[id(plan)] = import_package(render_package(plan), make_folder(name), name), plan
        return made[id(plan)][0]

    return of


def import_package(files: dict[str, str], folder: Path, name: str) -> ModuleType:
    """Write the files to folder/name and import them as a top-level package called `name`."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (target / file).write_text(text, encoding="utf-8", newline="")
    return import_folder(target)
