"""What other verbs make of a record of `loka tune`: doctor, reports, and the bench of models."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from loka.bench.model.model_subject import ModelSubject
from loka.bench.model.model_variants import PackageKind
from loka.bench.packages import Workshop
from loka.bench.report.page import sources
from loka.cli.doctor_items import policy_items
from loka.kernels.measurements.versions import Versions
from loka.mods.policy_loader import load_policy
from loka.plan.plan import Plan
from loka.plan.planner import planned
from loka.policy.policy import Policy
from tests.support.plan.plan_costs import HOPPER
from tests.support.plan.tuned import MadeUpSteps, keep, safe_policy, tune

MODELS = "tests.support.models.ablation_model"
POLICY = f"""\
version: 1
name: clicks
model: {{factory: "{MODELS}:build", inputs: "{MODELS}:inputs", batch_size: 16}}
defaults: {{compute: auto, scaling: auto}}
"""
FORCED = "FP8 wherever it is safe, tensorwise"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with its profile and a record of which tensorwise scaling won."""
    path = tmp_path_factory.mktemp("tuned") / "clicks.yaml"
    made = safe_policy(path, POLICY)
    record = tune(made, MadeUpSteps({FORCED: 2.0}, usual=5.0))
    assert record.winner == FORCED
    keep(made, record)
    return path.parent


@pytest.fixture
def policy(folder: Path, tmp_path: Path) -> Iterator[Policy]:
    """A copy of the policy with its profile and record."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    yield load_policy(tmp_path / "clicks.yaml")
    sys.modules.pop("bench_clicks_policy", None)


def item(policy: Policy, here: Versions | None) -> tuple[str, str, str]:
    (found,) = (each for each in policy_items(str(policy.path), here) if each.name == "policy tuned")
    return found.status, found.found, found.note


def test_doctor_compares_the_record_with_policy_and_machine(policy: Policy) -> None:
    status, found, note = item(policy, HOPPER)
    assert (status, found) == ("ok", f"{FORCED}, 2026-11-23")
    assert note.endswith("; with what this machine has")
    assert item(policy, None)[0] == "ok"
    status, _, note = item(policy, replace(HOPPER, torch="2.13.0"))
    assert status == "stale"
    assert "torch: measured with 2.11.0, this machine has 2.13.0" in note
    assert f"loka tune {policy.path}" in note


@pytest.mark.filterwarnings("ignore::loka.errors.IgnoredWarning")
def test_doctor_says_why_a_record_is_ignored_or_damaged(policy: Policy) -> None:
    policy.path.write_text(POLICY.replace("batch_size: 16", "batch_size: 32"))
    status, _, note = item(policy, HOPPER)
    assert status == "stale"
    assert "it has records for h100 at batch size 16" in note
    policy.tuned_file.write_text("{")
    status, _, note = item(policy, HOPPER)
    assert status == "problem"
    assert "not a whole JSON file" in note
    policy.tuned_file.unlink()
    assert "policy tuned" not in [each.name for each in policy_items(str(policy.path), HOPPER)]


def test_reports_name_the_measured_step(policy: Policy) -> None:
    found = planned(policy)
    said = "confirmed by a measured step: 2 ms against 4 ms of BF16 (reduce-overhead)"
    (source,) = (each for each in sources(found, (), None) if each.what == "which candidate plan was taken")
    assert source.how.startswith(said)
    assert "profiles/clicks.tuned.json (sha256 " in source.how


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::loka.dispatch.LokaWarning")
def test_the_bench_of_models_measures_the_confirmed_plan(policy: Policy) -> None:
    def recipes(plan: Plan) -> set[str]:
        return {site.history["scaling"][-1].value for site in plan.sites}

    with Workshop() as workshop:
        subject = ModelSubject(load_policy(policy.path), workshop)
        plan = subject._plan(PackageKind.POLICY)
        assert plan.tuned is not None
        assert recipes(plan) == {"tensorwise"}
        assert subject._plan(PackageKind.BF16).tuned is None
