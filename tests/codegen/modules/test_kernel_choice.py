"""Generated code calls the kernels that the plan names, in linears and in chains, forward and backward apart."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from loka import dispatch
from loka.codegen import render_package
from loka.errors import LokaError
from loka.kernels import call_counters
from loka.numerics.enums import Gemm
from loka.plan.plan import Plan
from loka.plan.serialize import from_json, to_json
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans

FBGEMM, MSLK, TORCH = "fbgemm.rowwise", "mslk.rowwise", "torch.scaled_mm"
MIXED = {Gemm.FPROP: FBGEMM, Gemm.DGRAD: TORCH, Gemm.WGRAD: MSLK}
TABLE = ((16, TORCH), (48, FBGEMM), (112, MSLK))  # multiples of 16, as plans have them
Package = Callable[[Plan], ModuleType]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    made: list[ModuleType] = []

    def of(plan: Plan) -> ModuleType:
        name = f"gen_kernels_{len(made)}"
        made.append(plans.import_package(render_package(plan), tmp_path_factory.mktemp(name), name))
        return made[-1]

    return of


class Linears(nn.Module):
    """Two linears that a plan binds alone."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(48, 32, bias=bias)
        self.b = nn.Linear(48, 32, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.a(x), self.b(x).sigmoid()], dim=-1)


def trained(package: ModuleType, model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    with package.apply(model) as patch:
        found = chains.gradients(model, x, dy)
        patch.verify()
    return found


def same_but_for_bfloat16(found: dict[str, Tensor], expected: dict[str, Tensor], steps: int = 1) -> None:
    """GEMMs that write bfloat16 differ from float32 ones by its rounding, through some steps of e4m3."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert chains.error(value, expected[name]) < 2e-2 * steps, name


@pytest.mark.parametrize("kernels", [MIXED, dict.fromkeys(Gemm, FBGEMM), {Gemm.WGRAD: FBGEMM}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linears_run_on_the_planned_kernels(package: Package, kernels, bias: bool) -> None:
    plan = plans.make_plan(
        [plans.site_plan(name) for name in ("a", "b")], [plans.linear_binding(("a", "b"), bias=bias)]
    )
    model, x = Linears(bias), torch.randn(21, 48)
    dy = torch.randn(21, 64)
    on_torch = trained(package(plan), model, x, dy)
    same_but_for_bfloat16(trained(package(plans.planned_on(plan, kernels)), model, x, dy), on_torch)


def test_what_ran_is_counted_for_the_kernel_that_ran(package: Package) -> None:
    model = Linears()
    patch = package(plans.planned_on(plans.linear_plan(("a", "b")), MIXED)).apply(model)
    model(torch.randn(3, 48, requires_grad=True)).sum().backward()
    first = model.a.loka.counter_id(0)
    assert [call_counters.counts(first + offset) for offset in range(3)] == [{FBGEMM: 1}, {TORCH: 1}, {MSLK: 1}]
    patch.verify()


def test_frozen_weights_run_on_the_kernel_of_fprop(package: Package) -> None:
    model, x = Linears(), torch.randn(5, 48)
    expected = model(x)
    patch = package(plans.planned_on(plans.linear_plan(("a", "b")), MIXED)).apply(model, mode="infer")
    with torch.no_grad():
        found = model(x)
    patch.verify()
    assert call_counters.counts(model.a.loka.counter_id(0)) == {FBGEMM: 1}
    assert chains.error(found, expected) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [dict.fromkeys(Gemm, FBGEMM), {Gemm.DGRAD: FBGEMM, Gemm.WGRAD: MSLK}], ids=str)
def test_a_chain_runs_on_the_planned_kernels(package: Package, kernels) -> None:
    body = chains.Tower()
    plan = chains.chain_plan(body, chains.ROWWISE_CHAIN)
    other = plans.planned_on(plan, kernels)
    text = render_package(other)["kernels.py"]
    (gemms,) = re.findall(r"StageGemms\(.*?\n\)", text, re.DOTALL)  # of all three linears
    assert gemms.count('"scaled_mm"') == (Gemm.FPROP not in kernels)
    assert gemms.count('"loka::') == len(kernels)
    x = torch.randn(9, 48)
    dy = torch.randn_like(body(x))
    model = chains.Holder(body)
    on_torch = trained(package(plan), model, x, dy)
    same_but_for_bfloat16(trained(package(other), model, x, dy), on_torch, steps=4)


def test_chains_that_differ_in_a_kernel_alone_are_two_functions() -> None:
    tower, other = chains.linear_plan(("a", "b")), {Gemm.DGRAD: FBGEMM}
    sites = (tower.sites[0], plans.planned_on(tower, other).sites[1])
    bindings = [plans.linear_binding((name,)) for name in ("a", "b")]
    text = render_package(plans.make_plan(sites, bindings))["kernels.py"]
    assert text.count(" = constant(") == 2
    assert text.count('"loka::fbgemm_rowwise_mm"') == 1


def test_modules_on_different_kernels_do_not_share_a_class() -> None:
    plan = plans.linear_plan(("a", "b"))
    sites = (plan.sites[0], plans.planned_on(plan, MIXED).sites[1])
    with pytest.raises(LokaError, match="mixes recipes"):
        render_package(plans.make_plan(sites, plan.bindings))


def test_a_site_without_dgrad_has_one_that_would_run_all_the_same() -> None:
    recipe = {"fprop": (plans.ROWWISE, plans.ROWWISE), "wgrad": (plans.ROWWISE, plans.ROWWISE), "input_grad": False}
    for kernels, calls in ((dict.fromkeys(Gemm, FBGEMM), 3), ({Gemm.FPROP: FBGEMM}, 1)):
        text = render_package(plans.planned_on(plans.linear_plan(("a", "b"), **recipe), kernels))["kernels.py"]
        assert text.count("torch.ops.loka.fbgemm_rowwise_mm.default(") == calls


@pytest.mark.slow
@pytest.mark.parametrize("chain", [False, True])
def test_batches_run_on_their_kernels_in_two_compilations(package: Package, chain: bool) -> None:
    body = chains.Tower() if chain else nn.Sequential(nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 32))
    sites = [plans.site_plan(name, k=k, n=32) for name, k in (("body.0", 48), ("body.2", 32))]
    bindings = [plans.linear_binding((site.site.name,), k=site.site.k) for site in sites]
    plain = chains.chain_plan(body, chains.ROWWISE_CHAIN) if chain else plans.make_plan(sites, bindings)
    found = package(plans.planned_on(plain, {}, dict.fromkeys(Gemm, TABLE)))
    model, eager = chains.Holder(copy.deepcopy(body)), chains.Holder(copy.deepcopy(body))
    patch = found.apply(model)
    found.apply(eager)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    module = model.body if chain else model.body[0]
    torch.compiler.reset()  # what an earlier compilation of the same code learned of its shapes, too
    torch._dynamo.utils.counters.clear()
    batches = {3: TORCH, 16: TORCH, 17: FBGEMM, 33: FBGEMM, 48: FBGEMM, 49: MSLK, 500: MSLK}
    for rows, kernel in batches.items():
        patch.reset()
        before = [call_counters.counts(module.loka.counter_id(0) + offset) for offset in range(3)]
        x = torch.randn(rows, 48)
        dy = torch.randn_like(body(x))
        torch.manual_seed(rows)
        one, other = chains.gradients(compiled, x, dy), chains.gradients(eager, x, dy)
        patch.verify()
        for name, value in one.items():
            assert chains.error(value, other[name]) < 1e-2, name
        for offset, seen in enumerate(before):
            now = call_counters.counts(module.loka.counter_id(0) + offset)
            assert {name for name, count in now.items() if count > seen.get(name, 0)} == {kernel}
    assert len(graphs) == 2  # one for the first batch, one for any number of rows
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("m_buckets", [None, dict.fromkeys(Gemm, TABLE)], ids=["kernel", "table"])
def test_a_nan_is_traced_through_every_kernel(package: Package, m_buckets) -> None:
    model = Linears()
    plan = plans.planned_on(plans.linear_plan(("a", "b")), dict.fromkeys(Gemm, FBGEMM), m_buckets)
    patch = package(plan).apply(model)
    with torch.no_grad():
        model.b.weight[3, 4] = torch.nan
    with pytest.raises(dispatch.NonFiniteError) as error, patch.trace_nonfinite():
        model(torch.randn(5, 48))
    assert (error.value.site, error.value.gemm) == ("b", "fprop")


def test_a_kernel_without_an_operator_is_a_fault() -> None:
    with pytest.raises(LokaError, match=r"a plan runs 'as-is', which has no operator"):
        render_package(plans.planned_on(plans.linear_plan(), {Gemm.FPROP: "as-is"}))
    with pytest.raises(LokaError, match=r"limits that ascend, not \[40, 6\]"):
        render_package(plans.planned_on(plans.linear_plan(), {}, {Gemm.FPROP: ((40, FBGEMM), (6, TORCH))}))


def test_a_table_survives_plan_json() -> None:
    plan = plans.planned_on(plans.linear_plan(), MIXED, {Gemm.FPROP: TABLE})
    assert from_json(to_json(plan)) == plan
    assert plan.sites[0].gemms[0].kernels == (FBGEMM, TORCH, MSLK)
