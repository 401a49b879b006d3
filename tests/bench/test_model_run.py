"""Blocks of variants on the CPU: groups, failures, and what there is no time for. Nothing is compiled or captured."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loka.bench.device import KernelSum
from loka.bench.model.model_report import StepOutcome
from loka.bench.model.model_run import BlockRun, RunLimits
from loka.bench.model.model_subject import ModelSubject
from loka.bench.model.model_variants import Casting, StepBlock, StepLaunch, chosen_variants
from loka.bench.packages import Workshop
from loka.bench.peers import PeerMissingError
from loka.dispatch import Patch
from loka.mods.policy_loader import load_policy
from tests.support.bench_device import FP8, TRAINED, CpuBench, out_of_memory

POLICY = f"""\
{TRAINED}{FP8}
rules:
  - {{match: "head", compute: keep}}
mods:
  - {{use: no_bias}}
"""
AUTOCAST, PURE = Casting
ROUNDS = 2
LOOP = StepBlock(AUTOCAST, True, StepLaunch.LOOP)
NO_LIMIT = RunLimits(ROUNDS, float("inf"))

pytestmark = [pytest.mark.filterwarnings("ignore::loka.dispatch.LokaWarning"), pytest.mark.usefixtures("short_turns")]


def subject_of(folder: Path, workshop: Workshop, text: str = POLICY) -> ModelSubject:
    path = folder / "clicks.yaml"
    path.write_text(text)
    return ModelSubject(load_policy(path), workshop)


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[ModelSubject]:
    with Workshop() as workshop:
        yield subject_of(tmp_path, workshop)


class Ticks:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def outcomes(
    subject: ModelSubject,
    variants: str,
    block: StepBlock = LOOP,
    device: CpuBench | None = None,
    limits: RunLimits = NO_LIMIT,
) -> list[StepOutcome]:
    run = BlockRun(subject, block, device or CpuBench(), limits, lambda line: None)
    return list(run.outcomes(chosen_variants(variants)))


def last(found: list[StepOutcome]) -> dict[str, StepOutcome]:
    """The last outcome of each variant."""
    return {each.variant: each for each in found}


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("casting", list(Casting))
def test_every_variant_has_figures(subject: ModelSubject, casting: Casting, training: bool) -> None:
    names = "tf32-eager,tf32,bf16-eager,bf16-mods,bf16-max-autotune,loka-bf16,loka-fp8-eager,loka-fp8"
    device = CpuBench()
    found = outcomes(subject, names, StepBlock(casting, training, StepLaunch.LOOP), device)
    assert [each.failure for each in found] == [""] * len(found)
    assert set(last(found)) == {"bf16", *names.split(",")}
    for name, each in last(found).items():
        figures = each.figures
        assert figures is not None, name
        assert len(figures.rounds) == ROUNDS
        assert figures.host_ms > 0
        assert figures.step_ms > 0
        assert figures.peak_mib == 2.0
        assert figures.kernels == KernelSum(7, 0.25)
        assert figures.ratio is not None
        assert figures.ratio > 0
    assert last(found)["bf16"].figures.ratio == 1.0  # type: ignore[union-attr]
    assert sorted(device.compiled_modes, key=str) == [None] * 5 + ["max-autotune-no-cudagraphs"]
    assert device.releases >= 1


def test_a_first_look_comes_before_the_rounds(subject: ModelSubject) -> None:
    found = outcomes(subject, "bf16-eager")
    assert [(each.variant, len(each.figures.rounds)) for each in found if each.figures] == [
        ("bf16", 1), ("bf16-eager", 1), ("bf16", ROUNDS), ("bf16-eager", ROUNDS),
    ]  # fmt: skip
    assert all(each.figures and each.figures.ratio for each in found)


@pytest.mark.slow
def test_graphs_are_the_compilers_or_of_the_whole_step(subject: ModelSubject) -> None:
    device = CpuBench()
    names = "bf16-eager,tf32,bf16-max-autotune"
    outcomes(subject, names, StepBlock(AUTOCAST, True, StepLaunch.REDUCE_OVERHEAD), device)
    assert (device.compiled_modes, device.captures) == (["reduce-overhead"] * 2 + ["max-autotune"], 0)
    device = CpuBench()
    outcomes(subject, "bf16-eager,tf32", StepBlock(AUTOCAST, False, StepLaunch.CAPTURED), device)
    assert (device.compiled_modes, device.captures) == ([None, None], 3)


def test_a_failure_is_an_outcome_and_the_next_goes_on(subject: ModelSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(model: object, recipe: str) -> Any:
        raise PeerMissingError("torchao is not installed")

    monkeypatch.setattr("loka.bench.model.model_subject.torchao_training", missing)
    device = CpuBench(fail_compiling={"max-autotune-no-cudagraphs": [RuntimeError("no\nchoices"), RuntimeError("no")]})
    found = last(outcomes(subject, "torchao-rowwise,bf16-max-autotune,tf32-max-autotune,bf16-eager", device=device))
    assert found["torchao-rowwise"].failure == "PeerMissingError: torchao is not installed"
    assert {found[f"{name}-max-autotune"].failure for name in ("bf16", "tf32")} == {
        "RuntimeError: no choices", "RuntimeError: no"
    }  # fmt: skip
    assert found["bf16-eager"].figures is not None


def test_without_a_baseline_there_are_times_and_no_ratios(subject: ModelSubject) -> None:
    device = CpuBench(fail_compiling={None: [RuntimeError("broken")]})
    found = last(outcomes(subject, "bf16-eager", device=device))
    assert found["bf16"].failure == "RuntimeError: broken"
    assert found["bf16-eager"].figures is not None
    assert found["bf16-eager"].figures.ratio is None


def test_what_is_not_finite_and_what_cannot_be_captured_has_no_figures(tmp_path: Path) -> None:
    with Workshop() as workshop:
        broken = subject_of(tmp_path, workshop, POLICY.replace(":build", ":broken"))
        (found,) = outcomes(broken, "bf16")
        assert found.failure == "CheckFailedError: the loss is not finite"
        (found,) = outcomes(broken, "bf16", StepBlock(PURE, False, StepLaunch.LOOP))
        assert found.failure == "CheckFailedError: the outputs are not finite"
    with Workshop() as workshop:
        device = CpuBench(refuse_captures=True)
        (found,) = outcomes(
            subject_of(tmp_path, workshop), "bf16", StepBlock(AUTOCAST, True, StepLaunch.CAPTURED), device
        )
        assert found.failure == "CaptureError: the step cannot be captured: it waits for the device"


@pytest.mark.slow
def test_a_policy_that_replaces_nothing_says_so(tmp_path: Path) -> None:
    with Workshop() as workshop:
        kept = POLICY.replace("compute: fp8, ", "compute: keep, ").replace("fuse: always", "fuse: never")
        found = last(outcomes(subject_of(tmp_path, workshop, kept), "loka-fp8,loka-bf16"))
        assert "the policy replaces nothing" in found["loka-fp8"].failure
        assert found["loka-bf16"].figures is not None


@pytest.mark.slow
def test_planned_gemms_that_do_not_run_are_no_measurement(
    subject: ModelSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loka.bench.model.whole_step.WholeStep.__call__", lambda step: [torch.ones(1)])
    found = last(outcomes(subject, "loka-fp8"))
    assert "VerifyError" in found["loka-fp8"].failure
    assert "did not run" in found["loka-fp8"].failure


def test_when_the_memory_is_full_a_group_with_the_baseline_begins(subject: ModelSubject) -> None:
    device = CpuBench(full_after=2)
    found = outcomes(subject, "tf32-eager,tf32,bf16-eager", device=device)
    assert [each.variant for each in found if each.figures and len(each.figures.rounds) == ROUNDS] == [
        "bf16", "bf16-eager", "bf16", "tf32", "bf16", "tf32-eager",
    ]  # fmt: skip
    assert all(each.figures and each.figures.ratio for each in found)
    assert device.compiled_modes == [None] * 4


def test_what_finds_no_memory_beside_the_others_is_measured_again_alone(subject: ModelSubject) -> None:
    device = CpuBench(fail_compiling={"max-autotune-no-cudagraphs": [out_of_memory()]})
    found = outcomes(subject, "tf32-eager,bf16-max-autotune", device=device)
    assert all(each.figures for each in found)
    assert [each.variant for each in found if len(each.figures.rounds) == ROUNDS] == [  # type: ignore[union-attr]
        "bf16", "tf32-eager", "bf16", "bf16-max-autotune",
    ]  # fmt: skip


def test_what_fits_in_no_memory_fails_once(subject: ModelSubject) -> None:
    device = CpuBench(fail_compiling={"max-autotune-no-cudagraphs": [out_of_memory(), out_of_memory()]})
    found = outcomes(subject, "bf16-max-autotune", device=device)
    assert "OutOfMemoryError" in last(found)["bf16-max-autotune"].failure
    assert [each.variant for each in found].count("bf16-max-autotune") == 1
    assert last(found)["bf16"].figures is not None


def test_when_the_time_is_up_what_was_seen_stays(subject: ModelSubject) -> None:
    lines: list[str] = []
    limits = RunLimits(ROUNDS, 6.5, Ticks())
    run = BlockRun(subject, LOOP, CpuBench(), limits, lines.append)
    found = list(run.outcomes(chosen_variants("tf32,tf32-eager,bf16-eager")))
    assert "bf16" in last(found)
    assert all(each.figures for each in found)
    assert any("no time is left for" in line for line in lines)
    assert set(last(found)) < {"bf16", "tf32", "tf32-eager", "bf16-eager"}


@pytest.mark.slow
def test_compiled_functions_have_a_package_of_their_own(subject: ModelSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[str, Any]] = []
    packages: list[str] = []

    def compile_functions(patch: Patch, **given: Any) -> None:
        options.append(given)
        packages.append(patch._package)

    monkeypatch.setattr(Patch, "compile", compile_functions)
    for launch in (StepLaunch.LOOP, StepLaunch.REDUCE_OVERHEAD):
        found = last(outcomes(subject, "loka-fp8-functions,loka-fp8", StepBlock(AUTOCAST, True, launch)))
        assert {name: each.failure for name, each in found.items() if each.failure} == {}
    assert options == [{}, {"mode": "reduce-overhead"}]
    assert len(set(packages)) == 2
    assert all("functions" in name for name in packages)


def test_what_is_measured_is_freed_before_the_next_group(subject: ModelSubject) -> None:
    models: list[weakref.ref[nn.Module]] = []

    class Watching(CpuBench):
        def compiled(self, model: nn.Module, mode: str | None) -> Callable[..., Any]:
            models.append(weakref.ref(model))
            return super().compiled(model, mode)

        def release(self) -> None:
            gc.collect()
            alive.append(sum(model() is not None for model in models))
            super().release()

    alive: list[int] = []
    outcomes(subject, "tf32,bf16-eager", device=Watching(full_after=2))
    assert len(models) == 3
    assert alive == [0, 0, 0]
