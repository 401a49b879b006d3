"""Plans that know the host: what launches cost it, and decisions where a step waits for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from loka.devices.spec import Execution
from loka.devices.targets import DEFAULT
from loka.kernels.measurements.parts import Part, PartKind
from loka.mods.policy_loader import load_policy
from loka.numerics.enums import Compute, Fuse
from loka.plan.decide import Situation
from loka.plan.plan import Plan, SitePlan
from loka.plan.planner import make_plan
from loka.plan.resolve import resolve
from loka.plan.select.perf_model import HostModel
from loka.plan.select.workload import TracedNeighbours
from loka.plan.totals import format_host, total_time
from loka.policy.policy import ExecutionSpec
from loka.policy.problems import PolicyError
from tests.support.plan.plan_costs import SAFE_CHAIN, SCALED_MM, MadeUp

NAMES = ("a", "b", "c")
HOST = DEFAULT.host


@pytest.fixture
def decided(make_site, chain_settings, make_known) -> Callable[..., tuple[SitePlan, ...]]:
    """Three sites of a safe recipe that FP8 makes faster on the GPU: 1024 wide, 2048 and 4096, as a policy has it."""
    known = make_known(dict.fromkeys(NAMES, SAFE_CHAIN))
    sites = [make_site(name, k=width, n=width) for name, width in zip(NAMES, (1024, 2048, 4096), strict=True)]

    def make(execution: ExecutionSpec | None, compute: Compute = Compute.AUTO) -> tuple[SitePlan, ...]:
        costs = MadeUp({"as-is": 1.0, SCALED_MM: 0.5})
        situation = Situation("h100", 8192, known=known, costs=costs, execution=execution)
        traced = TracedNeighbours(tuple((name,) for name in NAMES))
        return resolve(sites, [chain_settings(compute, fuse=Fuse.AUTO)] * 3, situation, {}, traced)

    return make


def step_us(plans: tuple[SitePlan, ...], spec: ExecutionSpec, as_is: bool = False) -> float:
    """The longer of the host's and the GPU's time in a step, microseconds."""
    times = [plan.timing.as_is if as_is else plan.timing.chosen for plan in plans if plan.timing is not None]
    assert len(times) == len(plans)
    gpu = 1e3 * spec.gpu_ms + sum(time.us for time in times)
    return max(gpu, 1e3 * spec.host_ms + sum(time.host_us or 0.0 for time in times))


def test_without_an_execution_nothing_is_priced(decided) -> None:
    plans = decided(None)
    assert all(plan.fp8 for plan in plans)
    assert all(plan.timing.chosen.host_us is None is plan.timing.as_is.host_us for plan in plans)


@pytest.mark.parametrize("mode", [Execution.REDUCE_OVERHEAD, Execution.GRAPH])
def test_in_graphs_the_plan_is_that_of_the_gpu(decided, mode: Execution) -> None:
    plans = decided(ExecutionSpec(mode, 0.0, 0.0))
    assert [plan.gemms for plan in plans] == [plan.gemms for plan in decided(None)]
    assert all(plan.timing.chosen.host_us == 0.0 for plan in plans)


@pytest.mark.parametrize("mode", [Execution.EAGER, Execution.COMPILED])
def test_a_step_that_waits_for_the_host_stays_as_it_is(decided, mode: Execution) -> None:
    """Its host has 3 ms of other work, in which the GPU has long finished."""
    plans = decided(ExecutionSpec(mode, 3.0, 0.0))
    assert not any(plan.fp8 for plan in plans)
    reasons = {gemm.reason for plan in plans for gemm in plan.gemms}
    assert all(reason.startswith("kept: the step waits for the host, which this costs ") for reason in reasons)
    outcomes = {each.outcome for plan in plans for each in plan.options if len(set(each.kernels)) == 1}
    assert any(outcome.startswith("the step waits for the host") for outcome in outcomes)


def test_a_step_that_waits_for_the_gpu_takes_all_of_it(decided) -> None:
    plans = decided(ExecutionSpec(Execution.EAGER, 0.0, 50.0))
    assert all(plan.fp8 for plan in plans)
    assert all(plan.timing.chosen.host_us > plan.timing.as_is.host_us for plan in plans)


@pytest.mark.parametrize("host_ms", [0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("gpu_ms", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("mode", list(Execution))
def test_a_plan_is_never_slower_than_the_model_as_it_is(decided, mode, host_ms: float, gpu_ms: float) -> None:
    spec = ExecutionSpec(mode, host_ms, gpu_ms)
    plans = decided(spec)
    assert step_us(plans, spec) <= step_us(plans, spec, as_is=True)


def test_between_the_two_it_takes_what_gains_most_for_a_launch(decided) -> None:
    """Somewhere between a waiting host and a waiting GPU the widest site alone runs in FP8."""
    found = {
        tuple(plan.fp8 for plan in decided(ExecutionSpec(Execution.EAGER, host_ms / 10, 0.0))) for host_ms in range(21)
    }
    assert (False, False, True) in found or (False, True, True) in found
    assert all(list(each) == sorted(each) for each in found)


def test_what_the_policy_forces_stays(decided) -> None:
    assert all(plan.fp8 for plan in decided(ExecutionSpec(Execution.EAGER, 3.0, 0.0), Compute.FP8))


def test_transposed_copies_of_a_site_are_one_launch() -> None:
    model = HostModel(HOST, Execution.EAGER)
    copy = Part(PartKind.REQUANTIZE_TRANSPOSE, "rendered", 64, 64)
    norm = Part(PartKind.FORWARD, "rendered", 64, 64, around="layer_norm")
    assert model.us(3, (norm, copy, copy, copy), generated=True) == 5 * HOST.generated[Execution.EAGER]
    assert model.us(3, (norm,), generated=False) == 4 * HOST.torch[Execution.EAGER]
    assert model.us(3, (), generated=True) == 3 * HOST.generated[Execution.EAGER]


POLICY = """\
version: 1
name: blocks
model: {factory: "tests.support.models.block_tower:block_tower", inputs: "tests.support.models.block_tower:tower_rows"}
EXECUTION
defaults: {compute: fp8, scaling: rowwise, power_of_two: true, requantize_transpose: true, fuse: always}
rules: [{match: {max_n: 16}, compute: keep}]
"""


@pytest.fixture
def no_shipped_measurements() -> None:
    """Whole plans take the shipped ones."""


@pytest.fixture
def plan(tmp_path: Path) -> Callable[[str], Plan]:
    def make(execution: str) -> Plan:
        path = tmp_path / "blocks.yaml"
        path.write_text(POLICY.replace("EXECUTION", execution))
        return make_plan(path)

    return make


def host_line(plan: Plan) -> str:
    total = total_time(plan)
    assert total is not None
    return format_host(plan, total)


@pytest.mark.slow
def test_a_policy_says_how_the_model_runs(plan) -> None:
    eager = plan("execution: {mode: eager, host_ms: 1}")
    assert eager.execution == ExecutionSpec(Execution.EAGER, 1.0, 0.0)
    assert "the step waits for the host, 0." in host_line(eager)
    assert "execution: {mode: reduce-overhead}" in host_line(eager)
    waiting = replace(eager, execution=ExecutionSpec(Execution.EAGER, 1.0, 90.0))
    assert "the step waits for the GPU, 1.00x over BF16" in host_line(waiting)
    assert host_line(replace(eager, execution=None)) == ""


@pytest.mark.parametrize(
    ("execution", "message"),
    [
        ("execution: {mode: fast}", "give one of eager, compiled, reduce-overhead, graph"),
        ("execution: {mode: eager, host_ms: -1}", "host_ms"),
        ("execution: {mode: eager, gpu_ms: .inf}", "is not finite"),
        ("execution: {host_ms: 1}", "mode"),
        ("execution: {mode: eager, cpu_ms: 1}", "cpu_ms"),
    ],
)
def test_what_is_no_execution_is_an_error_at_its_place(tmp_path: Path, execution: str, message: str) -> None:
    path = tmp_path / "blocks.yaml"
    path.write_text(POLICY.replace("EXECUTION", execution))
    with pytest.raises(PolicyError, match=rf"blocks\.yaml:4:\d+: (.|\n)*{message}"):
        load_policy(path)
