"""Planned kernels on a Hopper GPU: compiled, captured, counted, missing; and what a table by rows costs the CPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from loka import dispatch
from loka.codegen import render_package
from loka.kernels import call_counters
from loka.kernels.gemm import fbgemm, mslk
from loka.numerics.enums import Gemm
from loka.plan.plan import Plan
from tests.support.codegen import chain_plans as chains
from tests.support.codegen import codegen_plans as plans
from tests.support.gpu import ON_HOPPER

pytestmark = ON_HOPPER

TORCH = "torch.scaled_mm"
WIDTH = 512
Package = Callable[[Plan], ModuleType]


def needed(kernel: str) -> None:
    library = {"fbgemm.rowwise": fbgemm.LIBRARY, "mslk.rowwise": mslk.LIBRARY}.get(kernel)
    if library is not None and library.missing_reason() is not None:
        pytest.skip(str(library.missing_reason()))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    made: list[ModuleType] = []

    def of(plan: Plan) -> ModuleType:
        name = f"gen_kernels_gpu_{len(made)}"
        folder: Path = tmp_path_factory.mktemp(name)
        made.append(plans.import_package(render_package(plan), folder, name))
        return made[-1]

    return of


@pytest.fixture(scope="module")
def tower() -> chains.Tower:
    torch.manual_seed(0)
    return chains.Tower(WIDTH, WIDTH)


def plan_of(tower: chains.Tower) -> Plan:
    return chains.chain_plan(tower, chains.ROWWISE_CHAIN, lambda batch: torch.randn(batch, WIDTH))


@pytest.mark.parametrize("kernel", ["fbgemm.rowwise", "mslk.rowwise"])
@pytest.mark.parametrize("gemms", [tuple(Gemm), (Gemm.FPROP,), (Gemm.DGRAD,), (Gemm.WGRAD,)], ids=str)
def test_a_chain_on_another_library_gives_what_it_gives_on_torch(package: Package, tower, kernel: str, gemms) -> None:
    needed(kernel)
    plan = plan_of(tower)
    x, dy = (torch.randn(4096, WIDTH, device="cuda").bfloat16() for _ in range(2))
    found = []
    for planned in (plan, plans.planned_on(plan, dict.fromkeys(gemms, kernel))):
        model = chains.Holder(copy.deepcopy(tower).cuda().bfloat16())
        with package(planned).apply(model) as patch:
            found.append(chains.gradients(model, x, dy))
            patch.verify()
    for name, value in found[0].items():
        assert chains.error(found[1][name], value) < 2e-2, name


@pytest.mark.parametrize("kernel", ["fbgemm.rowwise", "mslk.rowwise"])
def test_where_the_library_is_missing_nothing_is_bound(package: Package, tower, kernel: str) -> None:
    library = {"fbgemm.rowwise": fbgemm.LIBRARY, "mslk.rowwise": mslk.LIBRARY}[kernel]
    if library.unavailable_reason() is None:
        pytest.skip(f"{library.name} is here")
    model = chains.Holder(copy.deepcopy(tower).cuda().bfloat16())
    with pytest.raises(dispatch.BindError, match="cannot run on this machine") as error:
        package(plans.planned_on(plan_of(tower), {Gemm.WGRAD: kernel})).apply(model)
    assert library.name in error.value.problems[0]
    assert library.install in error.value.problems[0]
    assert type(model.body) is chains.Tower


@pytest.mark.parametrize("kernel", [TORCH, "fbgemm.rowwise"])
def test_batches_run_on_their_kernels_compiled_and_captured(package: Package, tower, kernel: str) -> None:
    needed(kernel)
    table = ((1000, TORCH), (5000, kernel))
    made = package(plans.planned_on(plan_of(tower), {}, dict.fromkeys(Gemm, table)))
    model = chains.Holder(copy.deepcopy(tower).cuda().bfloat16())
    patch = made.apply(model)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, fullgraph=True)
    number = model.body.loka.counter_id(0)
    for rows in (512, 1000, 1001, 4096, 8192, 96):
        patch.reset()
        before = call_counters.counts(number)
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        compiled(x).float().square().sum().backward()
        patch.verify()
        ran = {name for name, count in call_counters.counts(number).items() if count > before.get(name, 0)}
        assert ran == {TORCH if rows <= 1000 else kernel}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for rows in (512, 4096):
        x = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            expected = model(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(x)
            out.zero_()
            graph.replay()
        assert torch.equal(out, expected)


def host_us(*calls: Callable[[], object]) -> list[float]:
    """Microseconds of the CPU's time for each call, the least of 40 rounds; the queue of launches is never full.

    The calls take turns, a round each, so that they see the same clock and the same neighbours.
    """
    best = [float("inf")] * len(calls)
    for _ in range(40):
        for number, call in enumerate(calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            best[number] = min(best[number], (time.perf_counter() - start) / 100 * 1e6)
    return best


@pytest.mark.timing
def test_a_table_costs_the_cpu_less_than_5_us_a_call() -> None:
    a = torch.randn(64, 64, device="cuda").to(torch.float8_e4m3fn)
    scale, number = torch.ones(64, 1, device="cuda"), call_counters.new_counters(1)
    operands = (a, scale, a, scale, "rowwise", "rowwise", torch.bfloat16, False, number)
    table = "8: fbgemm.rowwise, 16: fbgemm.rowwise, 64: torch.scaled_mm"
    direct, m_buckets = host_us(
        lambda: dispatch.scaled_mm(*operands), lambda: dispatch.mm_by_m_bucket(*operands, table)
    )
    print(f"scaled_mm {direct:.2f} us, mm_by_m_bucket {m_buckets:.2f} us of host time a call")
    assert m_buckets - direct < 5.0


class Recorded(TorchDispatchMode):
    """The planned operators that run, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace in ("loka", "loka_generated"):
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.timing
def test_a_bound_region_costs_the_cpu_less_than_5_us_above_its_kernels(package: Package) -> None:
    """In eager, frozen: the module's call, its Parameters, and whatever generated code does between the kernels."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Sigmoid())
    made = package(chains.chain_plan(body, chains.CHAIN, lambda batch: torch.randn(batch, WIDTH)))
    model = chains.Holder(body.cuda().bfloat16())
    made.apply(model, mode="infer")
    x = torch.randn(64, WIDTH, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        with Recorded() as recorded:
            expected = model.body(x)
        assert [func.namespace for func, _ in recorded.calls] == ["loka_generated", "loka", "loka_generated"]

        run_by = {kernel.overload: kernel for kernel in vars(made.fused).values() if hasattr(kernel, "overload")}
        run_by[torch.ops.loka.scaled_mm.default] = dispatch.scaled_mm
        calls = [(run_by[func], arguments) for func, arguments in recorded.calls]

        def direct() -> object:
            for run, arguments in calls:
                out = run(*arguments)
            return out

        assert torch.equal(direct(), expected)
        kernels, bound = host_us(direct, lambda: model.body(x))
    print(f"kernels {kernels:.2f} us, bound region {bound:.2f} us of host time a call")
    assert bound - kernels < 5.0
