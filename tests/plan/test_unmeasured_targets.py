"""Targets that nothing was measured on: no times, no FP8 of its own accord, and a user's recording decides."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loka.devices import targets
from loka.devices.targets import DEVICES, spec_of
from loka.errors import InputError
from loka.mods.policy_loader import load_policy
from loka.plan.examine import examine
from loka.plan.plan import NATIVE, Plan
from loka.plan.plan_of import plan_of
from loka.plan.planner import make_plan
from loka.plan.serialize import from_json, to_json
from loka.plan.totals import total_time
from loka.plan.view.coverage import coverage_of
from loka.plan.view.verdict import measurements_note
from tests.support.plan.plan_costs import HOPPER, SCALED_MM, Remembering
from tests.support.plan.tuned import safe_policy

pytestmark = pytest.mark.slow

UNMEASURED = [spec.name for spec in DEVICES.values() if spec.lacks_measurements]
POLICY = """\
version: 1
name: toy
model: {factory: "toymodel:build", inputs: "toymodel:inputs", batch_size: 4096}
target: TARGET
MORE
"""
MODEL = """\
import torch


def build():
    return torch.nn.Sequential(torch.nn.Linear(4096, 4096))


def inputs(batch_size):
    return (torch.randn(batch_size, 4096),)
"""


@pytest.fixture(autouse=True)
def model(write_module) -> None:
    write_module("toymodel", MODEL)


def planned(target: str, more: str) -> Plan:
    """The plan of a policy with a profile in which everything is safe."""
    text = POLICY.replace("TARGET", target).replace("MORE", more)
    return make_plan(safe_policy(Path("toy.yaml"), text))


def reasons(plan: Plan) -> set[str]:
    return {gemm.reason for site in plan.sites for gemm in site.gemms}


@pytest.mark.parametrize("target", UNMEASURED)
def test_auto_keeps_what_was_never_measured_and_says_how_to_measure(target: str) -> None:
    plan = planned(target, "defaults: {compute: auto}")
    assert plan.share_fp8 == 0
    (reason,) = reasons(plan)
    if target == "mi300x":
        assert reason.startswith("its tensor cores multiply e4m3fnuz")
    else:
        assert reason == (
            f"nothing was measured on {spec_of(target).title}: record there with `loka bench kernels --record FILE`, "
            "and name the file in `measurements:`"
        )
    assert plan.measurements is None
    assert total_time(plan) is None
    assert coverage_of(plan).time is None
    assert all(gemm.times == () for site in plan.sites for gemm in site.gemms)


@pytest.mark.parametrize("target", [each for each in UNMEASURED if each != "mi300x"])
def test_forced_fp8_is_planned_and_the_note_says_that_nobody_ran_it(target: str) -> None:
    plan = planned(target, "defaults: {compute: fp8}")
    assert plan.share_fp8 == 1
    title = spec_of(target).title
    note = measurements_note(plan)
    assert note.startswith(f"no measurements for {target} ship or are named, so time decided nothing")
    assert note.endswith(f"name the file in `measurements:`; FP8 was never run on {title} by us")
    assert total_time(plan) is None
    assert from_json(to_json(plan)) == plan


def test_fp8_of_other_numbers_is_refused() -> None:
    """MI300X has e4m3fnuz: broad rules keep the GEMMs with the reason, a rule for one site is an error."""
    refused = "its tensor cores multiply e4m3fnuz, whose numbers are not those of the FP8 that LoKA makes, e4m3fn"
    assert reasons(planned("mi300x", "defaults: {compute: fp8}")) == {refused}
    with pytest.raises(InputError, match=refused):
        planned("mi300x", 'rules: [{match: "0", compute: fp8}]')


@pytest.mark.parametrize("scaling", ["blockwise", "blockwise_1x128"])
def test_what_torch_multiplies_on_hopper_alone_is_kept(scaling: str) -> None:
    plan = planned("b200", f"defaults: {{compute: fp8, scaling: {scaling}}}")
    assert plan.share_fp8 == 0
    taken = "it takes blockwise_1x32 x blockwise_1x32, rowwise x rowwise, tensorwise x tensorwise"
    assert all(taken in reason for reason in reasons(plan))


@pytest.mark.parametrize("target", UNMEASURED)
def test_mxfp8_is_planned_where_torch_multiplies_it(target: str) -> None:
    plan = planned(target, "defaults: {compute: fp8, scaling: blockwise_1x32}")
    assert plan.share_fp8 == (1 if target in ("b200", "gb200", "mi350x") else 0)


@pytest.mark.parametrize(("native", "fp8"), [(1.0, True), (0.2, False)])
def test_a_made_up_device_is_planned_by_its_made_up_recording(
    native: float, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = replace(spec_of("b200"), name="toy1000", title="Toy 1000", pattern="Toy 1000", multiprocessors=7)
    monkeypatch.setitem(targets.DEVICES, toy.name, toy)  # type: ignore[arg-type]
    assert planned(toy.name, "defaults: {compute: auto}").share_fp8 == 0
    costs = Remembering(kernels={NATIVE: native, SCALED_MM: 1.0})
    plan_of(examine(load_policy("toy.yaml")), None, costs)
    costs.record(Path("toy.jsonl"), replace(HOPPER, device="ACME Toy 1000"))
    plan = planned(toy.name, "defaults: {compute: auto}\nmeasurements: toy.jsonl")
    assert (plan.share_fp8 > 0) is fp8
    assert plan.measurements is not None
    total = total_time(plan)
    assert total is not None
    assert (total.by_fp8 > 1.1) is fp8
    assert measurements_note(plan) == ""
    with pytest.raises(InputError, match=r"nothing was measured on a device of target b200: .* of ACME Toy 1000"):
        planned("b200", "measurements: toy.jsonl")


@pytest.mark.parametrize("target", ["h20", "h100-pcie"])
@pytest.mark.parametrize("device", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_one_hopper_gpu_is_not_priced_by_another(target: str, device: str) -> None:
    costs = Remembering()
    planned("h100", "")
    plan_of(examine(load_policy("toy.yaml")), None, costs)
    costs.record(Path("other.jsonl"), replace(HOPPER, device=device))
    with pytest.raises(InputError, match=f"nothing was measured on a device of target {target}: .* of {device}"):
        planned(target, "measurements: other.jsonl")


@pytest.mark.parametrize("target", ["rtx", "rtx-5090", "RTX PRO 6000", "sm_120"])
def test_rtx_is_refused_with_what_is_missing(target: str) -> None:
    with pytest.raises(
        InputError, match=r"toy\.yaml:4:9: target: GeForce RTX .* missing are launches of kernels for 99"
    ):
        planned(target, "")


def test_a_plan_of_a_target_that_is_gone_is_refused() -> None:
    text = to_json(planned("b200", "")).replace('"b200"', '"b900"')
    json.loads(text)
    with pytest.raises(InputError, match="at target: there is no 'b900'"):
        from_json(text)
