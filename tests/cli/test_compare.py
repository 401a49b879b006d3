"""`loka compare`: verdicts and exit statuses, going on after a stop, several processes, seeds of tuning."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest

from loka.bench.quality import training
from loka.bench.quality.compare_quality import Quality, QualityVerdict
from loka.cli import compare_run
from loka.errors import InputError
from loka.plan.planner import make_plan
from loka.plan.serialize import to_json
from loka.plan.totals import Total

pytestmark = pytest.mark.slow

SHORT = ("--steps", "2", "--device", "cpu", "--seeds", "2", "--draws", "1")


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The folder of packages of the small model's policy, which the first of these tests generates."""
    return tmp_path_factory.mktemp("shop") / "generated"


@pytest.fixture
def package(shop, loka, generated):
    if generated.is_dir():
        shutil.copytree(generated, shop.folder / "generated")
    else:
        assert loka("generate", shop.policy).status == 0
        shutil.copytree(shop.folder / "generated", generated)
    return shop


def test_parity_leaves_with_0_and_shows_how_far_draws_lie_apart(package, loka):
    ran = loka("compare", package.policy, *SHORT, "--draws", "2", "--budget", "1000")
    assert ran.status == 0
    assert "budget 1000 %: parity" in ran.out
    assert "95 % interval" in ran.out
    assert [line.split()[:2] for line in ran.out.splitlines()[2:6]] == [
        ["1000", "0"], ["1000", "1"], ["1001", "0"], ["1001", "1"],
    ]  # fmt: skip
    assert "Started 1e-6 apart, NE of one seed spreads by 0.0000 % as it is and by " in ran.out
    assert "seed 1001: NE " in ran.err
    # without measurements nothing is planned about speed
    assert "planned on" not in ran.out
    assert "cpu here, FP8 emulated, samples/s" in ran.out
    assert "are those of the emulation in torch" in ran.err


def test_a_package_without_fp8_is_not_called_fp8(shop, loka, policy_text):
    shop.write_policy(policy_text.replace("compute: fp8", "compute: keep") + "mods: [{use: pad_alignment}]\n")
    assert loka("generate", shop.policy).status == 0
    ran = loka("compare", shop.policy, *SHORT, "--budget", "1000")
    assert ran.status == 0, ran.err
    assert "NE of the generated code against the model as it is, 2 seeds: " in ran.out
    assert "FP8" not in ran.out


@pytest.mark.parametrize(
    ("verdict", "status", "said"),
    [(QualityVerdict.LOST, 1, "quality is lost: FP8 is worse"), (QualityVerdict.UNDECIDED, 3, "")],
)
def test_other_verdicts_have_a_status_of_their_own(package, loka, monkeypatch, verdict, status, said):
    monkeypatch.setattr(Quality, "verdict", verdict)
    ran = loka("compare", package.policy, *SHORT, "--json")
    assert ran.status == status
    assert json.loads(ran.out)["verdict"] == verdict.value
    assert said in ran.err


@pytest.mark.parametrize("learned", [True, False])
def test_a_verdict_on_a_model_that_has_learned_nothing_is_said_to_be_one(package, loka, monkeypatch, learned):
    monkeypatch.setattr(Quality, "learned", learned)
    monkeypatch.setattr(Quality, "verdict", QualityVerdict.PARITY)
    ran = loka("compare", package.policy, *SHORT)
    assert ran.status == 0
    said = "note: the model as it is has an NE of 1 or more: it predicts no better than the share of positive labels"
    assert (said in ran.err) is not learned


@pytest.mark.parametrize(
    ("needed", "said"), [(9, "about 7 more pairs would decide: --seeds 9"), (None, "choose another budget, or a safer")]
)
def test_undecided_says_how_many_pairs_would_decide(package, loka, monkeypatch, needed, said):
    monkeypatch.setattr(Quality, "verdict", QualityVerdict.UNDECIDED)
    monkeypatch.setattr(Quality, "seeds_needed", needed)
    ran = loka("compare", package.policy, *SHORT, "--json")
    assert (ran.status, json.loads(ran.out)["seeds_needed"]) == (3, needed)
    assert said in ran.err


def test_a_stopped_comparison_shows_what_it_has_and_goes_on(package, loka, monkeypatch):
    alone = json.loads(loka("compare", package.policy, *SHORT, "--runs", "alone.jsonl", "--json").out)
    train, trained = training.train_pair, []

    def stopped(job, patch, seed, *more):
        if seed == 1001 and len(trained) == 1:
            raise KeyboardInterrupt
        trained.append(seed)
        return train(job, patch, seed, *more)

    monkeypatch.setattr(compare_run, "train_pair", stopped)
    ran = loka("compare", package.policy, *SHORT, "--json")
    assert ran.status == 130
    data = json.loads(ran.out)
    assert (data["interrupted"], data["verdict"], data["seeds"]) == (True, "undecided", 1)
    (file,) = Path("build/compare").glob("shop-*.jsonl")
    assert f"the same command goes on from {file}" in ran.err
    trained.append(0)  # the second time it is not stopped
    ran = loka("compare", package.policy, *SHORT, "--json")
    assert trained == [1000, 0, 1001]
    assert f"1 finished pairs are taken from {file}" in ran.err
    assert [pair["fp8"]["ne"] for pair in json.loads(ran.out)["pairs"]] == [
        pair["fp8"]["ne"] for pair in alone["pairs"]
    ]


def test_the_planned_speed_stands_beside_the_emulated_one(package, loka, monkeypatch):
    total = Total(us=50.0, without_fp8_us=60.0, as_is_us=75.0, sites=())
    monkeypatch.setattr("loka.cli.tables.plan_table.total_time", lambda plan: total)
    lines = [
        " ".join(line.split()) for line in loka("compare", package.policy, *SHORT, "--budget", "1000").out.split("\n")
    ]
    assert "planned on h100, us of a step 75.0 50.0 1.50x" in lines
    assert "planned on h100, without FP8 75.0 60.0 1.25x" in lines
    assert [line for line in lines if line.startswith("cpu here, FP8 emulated, samples/s ")]


def test_more_shared_steps_than_steps_are_an_error_at_their_place(package, loka):
    text = (package.folder / package.policy).read_text()
    package.write_policy(text.replace("train:\n", "train:\n  shared_steps: 9\n"))
    ran = loka("compare", package.policy, "--steps", "5")
    assert ran.status == 2
    line = (package.folder / package.policy).read_text().splitlines().index("train:") + 2  # its first key
    assert f"{package.policy}:{line}:" in ran.err
    assert "there are 5 steps, and both runs share the first 9" in ran.err


def test_steps_that_both_runs_share_are_said(package, loka):
    text = (package.folder / package.policy).read_text()
    package.write_policy(text.replace("train:\n", "train:\n  shared_steps: 1\n"))
    assert loka("generate", package.policy).status == 0
    ran = loka("compare", package.policy, *SHORT, "--budget", "1000", "--json")
    data = json.loads(ran.out)
    assert data["shared_steps"] == 1
    for pair in data["pairs"]:
        assert pair["as_is"]["train_loss"][0] == pair["fp8"]["train_loss"][0]
    ran = loka("compare", package.policy, *SHORT, "--budget", "1000")
    assert "Both runs share the first 1 steps, without FP8, and go on from there." in ran.out
    assert loka("report", package.policy, "-o", "page.html").status == 0
    assert "Both runs share the first 1 steps, without FP8." in (package.folder / "page.html").read_text()
    ran = loka("train", package.policy, "--steps", "2", "--device", "cpu")
    assert "Both runs share the first 1 steps, without FP8, and go on from there." in ran.out


def test_pairs_of_another_setting_are_not_taken(package, loka):
    loka("compare", package.policy, *SHORT)
    (first,) = Path("build/compare").glob("shop-*.jsonl")
    loka("compare", package.policy, *SHORT, "--steps", "3")
    assert len(list(Path("build/compare").glob("shop-*.jsonl"))) == 2
    ran = loka("compare", package.policy, *SHORT, "--steps", "3", "--runs", str(first))
    assert ran.status == 2
    assert f"{first}: holds the pairs of another comparison" in ran.err


def test_several_processes_find_what_one_finds(package, loka):
    one = json.loads(loka("compare", package.policy, *SHORT, "--runs", "one.jsonl", "--json").out)
    two = json.loads(loka("compare", package.policy, *SHORT, "--runs", "two.jsonl", "--json", "--jobs", "2").out)
    assert [(pair["seed"], pair["fp8"]["ne"]) for pair in two["pairs"]] == [
        (pair["seed"], pytest.approx(pair["fp8"]["ne"], rel=1e-6)) for pair in one["pairs"]
    ]


def test_an_error_in_a_process_keeps_its_message_and_can_be_pickled(package, loka):
    text = (package.folder / package.policy).read_text()
    package.write_policy(text.replace("shopmodel:loss", "shopmodel:no_module"))
    assert loka("generate", package.policy).status == 0
    comparison = compare_run.Comparison(package.policy, 2, "cpu", "model")
    plan = to_json(make_plan(package.policy))
    with pytest.raises(
        InputError, match=r"shop.yaml:\d+:\d+: train.loss: seed 1000, step 1: it is called with the output and"
    ) as caught:
        compare_run._train(comparison, plan, 1, 1000, 0)
    assert type(pickle.loads(pickle.dumps(caught.value))) is InputError  # noqa: S301 - our own
    compare_run._opened_here.cache_clear()


def test_processes_divide_the_threads_that_there_are(package, loka, monkeypatch):
    """And not all of the machine's: OMP_NUM_THREADS says how many a process may have."""
    assert loka("generate", package.policy).status == 0
    asked: list[int] = []
    plan = to_json(make_plan(package.policy))
    comparison = compare_run.Comparison(package.policy, 2, "cpu", "model")
    with monkeypatch.context() as patched:
        patched.setattr(compare_run.torch, "get_num_threads", lambda: 12)
        patched.setattr(compare_run.torch, "set_num_threads", asked.append)
        for jobs in (5, 20):
            compare_run._opened_here(comparison, plan, jobs)
        compare_run._opened_here.cache_clear()
    assert asked == [2, 1]


def test_seeds_of_tuning_are_not_judged_on(package, loka):
    text = (package.folder / package.policy).read_text()
    package.write_policy(text.replace("train:\n", "train:\n  tuned_seeds: [0-13, 1001-1050]\n"))
    assert loka("generate", package.policy).status == 0
    ran = loka("compare", package.policy, *SHORT)
    assert ran.status == 2
    assert "the recipe was chosen on seeds 1001 to 1050" in ran.err
    assert "--first-seed 1051" in ran.err
    assert loka("compare", package.policy, *SHORT, "--first-seed", "1051", "--budget", "1000").status == 0


@pytest.mark.parametrize(
    ("written", "said"),
    [("[5]", "5"), ("['5']", "'5' is no range of seeds; write the first and the last, as in 0-13"),
     ("[9-3]", "'9-3' ends before it begins; write 3-9")],
)  # fmt: skip
def test_a_wrong_range_of_seeds_has_a_place(shop, loka, written, said):
    text = (shop.folder / shop.policy).read_text()
    shop.write_policy(text.replace("train:\n", f"train:\n  tuned_seeds: {written}\n"))
    ran = loka("validate", shop.policy)
    assert ran.status == 2
    assert "policies/shop.yaml:" in ran.err
    assert said in ran.err
