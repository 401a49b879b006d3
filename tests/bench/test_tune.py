"""`loka tune` by made-up steps: who wins, what is combined, and what stops it. Then real steps on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from loka.bench.model.model_run import RunLimits
from loka.bench.model.model_variants import MODEL_BASELINE
from loka.bench.tune import tune as tune_module
from loka.bench.tune.tune import TuneLimits, check_policy, require_target, tuned_here, winner_of
from loka.bench.tune.tune_steps import StepMeasurer
from loka.errors import CheckFailedError, InputError
from loka.mods.policy_loader import load_policy
from loka.plan.plan import NATIVE
from loka.plan.tuning.candidates import NATIVE_TITLE, STANDING_TITLE, Candidates
from loka.plan.tuning.choices import AS_IT_STANDS
from loka.plan.tuning.record import MeasuredCandidate
from loka.policy.policy import Policy
from tests.support.bench_device import TRAINED, CpuBench
from tests.support.plan.plan_costs import SCALED_MM, MadeUp
from tests.support.plan.tuned import BF16_MS, MadeUpSteps, outcome_of, safe_policy, tune

POLICY = f"{TRAINED}defaults: {{compute: auto, scaling: auto}}\n"
FUSED = "BF16 in fused kernels"

pytestmark = pytest.mark.filterwarnings("ignore::loka.dispatch.LokaWarning")


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    return safe_policy(tmp_path / "clicks.yaml", POLICY)


def measured(title: str, speedup: float | None, sites_fp8: int, noise: float | None = 0.001) -> MeasuredCandidate:
    return MeasuredCandidate(title, AS_IT_STANDS, sites_fp8, False, None, 1.0, speedup, noise, 4)


def test_the_fastest_wins() -> None:
    assert winner_of([measured("a", 1.0, 0), measured("b", 1.5, 4), measured("c", 1.3, 2)]).title == "b"


@pytest.mark.parametrize(("speedup", "noise"), [(1.009, 0.001), (1.04, 0.05)])
def test_what_hardly_gains_or_is_lost_in_the_noise_has_no_fp8(speedup: float, noise: float) -> None:
    found = [measured(STANDING_TITLE, 1.001, 3, 0.003), measured("bf16", 1.0, 0), measured("fp8", speedup, 4, noise)]
    assert winner_of(found).title == "bf16"


def test_the_plan_as_it_stands_is_left_for_what_is_clearly_faster() -> None:
    standing, bf16 = measured(STANDING_TITLE, 1.2, 3, 0.02), measured("bf16", 1.0, 0)
    within, beyond = measured("within", 1.22, 4), measured("beyond", 1.23, 4)
    assert winner_of([standing, bf16, within]) is standing
    assert winner_of([standing, bf16, within, beyond]) is beyond
    noisy = measured("noisy", 1.3, 4, 0.1)  # and everything else within its noise
    assert winner_of([standing, bf16, noisy]) is standing


def test_too_few_rounds_are_not_judged() -> None:
    assert winner_of([measured("a", 1.0, 0), measured("b", 9.0, 4, noise=None)]).title == "a"
    with pytest.raises(CheckFailedError, match="no candidate was measured in 3 rounds; give it more time"):
        winner_of([measured("b", 9.0, 4, noise=None), measured("c", None, 4, noise=None)])


def test_a_record_has_every_candidate(policy: Policy) -> None:
    steps = MadeUpSteps({STANDING_TITLE: 2.0}, usual=5.0, failing={FUSED: "out of registers"})
    record = tune(policy, steps)
    assert [each.title for each in record.candidates] == list(steps.asked[0])
    assert (record.winner, record.bf16_ms, record.won.step_ms, record.won.speedup) == (
        STANDING_TITLE,
        BF16_MS,
        2.0,
        2.0,
    )
    assert (record.date, record.step) == ("2026-11-23T12:00Z", "made up")
    assert (record.key.target, record.key.batch_size, record.key.execution) == ("h100", 16, "reduce-overhead")
    fused = next(each for each in record.candidates if each.title == FUSED)
    assert (fused.step_ms, fused.speedup, fused.noise, fused.failure) == (None, None, None, "out of registers")
    native = next(each for each in record.candidates if each.title == NATIVE_TITLE)
    assert (native.native, native.sites_fp8, native.speedup) == (True, 0, 1.0)


def test_noise_is_that_of_the_speed_ups(policy: Policy) -> None:
    record = tune(policy, MadeUpSteps({STANDING_TITLE: 2.0}, usual=5.0, uneven=0.1))
    assert record.won.noise == pytest.approx(0.1, rel=0.1)


def test_switches_that_gain_are_measured_together(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "loka.plan.tuning.candidates.open_measurements", lambda policy: MadeUp({NATIVE: 3.0, SCALED_MM: 1.0})
    )
    one, *_, other = [each.title for each in Candidates(policy).found() if ": " in each.title]
    assert one.partition(":")[0] != other.partition(":")[0]
    steps = MadeUpSteps({STANDING_TITLE: 3.0, one: 2.8, other: 2.7, " + ": 2.5}, usual=5.0)
    record = tune(policy, steps)
    first, second = steps.asked
    assert second == (other, record.winner)
    assert set(record.winner.split(" + ")) == {one, other}
    assert len(record.candidates) == len(first) + 1
    combined = {each.sites for each in record.won.choice.sites}
    assert combined == {each.choice.sites[0].sites for each in record.candidates if each.title in (one, other)}
    assert steps.ends == [tune_module.FIRST_RUN * 1000.0, 1000.0]
    slower = MadeUpSteps({STANDING_TITLE: 2.0}, usual=5.0)  # no switch gains, and nothing is combined
    assert tune(policy, slower).winner == STANDING_TITLE
    assert len(slower.asked) == 1


def test_a_model_that_does_not_run_is_no_base(policy: Policy) -> None:
    broken = outcome_of(MODEL_BASELINE, failure="no such operator")
    with pytest.raises(CheckFailedError, match=r"does not run here \(reduce-overhead\), .* operator; .*mode: compiled"):
        tune(policy, MadeUpSteps(bf16=broken))


def test_without_time_nothing_is_decided(policy: Policy) -> None:
    class Nothing(MadeUpSteps):
        def __call__(self, candidates, limits):  # type: ignore[no-untyped-def]
            return {}

    with pytest.raises(CheckFailedError, match="no time was left to measure anything; give it more: --seconds"):
        tune(policy, Nothing())


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (TuneLimits(0.0), "--seconds: 0 is no time"),
        (TuneLimits(math.nan), "--seconds: nan is no time"),
        (TuneLimits(60.0, 2), "--rounds: 2 are too few to tell plans apart; write 3 or more"),
        (TuneLimits(60.0, jobs=0), "--jobs: 0 is no number of processes; write 1"),
    ],
)
def test_limits_that_measure_nothing(limits: TuneLimits, message: str, policy: Policy) -> None:
    with pytest.raises(InputError, match=message):
        tuned_here(policy, limits, False, print)


def test_policies_that_cannot_be_tuned(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(POLICY + "target: reference\n")
    with pytest.raises(InputError, match=r"p\.yaml:6:\d+: loka tune: target reference is the reference path"):
        check_policy(load_policy(path), False)
    path.write_text("\n".join(line for line in POLICY.splitlines() if not line.startswith("train")))
    with pytest.raises(InputError, match="measures your training step, and the policy has no train section"):
        check_policy(load_policy(path), False)
    check_policy(load_policy(path), True)


def test_a_machine_without_a_gpu_or_of_another_target(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="loka tune: no CUDA device is visible"):
        require_target(policy)
    monkeypatch.setattr(tune_module, "require_gpu", lambda verb: None)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    with pytest.raises(InputError, match=r"target is h100, and this machine has NVIDIA H200, .*; write target: h200"):
        require_target(policy)
    require_target(replace(policy, target="h200"))


@pytest.mark.slow
@pytest.mark.usefixtures("short_turns")
@pytest.mark.parametrize(
    ("execution", "modes", "captured"),
    [
        ("", ["reduce-overhead"] * 2, False),
        ("compiled", [None] * 2, False),
        ("eager", [], False),
        ("graph", [None] * 2, True),
    ],
)
def test_steps_run_as_the_policy_says(tmp_path: Path, execution: str, modes: list[str | None], captured: bool) -> None:
    more = f"execution: {{mode: {execution}}}\n" if execution else ""
    policy = safe_policy(tmp_path / "clicks.yaml", POLICY + more)
    found = {each.title: each for each in Candidates(policy).found()}
    chosen = [found[STANDING_TITLE], found[NATIVE_TITLE]]
    device = CpuBench()
    steps = StepMeasurer(policy, device, lambda line: None)(chosen, RunLimits(3, math.inf))
    assert set(steps) == {MODEL_BASELINE, STANDING_TITLE, NATIVE_TITLE}
    assert [each.failure for each in steps.values()] == ["", "", ""]
    assert steps[NATIVE_TITLE] == steps[MODEL_BASELINE]
    own, beside = steps[STANDING_TITLE].figures, steps[MODEL_BASELINE].figures
    assert own is not None
    assert beside is not None
    assert beside.speedups == (1.0, 1.0, 1.0)
    assert own.beside == beside.rounds
    assert device.compiled_modes == modes
    assert device.captures == (2 if captured else 0)


def test_words_of_a_step(policy: Policy) -> None:
    assert StepMeasurer(policy, CpuBench(), print).words == "forward, the policy's loss, backward, adam"
    assert StepMeasurer(policy, CpuBench(), print, True).words == "forward, a synthetic loss, backward, adam"
