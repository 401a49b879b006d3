"""FSDP2's all-gathers of FP8 weights on two GPUs with NCCL: generated kernels, eager and compiled by Inductor."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import loka
from tests.support.gpu import ON_HOPPER
from tests.support.models import sharded_models as models
from tests.support.processes import gather_workers as workers
from tests.support.processes.checkpoint_workers import assert_loaded
from tests.support.processes.ranks import results_of, start_ranks

pytestmark = [
    *ON_HOPPER,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PACKAGES = (
    ("gatherable", "tower", ""),
    ("mixed", "tower", models.MIXED),
    ("tied", "tied", ""),
    ("recipes", "tower_of_recipes", models.RECIPES),
)
NAMES = ("gathers", "kinds", "loops", "compiled", "hybrid", "tied", "different", "probed", "resumed", "loaded")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The results of one function of gather_workers, by rank."""
    folder = tmp_path_factory.mktemp("gathers")
    for name, factory, rules in PACKAGES:
        policy = models.POLICY.format(name=name, factory=factory, rules=rules).replace("reference", "h100")
        (folder / f"{name}.yaml").write_text(policy)
        loka.generate(folder / f"{name}.yaml", folder / name)
    return partial(results_of, start_ranks(workers.start_on_gpus, 2, folder, NAMES))


def test_gathers_move_fp8_and_results_are_those_of_the_whole_weights(run):
    for nbytes, report, (now, before), same, apart in run("gathers"):
        assert now / before <= 0.53
        assert nbytes[False] - nbytes[True] == before - now
        assert report.splitlines()[0] == "FP8 all-gather: 4 of 4 FP8 weights"
        assert same == [True, True]
        assert apart == [[], []]


@pytest.mark.parametrize("name", ["kinds", "loops"])
def test_nothing_changes_a_bit(run, name):
    for found in run(name):
        assert {key: apart for key, apart in found.items() if key != "report" and apart} == {}


def test_compiled_models_change_no_bit(run):
    for found in run("compiled"):
        assert {key: apart for key, (apart, _) in found.items() if apart} == {}


def test_a_mesh_of_one_by_two_and_tied_weights(run):
    assert run("hybrid") == [([], 2)] * 2
    assert [apart for apart, _ in run("tied")] == [[], []]


def test_every_rank_is_told_which_rank_has_bound_something_else(run):
    for messages, _ in run("different"):
        assert "ranks that train together have bound different things" in messages["package"]
        assert "rank 0: generation" in messages["package"]
        assert "rank 1: generation" in messages["package"]


def test_a_probe_sees_the_same_of_gathered_weights(run):
    for names, same, calls in run("probed"):
        assert names
        assert set(same.values()) == {True}, same
        assert set(calls.values()) == {(2, 2)}


def test_a_resumed_job_is_the_one_that_was_not_interrupted(run):
    for found in run("resumed"):
        for kind, (apart, losses, guards, trained, _) in found.items():
            assert (apart, losses, guards) == ([], True, True), kind
            assert trained > 60


def test_checkpoints_of_two_ranks_load_on_two_and_on_one(run):
    for found in run("loaded"):
        assert_loaded(found)
